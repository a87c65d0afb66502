"""Carries the updates of all parents from an aggregator to the router on its node, over one local socket.

An item of a Ray stream costs a millisecond of processor time on either side; a message here a tenth. The reader names
the parents it wants, and the updates come as they happen; what it has not read yet is folded. The socket lies in a
folder of the same user's, and only until the reader has come: messages are pickles. Used by `actor` and the router.
"""

import asyncio
import logging
import pickle
import tempfile
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any, Self

from aggregation.aggregator import Aggregator
from aggregation.results import AggregationError, AggregatorLostError, ParentUpdate

log = logging.getLogger(__name__)
LENGTH = 4
"""Bytes before each message that hold its length."""


async def _receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises OSError or EOFError when the other side is gone."""
    size = int.from_bytes(await reader.readexactly(LENGTH))
    return pickle.loads(await reader.readexactly(size))


def _send(writer: asyncio.StreamWriter, message: Any) -> None:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(len(body).to_bytes(LENGTH) + body)


class FeedServer:
    """The aggregator's side; serves one reader."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> str:
        """The path a reader on this host connects to. Raises OSError where no socket can be made."""
        folder = tempfile.TemporaryDirectory(prefix="choral-")
        path = Path(folder.name) / "feed"

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            folder.cleanup()
            try:
                await self._serve(reader, writer)
            finally:
                writer.close()

        self._server = await asyncio.start_unix_server(serve, path)
        return str(path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError):
            while True:
                task = asyncio.create_task(self._pump(await _receive(reader), writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for task in self._tasks:
            task.cancel()

    async def _pump(self, parent_id: str, writer: asyncio.StreamWriter) -> None:
        """Send every update of a parent, or the error that ends them."""
        try:
            async with aclosing(self._aggregator.updates(parent_id)) as updates:
                async for update in updates:
                    _send(writer, (parent_id, update))
                    await writer.drain()
        except OSError:
            return  # the reader is gone
        except Exception as error:
            if not isinstance(error, AggregationError):
                log.exception("parent %s cannot be read", parent_id)
                error = AggregationError(f"parent {parent_id!r} cannot be read: {error}")
            _send(writer, (parent_id, error))


class _Mailbox:
    """What came for one parent and was not taken yet, as one update."""

    def __init__(self) -> None:
        self._update: ParentUpdate | None = None
        self._error: AggregationError | None = None
        self._wake = asyncio.Event()

    def put(self, message: ParentUpdate | AggregationError) -> None:
        if isinstance(message, AggregationError):
            self._error = message
        elif self._update is None:
            self._update = message
        else:
            self._update.extend(message)
        self._wake.set()

    async def take(self) -> ParentUpdate:
        """Waits for an update; an error comes after all that came before it."""
        await self._wake.wait()
        update, self._update = self._update, None
        if update is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._wake.clear()
        return update


class FeedReader:
    """The router's side: the streams of any number of parents. Made by `connect`, lives on one event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._mailboxes: dict[str, _Mailbox] = {}
        self._task = asyncio.create_task(self._receive(reader))

    @classmethod
    async def connect(cls, path: str) -> Self:
        """Raises OSError when nobody listens there."""
        return cls(*await asyncio.open_unix_connection(path))

    async def updates(self, parent_id: str) -> AsyncGenerator[ParentUpdate, None]:
        """See `Aggregator.updates`; at most one reader per parent. Raises AggregatorLostError as well."""
        if self._task.done():
            raise AggregatorLostError("the aggregator was lost")
        mailbox = self._mailboxes[parent_id] = _Mailbox()
        try:
            _send(self._writer, parent_id)
            ended = False
            while not ended:
                update = await mailbox.take()
                ended = update.usage is not None
                yield update
        finally:
            del self._mailboxes[parent_id]

    async def lost(self) -> None:
        """Returns when the aggregator is gone."""
        await asyncio.wait((self._task,))

    def close(self) -> None:
        """Streams that still run end with an error."""
        self._writer.close()

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        try:
            with suppress(OSError, EOFError):
                while True:
                    parent_id, message = await _receive(reader)
                    if (mailbox := self._mailboxes.get(parent_id)) is not None:
                        mailbox.put(message)
        finally:
            self.close()
            for mailbox in self._mailboxes.values():
                mailbox.put(AggregatorLostError("the aggregator was lost"))
