"""Batches over an engine in memory: complete, resumable at any moment, deterministic, and never stopped by one row."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from aggregation.parent_request import ParentRequest
from aggregation.results import ParentUpdate
from router.batch.runner import BatchError
from router.engine import GenerationError, NoHealthyGroupError
from tests.router.batch.conftest import Lab, each
from tests.router.toy_engine import ToyEngine

ROWS = [{"id": f"r{i}", "prompt": f"row {i}"} for i in range(20)]


class Killed(Exception):
    """Ends a run where it is."""


def test_c1_every_sample_of_every_row_is_there_once(lab: Lab):
    summary = lab.run(ROWS)
    keys = Counter((s["id"], s["sample"]) for s in lab.samples())
    assert keys == {(f"r{i}", k): 1 for i in range(20) for k in range(3)}
    assert (summary["done_rows"], summary["failed_rows"], summary["samples"]) == (20, 0, 60)
    assert summary["children_alive"] == 0 and lab.engine.running == 0


def test_samples_are_what_the_engine_made(lab: Lab):
    lab.run([{"id": "a", "prompt": "x", "samples": [4, 2], "seed": 9, "n": 2}])
    (parent,) = lab.engine.parents
    for sample in lab.samples():
        index = [4, 2].index(sample["sample"])
        assert sample["index"] == index and sample["seed"] == 9 and sample["error"] is None
        assert sample["token_ids"] == lab.engine.tokens(parent, index)
        assert sample["text"] == lab.engine.text(parent, index)
        assert sample["cumulative_logprob"] == sum(sample["logprobs"]) == -9.0 * len(sample["token_ids"])


def test_a_finished_batch_is_not_run_again(lab: Lab):
    first = lab.run(ROWS)
    before, asked = lab.content(), len(lab.engine.parents)
    assert lab.run(ROWS) == first
    assert lab.content() == before and len(lab.engine.parents) == asked


@pytest.mark.parametrize("after", [0, 1, 7, 30, 59])
def test_c2_a_batch_killed_and_run_again_has_the_same_content(lab: Lab, new_lab, after: int):
    """Killed after so many samples were added, of which those not yet flushed are lost."""
    expected = new_lab("undisturbed")
    expected.run(ROWS)

    runner = lab.start()
    add, flush = runner._store.add, runner._store.flush

    def dying_add(sample):
        if runner._store.done.samples == after:
            raise Killed
        add(sample)
        if runner._store.done.samples % 5 == 0:
            flush()

    runner._store.add = dying_add
    runner._store.flush = lambda: None
    with pytest.raises(Killed):
        asyncio.run(runner.run(each(ROWS)))
    runner._store.close()
    assert len(lab.samples()) == after // 5 * 5
    lab.run(ROWS)
    assert lab.content() == expected.content()


def test_only_the_missing_samples_of_a_family_are_asked_for(lab: Lab):
    class Half(ToyEngine):
        async def stream(self, parent, *, whole=False):
            async for update in super().stream(parent, whole=whole):
                update.deltas = [delta for delta in update.deltas if delta.index % 2]
                yield update
            raise Killed

    engine, lab.engine = lab.engine, Half(lab.engine.folder)
    with pytest.raises(Killed):
        lab.run([{"prompt": "x", "n": 6}])
    assert {s["sample"] for s in lab.samples()} == {1, 3, 5}
    lab.engine = engine
    lab.run([{"prompt": "x", "n": 6}])
    assert [parent.samples for parent in engine.parents] == [(0, 2, 4)]
    assert len(lab.samples()) == 6


def test_a_cancelled_batch_flushes_what_is_finished_and_frees_the_engine(lab: Lab):
    lab.engine.step_s = 0.01
    lab.rules = type(lab.rules)(key="k", defaults={"n": 3, "max_tokens": 40})

    async def cut() -> None:
        runner = lab.start()
        task = asyncio.create_task(runner.run(each(ROWS)))
        while not runner.progress.new_samples:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(lab.samples()) == runner.progress.new_samples > 0
        assert lab.engine.running == 0
        runner._store.close()

    asyncio.run(cut())


def test_bad_rows_get_an_error_each_and_never_stop_the_others(lab: Lab):
    bad = ["{not json", {"id": "long", "prompt": "x" * 999}, {"id": "typo", "prompt": "x", "temprature": 1}]
    summary = lab.run([*ROWS[:2], *bad, *ROWS[2:]])
    errors = {s["row"]: s["error"] for s in lab.samples() if s["error"]}
    assert sorted(errors) == [2, 3, 4]
    assert "not valid JSON" in errors[2]["message"]
    assert (errors[3]["code"], errors[3]["param"]) == ("context_length_exceeded", "prompt")
    assert errors[4]["param"] == "temprature" and "temprature" in errors[4]["message"]
    assert (summary["done_rows"], summary["failed_rows"], summary["samples"]) == (23, 3, 60)


def test_a_row_used_twice_is_an_error_also_when_the_batch_is_resumed(lab: Lab):
    rows = [*ROWS[:3], ROWS[1]]
    lab.run(rows)
    (error,) = [s["error"] for s in lab.samples() if s["error"]]
    assert "'r1' was used before" in error["message"] and error["param"] == "id"


class Flaky(ToyEngine):
    """Loses everything under way whenever a prompt of the poisonous length comes, and now and then for no reason."""

    def __init__(self, folder, poison: int | None = None, losses: int = 0):
        super().__init__(folder)
        self.poison = poison
        self.losses = losses
        self.lost = asyncio.Event()
        self.most = 0

    async def stream(self, parent: ParentRequest, *, whole: bool = False) -> AsyncIterator[ParentUpdate]:
        if self.running >= 3 and self.losses:
            self.losses -= 1
            self._lose()
        if self.poison is not None and len(parent.prompts[0]) == self.poison:
            self._lose()
            raise GenerationError("the group was lost")
        lost = self.lost
        async for update in super().stream(parent, whole=whole):
            if lost.is_set():
                raise GenerationError("the group was lost")
            yield update

    def _lose(self) -> None:
        self.lost.set()
        self.lost = asyncio.Event()


def test_what_is_lost_is_asked_again_with_the_same_content(lab: Lab, new_lab):
    expected = new_lab("undisturbed")
    expected.run(ROWS)
    lab.engine = Flaky(lab.engine.folder, losses=6)
    summary = lab.run(ROWS)
    assert summary["retries"] > 0 and lab.engine.losses < 6
    assert lab.content() == expected.content()


def test_a_poisonous_row_fails_alone(lab: Lab, new_lab):
    expected = new_lab("undisturbed")
    expected.run([row for row in ROWS if row["id"] != "r5"])
    lab.engine = Flaky(lab.engine.folder, poison=99)
    summary = lab.run([{**row, "prompt": "x" * 99} if row["id"] == "r5" else row for row in ROWS])
    failed = [s for s in lab.samples() if s["error"]]
    assert {(s["id"], s["sample"]) for s in failed} == {("r5", k) for k in range(3)}
    assert all("the group was lost" in s["error"]["message"] for s in failed)
    assert (summary["failed_rows"], summary["samples"]) == (1, 57)
    fine = {(s["id"], s["sample"]): s["token_ids"] for s in lab.samples() if not s["error"]}
    assert fine == {(s["id"], s["sample"]): s["token_ids"] for s in expected.samples()}


def test_a_batch_waits_for_groups_and_in_vain_only_for_so_long(lab: Lab):
    async def late() -> None:
        lab.engine.up = False
        runner = lab.start()
        task = asyncio.create_task(runner.run(each(ROWS)))
        await asyncio.sleep(0.05)
        assert not lab.engine.parents
        lab.engine.up = True
        assert (await task)["samples"] == 60
        runner._store.close()

    asyncio.run(late())
    lab.engine.up = False
    with pytest.raises(BatchError, match="no group"):
        lab.run(ROWS, force=True)


def test_having_no_group_for_a_moment_is_not_an_attempt(lab: Lab):
    class Starting(ToyEngine):
        refusals = 50

        async def stream(self, parent, *, whole=False):
            self.refusals -= 1
            if self.refusals > 0:
                raise NoHealthyGroupError("no group is ready")
            async for update in super().stream(parent, whole=whole):
                yield update

    lab.engine = Starting(lab.engine.folder)
    assert lab.run(ROWS)["failed_rows"] == 0


@pytest.mark.parametrize(("capacity", "n"), [(12, 3), (7, 3), (2, 3), (8, 30)])
def test_c4_the_window_bounds_the_sequences_under_way(lab: Lab, capacity: int, n: int):
    lab.capacity = capacity
    lab.rules = type(lab.rules)(key="k", defaults={"n": n, "max_tokens": 4})
    most = 0

    class Counting(ToyEngine):
        alive = 0

        async def stream(self, parent, *, whole=False):
            nonlocal most
            self.alive += parent.num_children
            most = max(most, self.alive)
            try:
                async for update in super().stream(parent, whole=whole):
                    yield update
            finally:
                self.alive -= parent.num_children

    lab.engine = Counting(lab.engine.folder)
    assert lab.run(ROWS)["samples"] == 20 * n
    assert max(1, capacity - n) < most <= max(capacity, 1)


def test_the_longest_rows_in_sight_go_first(lab: Lab):
    lab.capacity = 1
    lab.rules = type(lab.rules)(key="k")
    lab.run([{"prompt": "x", "max_tokens": tokens} for tokens in (1, 1, 1, 7, 3, 9)])
    started = [parent.params.max_tokens for parent in lab.engine.parents]
    assert started[-5:] == sorted(started[-5:], reverse=True)


def test_the_last_family_is_split_over_the_groups(lab: Lab, new_lab):
    alone = new_lab("alone")
    alone.run([{"prompt": "x", "n": 6}])
    lab.pieces = 2
    lab.run([{"prompt": "x", "n": 6}])
    assert [parent.samples for parent in lab.engine.parents] == [(0, 1, 2), (3, 4, 5)]
    assert [parent.samples for parent in alone.engine.parents] == [tuple(range(6))]
    assert lab.content() == alone.content()


def test_several_prompts_of_one_openai_line_are_resumed_too(lab: Lab, new_lab):
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": ["one", "two"], "n": 2},
    }
    lab.rules = type(lab.rules)(key="k", replies=True)
    lab.run([line])
    expected = lab.content()
    kept = [json.loads(record) for record in expected][:3]
    other = new_lab("resumed")
    other.rules = lab.rules
    other.start()._store.close()
    (other.folder / "part-00000000.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    other.run([line])
    assert other.content() == expected
