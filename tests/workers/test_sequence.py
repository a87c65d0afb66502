"""One sequence for equal children: computed once, yet every child is its own, and nothing is left of it at the end."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engines import Bits, Lab, family, finish
from workers.engine import NOTHING_TO_DRAW, Engine
from workers.outputs import ChildRef, ChildSpec, FamilyRequest, FinishReason, Haste, ParentDelta, StepOutput
from workers.sequence import Family, Status

PROMPT = [49, 1890, 1398, 282, 260, 9244, 28, 260, 13039, 288, 260, 2388, 808, 351, 582, 1027, 563, 971, 282, 601, 42]
"""A question whose greedy answer does not repeat one token."""
OTHER = [2, 200, 13, 55, 90]
CHILDREN = 5
TOKENS = 24


def greedy(name: str = "p", *, n: int = CHILDREN, **params) -> FamilyRequest:
    return family(name, PROMPT, range(n), **{"temperature": 0.0, "max_tokens": TOKENS, **params})


@pytest.fixture(scope="module")
def lab(embedded_model: Path) -> Lab:
    return Lab(embedded_model)


@pytest.fixture(scope="module")
def alone(lab: Lab) -> Bits:
    """What one greedy child gets."""
    return lab.run([greedy(n=1)])["p", 0]


def count_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows through the model by step, filled as the engine runs."""
    rows: list[int] = []
    run = engine._ranks.run

    def counting(step, draws):
        rows.append(len(step.token_ids))
        return run(step, draws)

    monkeypatch.setattr(engine, "_ranks", SimpleNamespace(run=counting))
    return rows


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logprobs": None},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"logit_bias": ((123, 20.0),), "min_tokens": 6, "stop_token_ids": (123,)},
        {"allowed_token_ids": (5, 6, 7), "top_k": 2},
    ],
)
def test_greedy_children_equal_separate_runs_of_one_child_each(lab: Lab, params):
    together = lab.run([greedy(n=3, **params)])
    for sample in range(3):
        one = replace(greedy(n=1, **params), children=(ChildSpec(0, sample),))
        assert together["p", sample] == lab.run([one])["p", sample]


def test_a_greedy_family_is_computed_once(lab: Lab, alone: Bits, monkeypatch: pytest.MonkeyPatch):
    engine = lab.engine(prefix_cache=False)
    rows = count_rows(engine, monkeypatch)
    engine.submit([greedy()])
    assert set(finish(engine, [greedy()]).values()) == {alone}
    assert rows == [len(PROMPT)] + [1] * (TOKENS - 1)
    assert engine.stats()["prompt_tokens_computed_total"] == len(PROMPT)
    assert engine.stats()["generation_tokens_total"] == TOKENS


def test_siblings_with_noise_stay_apart(lab: Lab, monkeypatch: pytest.MonkeyPatch):
    engine, request = lab.engine(), greedy(temperature=0.01)
    rows = count_rows(engine, monkeypatch)
    engine.submit([request])
    finish(engine, [request])
    assert rows == [len(PROMPT)] + [CHILDREN] * (TOKENS - 1)


def test_greedy_and_sampled_families_share_a_batch_and_change_nothing(lab: Lab, alone: Bits, monkeypatch):
    sampled = [family("q", OTHER, range(3), seed=1), family("r", PROMPT, range(2), seed=3, repetition_penalty=1.3)]
    engine, requests = lab.engine(), [sampled[0], greedy(), sampled[1]]
    rows = count_rows(engine, monkeypatch)
    engine.submit(requests)
    results = finish(engine, requests)
    assert max(rows[1:]) == 3 + 1 + 2
    assert {results.pop(("p", sample)) for sample in range(CHILDREN)} == {alone}
    assert results == lab.run(sampled)


def test_one_slot_is_enough_for_all_equal_children(lab: Lab, alone: Bits, monkeypatch: pytest.MonkeyPatch):
    engine = lab.engine(max_running=1)
    rows = count_rows(engine, monkeypatch)
    engine.submit([greedy()])
    assert numbers(engine) == (0, CHILDREN)
    heard = Heard(engine)
    heard.step()
    heard.step()
    assert numbers(engine) == (CHILDREN, 0)
    heard.run()
    assert heard.tokens == {index: list(alone[0]) for index in range(CHILDREN)} and len(rows) == TOKENS


def numbers(engine: Engine) -> tuple[int, int]:
    """Children running and waiting."""
    return engine.stats()["children_running"], engine.stats()["children_waiting"]


