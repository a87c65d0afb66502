"""An aggregator's local socket: groups on its node push there (hop 2), and its router reads all parents (hop 3).

A reader names the parents it wants, and the updates come as they happen; what it has not read yet is folded. Used by
`actor` and the router; the groups' side is `cluster.sinks`.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Self

from aggregation.aggregator import Aggregator
from aggregation.results import AggregationError, AggregatorLostError, ParentUpdate
from workers.local_socket import connect, listen, receive, send
from workers.outputs import StepOutput

log = logging.getLogger(__name__)


class FeedServer:
    """The aggregator's side. Tells what a connection is for by what comes: a push, or the name of a parent to read."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._server: asyncio.Server | None = None

    async def listen(self) -> bytes:
        """The address at which groups and router of this host connect. Raises OSError where no socket can be made."""
        self._server, address = await listen(self._serve)
        return address

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.TaskGroup() as pumps:
                while True:
                    message = await receive(reader)
                    if isinstance(message, StepOutput):
                        send(writer, self._aggregator.push(message))
                    else:
                        pumps.create_task(self._pump(message, writer))
        except* (OSError, EOFError):
            pass  # a group or a router has left, and its pumps with it
        except* Exception:
            log.exception("a group or a router is disconnected")

    async def _pump(self, parent_id: str, writer: asyncio.StreamWriter) -> None:
        """Send every update of a parent, or the error that ends them."""
        try:
            async with aclosing(self._aggregator.updates(parent_id)) as updates:
                async for update in updates:
                    send(writer, (parent_id, update))
                    await writer.drain()
        except OSError:
            return  # the reader is gone
        except Exception as error:
            if not isinstance(error, AggregationError):
                log.exception("parent %s cannot be read", parent_id)
                error = AggregationError(f"parent {parent_id!r} cannot be read: {error}")
            send(writer, (parent_id, error))


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
    async def connect(cls, address: bytes) -> Self:
        """Raises OSError when nobody listens there."""
        return cls(*await connect(address))

    async def updates(self, parent_id: str) -> AsyncGenerator[ParentUpdate, None]:
        """See `Aggregator.updates`; at most one reader per parent. Raises AggregatorLostError as well."""
        if self._task.done():
            raise AggregatorLostError("the aggregator was lost")
        mailbox = self._mailboxes[parent_id] = _Mailbox()
        try:
            send(self._writer, parent_id)
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
                    parent_id, message = await receive(reader)
                    if (mailbox := self._mailboxes.get(parent_id)) is not None:
                        mailbox.put(message)
        finally:
            self.close()
            for mailbox in self._mailboxes.values():
                mailbox.put(AggregatorLostError("the aggregator was lost"))
