"""The thread that drives one group's engine: takes calls in between steps, steps while there is work, ships deltas.

It builds the engine, too: OpenMP keeps threads for every thread that computes, and once it counts more of them than
there are cores they sleep at every wait instead of spinning. Everyone else talks to the engine through `call`. Used by
the worker group; knows nothing of Serve.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from cluster.outbox import Outbox
from cluster.sinks import OutputSink
from workers.engine import Engine, Outputs
from workers.outputs import ChildRef, FamilyRequest

log = logging.getLogger(__name__)
T = TypeVar("T")

DRAIN_POLL_S = 0.05


class EngineDriver:
    """`build` makes the engine, on the thread; what it raises is raised here. Deltas that can wait travel together:
    see `Outbox` for `push_interval_s`. `idle` is called at least every `idle_s` seconds without work, to keep the
    group's channel warm.

    When a step fails, every child gets an error delta, no call is taken any more, and `failed` is called.
    """

    def __init__(
        self,
        group: str,
        build: Callable[[], Engine],
        *,
        push_interval_s: float,
        idle: Callable[[], None],
        idle_s: float,
        failed: Callable[[], None],
    ) -> None:
        self.failure: str | None = None
        self._failed = failed
        self._group = group
        self._push_interval_s = push_interval_s
        self._idle = idle
        self._idle_s = idle_s
        self._outboxes: dict[str, Outbox] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._run, args=(build, built), name="engine", daemon=True)
        self._thread.start()
        self._engine = built.result()
        self.stats = self._engine.stats()
        """Numbers as of the last step or call: never later than the deltas it shipped."""

    def call(self, function: Callable[[Engine], T]) -> "Future[T]":
        """Run `function` on the engine between two steps; after a failure of the group the future says so.

        A future that is cancelled before its turn is never run.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self.failure is not None:
                    raise RuntimeError(self.failure)
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            self._calls.append(run)
            self._wake.notify()
        if self.failure is not None:
            self._take_calls()
        return future

    def submit(self, families: Sequence[FamilyRequest], sink: OutputSink) -> "Future[None]":
        """Queue families and route their deltas to `sink`: both or neither."""

        def submit(engine: Engine) -> None:
            engine.submit(families)
            for name in {family.sink for family in families} - self._outboxes.keys():
                self._outboxes[name] = self._open(name, sink)

        return self.call(submit)

    def _open(self, name: str, sink: OutputSink) -> Outbox:
        def stop(refs: list[ChildRef]) -> None:
            self.call(lambda engine: engine.abort(refs))

        return Outbox(self._group, sink, stop, interval_s=self._push_interval_s)

    def drop(self, name: str) -> "Future[None]":
        """Stop what reports to a sink that is gone, and forget it. Idempotent."""

        def drop(engine: Engine) -> None:
            self._outboxes.pop(name, None)
            if (children := engine.abort_sink(name)) > 0:
                log.warning("an aggregator was lost, and with it %d children", children)

        return self.call(drop)

    def drain(self) -> None:
        """Return when no child is left and all deltas have arrived, or when the group has failed or was stopped."""
        with suppress(RuntimeError):
            while not self._stopping and (self.call(lambda engine: engine.has_work).result() or not self.shipped):
                time.sleep(DRAIN_POLL_S)

    def stop(self) -> None:
        """Leave the thread after the current step; work that is left is dropped."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _run(self, build: Callable[[], Engine], built: "Future[Engine]") -> None:
        try:
            self._engine = build()
            built.set_result(self._engine)
        except BaseException as error:
            built.set_exception(error)
            return
        self._drive()

    def _drive(self) -> None:
        try:
            while self._take_calls():
                if self._engine.has_work:
                    outputs = self._engine.step()
                    self.stats = self._engine.stats()
                    self._ship(outputs)
                else:
                    self._idle()
        except Exception as error:
            log.exception("the group cannot go on")
            self.failure = f"the group failed: {type(error).__name__}"
            self._ship(self._engine.fail_all(self.failure))
            self._take_calls()
            self._failed()

    def _take_calls(self) -> bool:
        """Run the calls that wait, after sleeping while there is nothing to do; False when told to stop."""
        if not self._engine.has_work:
            for outbox in self._outboxes.values():
                outbox.flush()
        with self._wake:
            if not self._calls and not self._engine.has_work and not self._stopping:
                self._wake.wait(self._idle_s)
            calls = list(self._calls)
            self._calls.clear()
        for run in calls:
            run()
        if calls:
            self.stats = self._engine.stats()
        return not self._stopping

    def _ship(self, outputs: Outputs) -> None:
        for sink, parents in outputs.items():
            self._outboxes[sink].add(parents.values())

    @property
    def shipped(self) -> bool:
        """Whether every delta has reached its aggregator."""
        return all(outbox.empty for outbox in list(self._outboxes.values()))
