"""What routers ask of a group: routers of its node over a local socket, others through Serve. The pushes go from here.

All of it runs on an event loop in a thread of its own, because Serve's stands still while Serve ends the replica, and
the children that are left shall be finished and delivered meanwhile. Used by the worker group; knows no Ray calls.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from cluster.engine_driver import EngineDriver
from cluster.sinks import OutputSink, SinkAddress, open_sink
from workers.local_calls import listen_for_calls
from workers.outputs import ChildRef, FamilyRequest

T = TypeVar("T")


class GroupCalls:
    """`node` is the Ray node of the group, `address` the local socket at which routers of that node reach it.

    Raises OSError where no socket can be made.
    """

    def __init__(self, driver: EngineDriver, node: str) -> None:
        self._driver, self._node = driver, node
        self._sinks: dict[str, OutputSink] = {}
        self._opening = asyncio.Lock()
        self._leaving = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="calls", daemon=True).start()
        listening = listen_for_calls({"submit": self._submit, "abort": self._abort})
        self._server, self.address = self._run(listening).result()

    async def submit(self, families: Sequence[FamilyRequest], aggregator: SinkAddress) -> bool:
        """Take families, all or none; False if the group is leaving. Raises what the engine has against them."""
        return await asyncio.wrap_future(self._run(self._submit(families, aggregator)))

    async def abort(self, children: Sequence[ChildRef]) -> None:
        """Stop children; returns when none of them is in any rank's next step."""
        await asyncio.wrap_future(self._run(self._abort(children)))

    def leave(self) -> None:
        """Take no more families."""
        self._leaving = True

    def _run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _submit(self, families: Sequence[FamilyRequest], aggregator: SinkAddress) -> bool:
        sink = await self._sink(aggregator)
        if self._leaving:
            return False
        await asyncio.wrap_future(self._driver.submit(families, sink))
        return True

    async def _abort(self, children: Sequence[ChildRef]) -> None:
        await asyncio.wrap_future(self._driver.call(lambda engine: engine.abort(children)))

    async def _sink(self, aggregator: SinkAddress) -> OutputSink:
        """The way to an aggregator, opened by the first family that reports to it."""

        def lost() -> None:
            self._sinks.pop(aggregator.name, None)
            self._driver.drop(aggregator.name)

        async with self._opening:
            if aggregator.name not in self._sinks:
                self._sinks[aggregator.name] = await open_sink(aggregator, self._node, lost)
            return self._sinks[aggregator.name]
