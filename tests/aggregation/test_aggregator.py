import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation.aggregator import Aggregator
from aggregation.results import (
    DuplicateParentError,
    ParentClosedError,
    ParentUpdate,
    UnknownParentError,
    Usage,
)
from workers.outputs import ChildDelta, ChildRef, FinishReason, StepOutput

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def alive(aggregator: Aggregator) -> tuple[int, int]:
    counters = aggregator.counters()
    return counters["parents_alive"], counters["children_alive"]


async def collect(updates: AsyncIterator[ParentUpdate]) -> list[ParentUpdate]:
    return [update async for update in updates]


def text_by_index(updates: list[ParentUpdate]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for delta in (delta for update in updates for delta in update.deltas):
        texts[delta.index] = texts.get(delta.index, "") + delta.text
    return texts


@given(data=st.data())
def test_c1_any_order_of_pushes_and_reads_gives_the_same_choices(
    tokenizer_folder, tokenizer, make_parent, make_step, data
):
    """n children, any order of their deltas, a reader that is now fast and now slow: nothing is lost or repeated."""
    n = data.draw(st.integers(1, 5))
    texts = [data.draw(st.text("aé😀 end", min_size=1, max_size=8)) for _ in range(n)]
    ids = [tokenizer.encode(text).ids for text in texts]
    order = data.draw(st.permutations([k for k in range(n) for _ in ids[k]]))
    naps = data.draw(st.sets(st.integers(0, len(order)), max_size=4))

    async def run() -> tuple[list[ParentUpdate], tuple[int, int]]:
        aggregator = Aggregator(tokenizer_folder)
        aggregator.open(make_parent(n), stream=True)
        reader = asyncio.create_task(collect(aggregator.updates("p")))
        left = [list(tokens) for tokens in ids]
        for position, index in enumerate(order):
            token = left[index].pop(0)
            finish = {} if left[index] else {index: LENGTH}
            assert aggregator.push(make_step({index: [token]}, finish)) == []
            if position in naps:
                await asyncio.sleep(0)
        return await reader, alive(aggregator)

    updates, state = asyncio.run(run())
    assert text_by_index(updates) == dict(enumerate(texts))
    assert state == (0, 0)
    for update in updates:
        indices = [delta.index for delta in update.deltas]
        assert indices == sorted(set(indices))
        assert all(delta.text or delta.finish_reason for delta in update.deltas)
    every = [delta for update in updates for delta in update.deltas]
    for index in range(n):
        mine = [delta for delta in every if delta.index == index]
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + ["length"]
        assert [token for delta in mine for token in delta.token_ids] == ids[index]
    usage = Usage(prompt_tokens=3, completion_tokens=sum(map(len, ids)), cached_tokens=0)
    assert [update.usage for update in updates] == [None] * (len(updates) - 1) + [usage]


@given(seed=st.randoms(use_true_random=False))
def test_c1_the_streamed_reply_is_the_whole_reply(tokenizer_folder, tokenizer, make_parent, make_step, seed):
    texts = ["the end of it", "hello 😀 END or not", "END", "über"]
    ids = [tokenizer.encode(text).ids for text in texts]
    order = [k for k in range(4) for _ in ids[k]]
    seed.shuffle(order)

    async def run():
        aggregator = Aggregator(tokenizer_folder)
        streamed = make_parent(4, parent_id="s", stop=("END", "d o"))
        aggregator.open(streamed, stream=True)
        aggregator.open(make_parent(4, parent_id="w", stop=("END", "d o")), stream=False)
        reader = asyncio.create_task(collect(aggregator.updates("s")))
        waiter = asyncio.create_task(aggregator.result("w"))
        left = [list(tokens) for tokens in ids]
        for index in order:
            token = left[index].pop(0)
            for parent_id in "sw":
                finish = {} if left[index] else {index: LENGTH}
                aggregator.push(make_step({index: [token]}, finish, parent_id=parent_id))
            if seed.random() < 0.4:
                await asyncio.sleep(0)
        return await reader, await waiter

    updates, result = asyncio.run(run())
    assert [choice.text for choice in result.choices] == ["the en", "hello 😀 ", "", "über"]
    assert text_by_index(updates) == {choice.index: choice.text for choice in result.choices}
    assert updates[-1].usage == result.usage


def test_a_matched_stop_string_tells_the_group_once_and_drops_what_follows(aggregator, tokenizer, make_parent):
    e, n, d, a = (tokenizer.token_to_id(char) for char in "ENDa")
    aggregator.open(make_parent(2, stop=("END",)), stream=False)
    step = StepOutput("g")
    step.parent("p").add(ChildDelta(0, [a, e, n, d]))
    step.parent("p").add(ChildDelta(1, [e, n, d], finish_reason=LENGTH))
    # Child 1 has ended by itself in the same step: there is nothing left to stop.
    assert aggregator.push(step) == [ChildRef("p", 0)]
    late = StepOutput("g")
    late.parent("p").add(ChildDelta(0, [a, a], finish_reason=FinishReason.ABORT))
    assert aggregator.push(late) == []
    result = asyncio.run(aggregator.result("p"))
    assert [(c.text, c.finish_reason, c.stop_reason, c.completion_tokens) for c in result.choices] == [
        ("a", "stop", "END", 4),
        ("", "stop", "END", 3),
    ]
    assert result.usage.completion_tokens == 7


def test_a_group_that_goes_on_with_a_stopped_child_is_told_again(aggregator, tokenizer, make_parent, make_step):
    a = tokenizer.token_to_id("a")
    aggregator.open(make_parent(1, stop=("a",)), stream=False)
    assert aggregator.push(make_step({0: [a]})) == [ChildRef("p", 0)]
    assert aggregator.push(make_step({0: [a]})) == [ChildRef("p", 0)]


def test_c5_all_children_of_unknown_parents_are_stopped(aggregator, make_parent, make_step):
    aggregator.open(make_parent(2), stream=True)
    step = make_step({0: [5], 1: [5]})
    step.fold(make_step({0: [5], 3: [6]}, parent_id="gone").parents["gone"])
    assert aggregator.push(step) == [ChildRef("gone", 0), ChildRef("gone", 3)]


def test_c5_close_says_where_children_run_and_leaves_nothing(aggregator, make_parent, make_step):
    aggregator.open(make_parent(4), stream=True)
    aggregator.place("p", {0: "g1", 1: "g1", 2: "g2", 3: "g2"})
    aggregator.push(make_step({1: [5]}, {1: LENGTH}, group="g1"))
    assert alive(aggregator) == (1, 3)
    expected = [("g1", ChildRef("p", 0)), ("g2", ChildRef("p", 2)), ("g2", ChildRef("p", 3))]
    assert aggregator.close("p") == expected
    assert aggregator.close("p") == []
    assert alive(aggregator) == (0, 0)
    counters = aggregator.counters()
    assert (counters["children_finished_length_total"], counters["children_finished_abort_total"]) == (1, 3)
    assert aggregator.push(make_step({0: [5]})) == [ChildRef("p", 0)]


def test_c5_a_reader_that_leaves_is_cleaned_up_by_close(aggregator, make_parent, make_step):
    async def run():
        aggregator.open(make_parent(3), stream=True, placement={0: "g", 1: "g", 2: "g"})
        aggregator.push(make_step({0: [70]}))
        updates = aggregator.updates("p")
        assert [delta.index for delta in (await anext(updates)).deltas] == [0]
        await updates.aclose()
        return aggregator.close("p")

    assert asyncio.run(run()) == [("g", ChildRef("p", index)) for index in range(3)]
    assert alive(aggregator) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
def test_c5_a_reader_that_leaves_without_closing_is_cleaned_up_by_the_groups(
    aggregator, make_parent, make_step, stream
):
    async def run():
        aggregator.open(make_parent(2), stream=stream, placement={0: "g", 1: "h"})
        reading = collect(aggregator.updates("p")) if stream else aggregator.result("p")
        reader = asyncio.create_task(reading)
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])
        assert alive(aggregator) == (1, 2)
        assert aggregator.push(make_step({0: [5]}, {0: LENGTH})) == [ChildRef("p", 0)]
        assert aggregator.fail_group("h", "lost") == [ChildRef("p", 1)]

    asyncio.run(run())
    assert alive(aggregator) == (0, 0)


