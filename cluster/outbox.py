"""Carries a group's deltas to one aggregator: at most one push is in flight, what happens meanwhile is folded in.

A slow aggregator therefore delays nobody and nothing is queued without bound: one pending message per sink. Tokens that
follow each other quickly share a push; first tokens and finishes never wait. The answer of a push names children to
stop. Called by the engine driver; knows only that a sink has a `push`.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from cluster.sinks import OutputSink
from workers.outputs import ChildRef, Haste, ParentDelta, StepOutput

PARENTS_AT_ONCE, CHILDREN_AT_ONCE, SLOWEST = 8, 16, 6.0
PATIENCE_S = 1.0
"""Tokens nobody reads yet wait so much longer, not for ever: on another node only a push finds a sink lost."""


def pace(parents: int, children: int) -> float:
    """Intervals to wait after a push: its way to the clients costs per parent and child, taken from the model."""
    return min(1 + (parents - 1) / PARENTS_AT_ONCE + (children - 1) / CHILDREN_AT_ONCE, SLOWEST)


class Outbox:
    """`on_stop` gets the children to stop.

    What can wait does so for `interval_s` after the push before it, longer if that carried much, or until the next
    `add` after that; see `Haste`.
    """

    def __init__(
        self,
        group: str,
        sink: OutputSink,
        on_stop: Callable[[list[ChildRef]], object],
        *,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._sink = sink
        self._on_stop = on_stop
        self._lock = threading.Lock()
        self._pending: StepOutput | None = None
        self._in_flight = False
        self._interval_s = interval_s
        self._clock = clock
        self._haste = Haste.NONE
        self._due = clock()

    @property
    def empty(self) -> bool:
        with self._lock:
            return self._pending is None and not self._in_flight

    def add(self, parents: Iterable[ParentDelta]) -> None:
        with self._lock:
            if self._pending is None:
                self._pending = StepOutput(self._group)
            for parent in parents:
                self._haste = max(self._haste, parent.haste)
                self._pending.fold(parent)
        self._send()

    def flush(self) -> None:
        """Send what waits for more to come: there is none."""
        with self._lock:
            if self._pending is not None:
                self._haste = Haste.NOW
        self._send()

    def _send(self) -> None:
        with self._lock:
            now = self._clock()
            late = now - self._due
            wanted = Haste.NONE if late >= PATIENCE_S else Haste.SOON if late >= 0 else Haste.NOW
            if self._in_flight or self._pending is None or self._haste < wanted:
                return
            output, self._pending, self._in_flight = self._pending, None, True
            children = sum(len(parent.children) for parent in output.parents.values())
            self._haste, self._due = Haste.NONE, now + self._interval_s * pace(len(output.parents), children)
        self._sink.push(output).add_done_callback(self._pushed)

    def _pushed(self, future: "Future[list[ChildRef]]") -> None:
        if future.exception() is not None:
            return  # the flag stays set: nothing is ever sent to a lost sink again
        if stops := future.result():
            self._on_stop(stops)
        with self._lock:
            self._in_flight = False
        self._send()