class Heard:
    """Steps an engine and keeps what each child of parent p got. A delta after a finish or an abort is an error."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: defaultdict[int, list[int]] = defaultdict(list)
        self.over: dict[int, FinishReason] = {}

    def step(self) -> None:
        self.take(self.engine.step().get("sink", {}).get("p", ParentDelta("p")))

    def take(self, parent: ParentDelta) -> None:
        for index, delta in parent.children.items():
            assert index not in self.over and index == delta.index
            self.tokens[index] += delta.token_ids
            if delta.finish_reason is not None:
                self.over[index] = delta.finish_reason
        self.engine.scheduler.check()

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.engine.blocks.num_used == 0 and numbers(self.engine) == (0, 0)

    def abort(self, *indices: int) -> None:
        for _ in range(2):
            self.engine.abort(ChildRef("p", index) for index in indices)
            self.engine.scheduler.check()
        self.over.update(dict.fromkeys(indices, FinishReason.ABORT))


PHASES: dict[str, Callable[[Family], bool]] = {
    "queued": lambda p: not p.stem.blocks,
    "prefill": lambda p: 0 < p.stem.computed < p.prompt_len,
    "first token": lambda p: p.forked and p.sequences[0].status is Status.WAITING,
    "decoding": lambda p: p.sequences[0].status is Status.RUNNING and len(p.sequences[0].output_ids) > 2,
    "preempted": lambda p: p.sequences[0].status is Status.WAITING and len(p.sequences[0].output_ids) > 2,
}


@pytest.fixture(params=PHASES)
def heard(lab: Lab, request: pytest.FixtureRequest) -> Heard:
    """The greedy family p in some phase, behind an older family of two whose growth will preempt it."""
    heard = Heard(lab.engine(max_step_tokens=8, kv_blocks=8))
    heard.engine.submit([family("q", OTHER, range(2), max_tokens=40, logprobs=None), greedy()])
    while not PHASES[request.param](heard.engine.scheduler.families["p", 0]):
        heard.step()
    return heard


def test_an_aborted_child_leaves_alone(heard: Heard, alone: Bits):
    before = sum(numbers(heard.engine)), len(heard.tokens[0])
    heard.abort(0, 3)
    assert sum(numbers(heard.engine)) == before[0] - 2
    heard.run()
    assert {index: len(heard.tokens[index]) for index in (0, 3)} == dict.fromkeys((0, 3), before[1])
    assert {index: tuple(heard.tokens[index]) for index in (1, 2, 4)} == dict.fromkeys((1, 2, 4), alone[0])
    assert {heard.over[index] for index in (1, 2, 4)} == {FinishReason.LENGTH}
    assert heard.engine.scheduler.counters.preemptions > 0


def test_the_last_abort_ends_the_sequence(heard: Heard):
    for index in range(CHILDREN):
        assert ("p", 0) in heard.engine.scheduler.families
        heard.abort(index)
    assert ("p", 0) not in heard.engine.scheduler.families
    heard.engine.abort([ChildRef("q", 0), ChildRef("q", 1)])
    heard.run()


def test_a_lost_sink_takes_all_children(heard: Heard):
    heard.abort(2)
    heard.engine.abort_sink("sink")
    assert not heard.engine.has_work
    heard.run()


def test_a_failed_group_tells_every_live_child(heard: Heard):
    heard.abort(2)
    heard.take(heard.engine.fail_all("gone")["sink"]["p"])
    ends = {index: reason for index, reason in heard.over.items() if reason is FinishReason.ERROR}
    assert sorted(ends) == [0, 1, 3, 4]
    heard.run()


def test_deltas_of_equal_children_fold_apart(lab: Lab, alone: Bits):
    """Several steps folded in place, as an outbox does; one child is aborted between them."""
    engine, folded = lab.engine(), StepOutput("g")
    engine.submit([greedy()])
    for step in range(TOKENS):
        folded.fold(engine.step()["sink"]["p"])
        if step == 4:
            engine.abort([ChildRef("p", 1)])
    children = folded.parents["p"].children
    assert {index: len(delta.token_ids) for index, delta in children.items()} == {0: 24, 1: 5, 2: 24, 3: 24, 4: 24}
    assert all(tuple(delta.token_ids) == alone[0][: len(delta.token_ids)] for delta in children.values())
    assert all([entry.token_id for entry in delta.logprobs or ()] == delta.token_ids for delta in children.values())


def test_a_whole_reply_is_urgent_with_the_last_token_of_equal_children(lab: Lab):
    engine = lab.engine()
    engine.submit([replace(greedy(), stream=False)])
    haste = [engine.step()["sink"]["p"].haste for _ in range(TOKENS)]
    assert haste == [Haste.NONE] * (TOKENS - 1) + [Haste.NOW]


def test_equal_children_without_a_token_to_draw_fail_each_by_name(lab: Lab):
    engine = lab.engine()
    engine.submit([greedy(allowed_token_ids=(5,), stop_token_ids=(5,), min_tokens=3)])
    deltas = engine.step()["sink"]["p"].children
    assert {index: delta.error for index, delta in deltas.items()} == dict.fromkeys(range(CHILDREN), NOTHING_TO_DRAW)
    assert not engine.has_work and engine.blocks.num_used == 0