def test_c5_closing_ends_the_reader_with_an_error(aggregator, make_parent):
    async def run():
        aggregator.open(make_parent(2), stream=False)
        reader = asyncio.create_task(aggregator.result("p"))
        await asyncio.sleep(0)
        aggregator.close("p")
        aggregator.open(make_parent(3), stream=False)
        await reader

    with pytest.raises(ParentClosedError, match="'p'"):
        asyncio.run(run())
    # The late end of the first reader leaves the new parent of the same id alone.
    assert alive(aggregator) == (1, 3)


def test_failed_children_come_with_their_own_error(aggregator, make_parent, make_step, tokenizer):
    a = tokenizer.token_to_id("a")
    aggregator.open(make_parent(4), stream=False, placement={0: "g1", 1: "g2", 2: "g2", 3: "g1"})
    aggregator.push(make_step({0: [a], 3: [a]}, {0: LENGTH}, group="g1"))
    aggregator.push(make_step({1: [a]}, {1: LENGTH}, group="g2"))
    assert aggregator.fail_group("g2", "g2 was lost") == [ChildRef("p", 2)]
    aggregator.fail("p", [0, 3], "rank 1 died")
    aggregator.fail("never opened", None, "ignored")
    result = asyncio.run(aggregator.result("p"))
    assert [(c.index, c.text, c.finish_reason, c.error) for c in result.choices] == [
        (0, "a", "length", None),
        (1, "a", "length", None),
        (2, "", "error", "g2 was lost"),
        (3, "a", "error", "rank 1 died"),
    ]
    assert aggregator.counters()["children_finished_error_total"] == 2
    assert alive(aggregator) == (0, 0)


