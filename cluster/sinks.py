"""The ways of a group's pushes to an aggregator: a local socket where both are on one host, else calls of its actor.

Used by the worker group, which makes one per aggregator, and by the outbox that pushes. Knows no parents.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self

from workers.local_socket import Streams, connect, receive, send
from workers.outputs import ChildRef, StepOutput

log = logging.getLogger(__name__)

Stops = list[ChildRef]


class OutputSink(Protocol):
    """Sends a step's output; the future resolves to the children the group should stop, or fails once the sink is
    gone. Whoever opened it is told that as well."""

    def push(self, output: StepOutput) -> "Future[Stops]": ...


@dataclass(frozen=True, slots=True)
class SinkAddress:
    """Where an aggregator is: its name, its actor, its Ray node, and its local address there."""

    name: str
    actor: Any
    node: str
    local: bytes


class ActorSink:
    """An OutputSink over a Ray actor with a `push` method. `lost` is called when a push fails."""

    def __init__(self, actor: Any, lost: Callable[[], None]) -> None:
        self._actor, self._lost = actor, lost

    def push(self, output: StepOutput) -> "Future[Stops]":
        future: Future[Stops] = self._actor.push.remote(output).future()
        future.add_done_callback(self._pushed)
        return future

    def _pushed(self, future: "Future[Stops]") -> None:
        if future.exception() is not None:
            self._lost()


class SocketSink:
    """An OutputSink over a local socket, driven by the event loop it was opened on; `push` comes from any thread.

    `lost` is called once when the other side is gone, also when nothing was to be sent.
    """

    def __init__(self, streams: Streams, lost: Callable[[], None]) -> None:
        self._reader, self._writer = streams
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[Future[Stops]] = deque()
        self._task = asyncio.create_task(self._take_answers())

    @classmethod
    async def open(cls, address: bytes, lost: Callable[[], None]) -> Self:
        """Raises OSError when nobody listens there."""
        return cls(await connect(address), lost)

    def push(self, output: StepOutput) -> "Future[Stops]":
        future: Future[Stops] = Future()
        self._loop.call_soon_threadsafe(self._send, output, future)
        return future

    def _send(self, output: StepOutput, future: "Future[Stops]") -> None:
        if self._task.done():
            future.set_exception(ConnectionError("the aggregator was lost"))
            return
        self._waiting.append(future)
        send(self._writer, output)

    async def _take_answers(self) -> None:
        try:
            with suppress(OSError, EOFError):
                while True:
                    stops = await receive(self._reader)
                    self._waiting.popleft().set_result(stops)
        finally:
            self._writer.close()
            for future in self._waiting:
                future.set_exception(ConnectionError("the aggregator was lost"))
            self._lost()


async def open_sink(address: SinkAddress, node: str, lost: Callable[[], None]) -> OutputSink:
    """The shorter way to an aggregator from this `node`; `lost` is called when the aggregator is gone."""
    if address.node == node:
        try:
            return await SocketSink.open(address.local, lost)
        except OSError as error:  # a container of its own, for one
            log.warning("no socket of an aggregator on this node, its actor is called instead: %s", error)
    return ActorSink(address.actor, lost)
