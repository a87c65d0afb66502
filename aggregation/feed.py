"""An aggregator's local socket: groups on its node push there (hop 2), and its router opens, reads and closes parents.

What a reader has not read yet is folded. Used by `actor` and the router; the groups' side is `cluster.sinks`.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, Self

from aggregation.aggregator import Aggregator
from aggregation.results import AggregationError, AggregatorLostError, ParentUpdate
from workers.local_calls import Caller, listen_for_calls

METHODS = ("push", "open", "place", "updates", "result", "fail", "fail_group", "close", "counters")
"""What of `Aggregator` can be called."""


class FeedServer:
    """The aggregator's side."""

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator
        self._server: asyncio.Server | None = None

    async def listen(self) -> bytes:
        """The address at which groups and router of this host connect. Raises OSError where no socket can be made."""
        methods = {name: getattr(self._aggregator, name) for name in METHODS}
        self._server, address = await listen_for_calls(methods)
        return address


class _Mailbox:
    """What came for one parent and was not taken yet, as one update."""

    def __init__(self) -> None:
        self._update: ParentUpdate | None = None
        self._error: BaseException | None = None
        self._wake = asyncio.Event()

    def put(self, update: ParentUpdate | None, error: BaseException | None) -> None:
        self._error = error
        if self._update is None:
            self._update = update
        elif update is not None:
            self._update.extend(update)
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


class Feed:
    """The router's side, on one event loop."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.lost, self.close = caller.lost, caller.close

    @classmethod
    async def connect(cls, address: bytes) -> Self:
        """Raises OSError when nobody listens there."""
        return cls(await Caller.connect(address))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of `Aggregator` but for `updates`. Raises AggregationError, AggregatorLostError among them."""
        with _as_aggregation_errors():
            return await self._caller.call(method, *args, **kwargs)

    async def updates(self, parent_id: str) -> AsyncGenerator[ParentUpdate, None]:
        """See `Aggregator.updates`; at most one reader per parent. Raises as `call` does."""
        mailbox = _Mailbox()
        number = self._caller.follow(mailbox.put, "updates", parent_id)
        try:
            ended = False
            while not ended:
                with _as_aggregation_errors():
                    update = await mailbox.take()
                ended = update.usage is not None
                yield update
        finally:
            self._caller.forget(number)


@contextmanager
def _as_aggregation_errors() -> Iterator[None]:
    try:
        yield
    except AggregationError:
        raise
    except ConnectionError as error:
        raise AggregatorLostError("the aggregator was lost") from error
    except Exception as error:
        raise AggregationError(f"the aggregator failed: {error}") from error