def test_failing_all_children_ends_a_stream(aggregator, make_parent):
    async def run():
        aggregator.open(make_parent(3), stream=True)
        aggregator.fail("p", None, "no group")
        return await collect(aggregator.updates("p"))

    (update,) = asyncio.run(run())
    assert [(d.index, d.finish_reason, d.error) for d in update.deltas] == [(k, "error", "no group") for k in range(3)]
    assert update.usage == Usage(3, 0, 0)


def test_a_failed_child_that_its_group_still_runs_is_stopped(aggregator, make_parent, make_step):
    aggregator.open(make_parent(2), stream=True)
    aggregator.fail("p", [1], "given up")
    assert aggregator.push(make_step({0: [5], 1: [5]})) == [ChildRef("p", 1)]


def test_misuse_is_named(aggregator, make_parent):
    aggregator.open(make_parent(2), stream=True)
    with pytest.raises(DuplicateParentError, match="'p'"):
        aggregator.open(make_parent(2), stream=True)
    with pytest.raises(ValueError, match="samples"):
        aggregator.open(make_parent(0, parent_id="q"), stream=True)
    with pytest.raises(ValueError, match="stop"):
        aggregator.open(make_parent(1, parent_id="q", stop=("",)), stream=True)
    with pytest.raises(ValueError, match=r"no child \[2\]"):
        aggregator.open(make_parent(2, parent_id="q"), stream=True, placement={2: "g"})
    with pytest.raises(UnknownParentError, match="'q'"):
        aggregator.place("q", {0: "g"})
    with pytest.raises(UnknownParentError, match="'q'"):
        asyncio.run(aggregator.result("q"))
    assert alive(aggregator) == (1, 2)


def test_a_parent_has_one_reader(aggregator, make_parent):
    async def run():
        aggregator.open(make_parent(1), stream=False)
        reader = asyncio.create_task(aggregator.result("p"))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="being read"):
            await aggregator.result("p")
        aggregator.fail("p", None, "over")
        return await reader

    assert asyncio.run(run()).choices[0].error == "over"


def test_a_push_of_32_children_is_cheap(aggregator, tokenizer, make_parent, make_step):
    """The bound is ten times what it takes, so that only a change of its order fails."""
    a = tokenizer.token_to_id("a")
    aggregator.open(make_parent(32), stream=True)
    steps = [make_step({index: [a] for index in range(32)}) for _ in range(50)]
    start = time.process_time()
    for step in steps:
        aggregator.push(step)
    assert (time.process_time() - start) / len(steps) < 1.5e-3
