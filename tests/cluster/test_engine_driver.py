"""The thread around an engine: deltas reach the sink, calls run between steps, a failure ends every child by name."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.engine_driver import EngineDriver
from tests.engines import Lab, family
from workers.engine import Engine
from workers.outputs import ChildRef, FinishReason, StepOutput


class Sink:
    """Collects what is pushed; `wanted` finishes set `done`. May ask to stop every child it hears of."""

    def __init__(self, wanted: int, *, stop: bool = False) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finishes: list[FinishReason] = []
        self.errors: list[str | None] = []
        self.done = threading.Event()
        self.pushes = 0
        self._wanted = wanted
        self._stop = stop

    def push(self, output: StepOutput) -> Future[list[ChildRef]]:
        self.pushes += 1
        refs = []
        for parent in output.parents.values():
            for child in parent.children.values():
                refs.append(ChildRef(parent.parent_id, child.index))
                self.tokens.setdefault((parent.parent_id, child.index), []).extend(child.token_ids)
                if child.finish_reason is not None:
                    self.finishes.append(child.finish_reason)
                    self.errors.append(child.error)
        if len(self.finishes) >= self._wanted:
            self.done.set()
        future: Future[list[ChildRef]] = Future()
        future.set_result(refs if self._stop else [])
        return future


@pytest.fixture(scope="module")
def lab(tiny_checkpoint: Callable[[str], Path]) -> Lab:
    return Lab(tiny_checkpoint("llama"), dtype="float32")


def drive(engine: Engine, failed: Callable[[], None] = lambda: None) -> EngineDriver:
    return EngineDriver("g", lambda: engine, push_interval_s=0, idle=lambda: None, idle_s=0.05, failed=failed)


def test_every_token_reaches_the_sink(lab: Lab):
    request = family("p", [1, 2, 3], range(4))
    expected = lab.run([request])
    driver, sink = drive(lab.engine()), Sink(4)
    driver.submit([request], sink).result(10)
    assert sink.done.wait(20)
    assert {i: tuple(t) for (_, i), t in sink.tokens.items()} == {i: bits[0] for (_, i), bits in expected.items()}
    driver.stop()


def test_drain_returns_when_every_token_of_every_child_has_reached_its_sink(lab: Lab):
    driver, sink = drive(lab.engine()), Sink(3)
    driver.submit([family("p", [1, 2, 3], range(3), max_tokens=40, ignore_eos=True)], sink).result(10)
    driver.drain()
    assert [len(tokens) for tokens in sink.tokens.values()] == [40] * 3
    assert sink.finishes == [FinishReason.LENGTH] * 3
    driver.stop()
    driver.drain()


def test_a_family_nobody_reads_before_it_is_whole_is_pushed_when_it_is(lab: Lab):
    driver, sink = drive(lab.engine()), Sink(3)
    request = replace(family("p", [1, 2, 3], range(3), max_tokens=40, ignore_eos=True), stream=False)
    driver.submit([request], sink).result(10)
    assert sink.done.wait(20)
    assert sink.pushes < 10 and [len(tokens) for tokens in sink.tokens.values()] == [40] * 3
    driver.stop()


def test_drain_returns_when_what_nobody_read_was_aborted(lab: Lab):
    driver, sink = drive(lab.engine()), Sink(99)
    request = replace(family("p", [1, 2, 3], range(3), max_tokens=100, ignore_eos=True), stream=False)
    driver.submit([request], sink).result(10)
    while not driver.stats["generation_tokens_total"]:
        pass
    driver.call(lambda engine: engine.abort([ChildRef("p", index) for index in range(3)])).result(10)
    drained = threading.Thread(target=driver.drain, daemon=True)
    drained.start()
    drained.join(10)
    assert not drained.is_alive()
    driver.stop()


def test_a_refused_family_fails_its_call_and_nothing_else(lab: Lab):
    driver, sink = drive(lab.engine()), Sink(1)
    with pytest.raises(ValueError, match="max_model_len"):
        driver.submit([family("p", [1], [0], max_tokens=10**6)], sink).result(10)
    driver.submit([family("p", [1], [0])], sink).result(10)
    assert sink.done.wait(20)
    driver.stop()


def test_a_call_cancelled_before_its_turn_is_not_run(lab: Lab):
    driver, sink = drive(lab.engine()), Sink(1)
    gate = threading.Event()
    driver.call(lambda engine: gate.wait(10))
    cancelled = driver.submit([family("p", [1, 2], [0])], sink)
    assert cancelled.cancel()
    gate.set()
    assert driver.call(lambda engine: engine.has_work).result(10) is False
    driver.stop()


def test_children_the_sink_wants_stopped_are_stopped(lab: Lab):
    driver, sink = drive(lab.engine()), Sink(99, stop=True)
    driver.submit([family("p", [1, 2, 3], range(3), max_tokens=200)], sink).result(10)
    while driver.call(lambda engine: engine.has_work).result(10):
        pass
    assert all(len(tokens) < 200 for tokens in sink.tokens.values())
    assert driver.call(lambda engine: engine.blocks.num_used).result(10) == 0
    driver.stop()


def test_a_failing_step_ends_every_child_and_refuses_later_calls(lab: Lab):
    engine = lab.engine()
    failed = threading.Event()
    driver, sink = drive(engine, failed.set), Sink(3)

    def broken(step, draws):
        raise ConnectionError("rank lost")

    engine._ranks = SimpleNamespace(run=broken)
    driver.submit([family("p", [1, 2, 3], range(3))], sink).result(10)
    assert sink.done.wait(10) and failed.wait(10)
    assert sink.errors == ["the group failed: ConnectionError"] * 3
    with pytest.raises(RuntimeError, match="group failed"):
        driver.call(Engine.stats).result(10)


def test_the_engine_is_built_on_the_thread_that_steps_it():
    threads: list[str] = []

    def build() -> Engine:
        threads.append(threading.current_thread().name)
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        EngineDriver("g", build, push_interval_s=0, idle=lambda: None, idle_s=0.05, failed=lambda: None)
    assert threads == ["engine"]
