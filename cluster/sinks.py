"""The ways of a group's pushes to an aggregator: a local socket where both are on one host, else calls of its actor.

Used by the worker group, which makes one per aggregator, and by the outbox that pushes. Knows no parents.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, Self

from workers.local_calls import Caller
from workers.outputs import ChildRef, StepOutput

log = logging.getLogger(__name__)

Stops = list[ChildRef]


class OutputSink(Protocol):
    """Sends a step's output; the future resolves to the children the group should stop, or fails once the sink is
    gone. Whoever opened it is told that as well."""

    def push(self, output: StepOutput) -> "Future[Stops]": ...


@dataclass(frozen=True, slots=True)
class SinkAddress:
    """Where an aggregator is: its name, its actor, its Ray node, and its local address there.

    `actor` is None in messages that do not leave the node.
    """

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

    `lost` is called once when the other side is gone, also when nothing was to be sent. An aggregator that cannot take
    a push is lost, too.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def open(cls, address: bytes, lost: Callable[[], None]) -> Self:
        """Raises OSError when nobody listens there."""
        return cls(await Caller.connect(address, lost))

    def push(self, output: StepOutput) -> "Future[Stops]":
        future: Future[Stops] = Future()
        future.add_done_callback(self._pushed)
        self._loop.call_soon_threadsafe(self._caller.call_into, future, "push", output)
        return future

    def _pushed(self, future: "Future[Stops]") -> None:
        if (error := future.exception()) is None:
            return
        if not isinstance(error, ConnectionError):
            log.error("the aggregator could not take a push and is given up", exc_info=error)
        self._caller.close()


async def open_sink(address: SinkAddress, node: str, lost: Callable[[], None]) -> OutputSink:
    """The shorter way to an aggregator from this `node`; `lost` is called when the aggregator is gone.

    Raises OSError when there is no way.
    """
    if address.node == node:
        try:
            return await SocketSink.open(address.local, lost)
        except OSError as error:  # a container of its own, for one
            if address.actor is None:
                raise
            log.warning("no socket of an aggregator on this node, its actor is called instead: %s", error)
    return ActorSink(address.actor, lost)
