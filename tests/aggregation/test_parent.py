import asyncio
from collections import Counter

import pytest

from aggregation.parent import ParentRecord
from aggregation.results import ParentClosedError, Usage
from workers.outputs import ChildDelta, FinishReason, ParentDelta, PromptReport


@pytest.fixture
def record(make_parent, vocabulary):
    return ParentRecord(make_parent(2, prompts=2), vocabulary, Counter(), stream=True)


def finished(index: int, tokens: list[int]) -> ChildDelta:
    return ChildDelta(index, tokens, finish_reason=FinishReason.LENGTH)


def test_c6_usage_counts_prompts_once_children_all_and_cached_the_least(record, tokenizer):
    """Prompt 0 ran on two groups, one of which had more of it cached; prompt 1 ran on one group."""
    a = tokenizer.token_to_id("a")
    first = ParentDelta("p", {0: finished(0, [a]), 2: finished(2, [a, a])}, [PromptReport(0, 2)])
    first.prompts.append(PromptReport(1, 1))
    second = ParentDelta("p", {1: finished(1, [a]), 3: finished(3, [])}, [PromptReport(0, 0)])
    record.push("g1", first)
    record.push("g2", second)
    assert record.take().usage == Usage(prompt_tokens=6, completion_tokens=4, cached_tokens=1)


def test_unread_deltas_fold_into_one_per_choice_sorted(record, tokenizer):
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    for index in (3, 0, 3, 2, 3):
        record.push("g", ParentDelta("p", {index: ChildDelta(index, [a, b])}))
    deltas = record.take().deltas
    assert [(d.index, d.text, d.completion_tokens) for d in deltas] == [
        (0, "ab", 2),
        (2, "ab", 2),
        (3, "ababab", 6),
    ]
    assert record.take().deltas == []


def test_a_child_reported_by_another_group_is_stopped_there(record, tokenizer):
    a = tokenizer.token_to_id("a")
    record.place({0: "here"})
    stray = ParentDelta("p", {0: ChildDelta(0, [a]), 1: ChildDelta(1, [a]), 9: ChildDelta(9, [a])})
    assert [ref.index for ref in record.push("there", stray)] == [0, 9]
    assert [d.index for d in record.take().deltas] == [1]
    assert record.children_on("there") == [1]


def test_naming_a_child_that_does_not_exist_is_refused(record):
    with pytest.raises(ValueError, match=r"no child \[4\]"):
        record.place({4: "g"})
    with pytest.raises(ValueError, match=r"no child \[-1\]"):
        record.fail([0, -1], "lost")
    assert record.take().deltas == []


def test_closing_ends_a_waiting_reader(record):
    async def read_and_close():
        reader = asyncio.create_task(record.changed())
        await asyncio.sleep(0)
        record.close()
        await reader

    with pytest.raises(ParentClosedError):
        asyncio.run(read_and_close())


def test_siblings_are_counted_with_how_many_differ(make_parent, vocabulary, tokenizer):
    a, b = tokenizer.token_to_id("a"), tokenizer.token_to_id("b")
    totals: Counter[str] = Counter()
    record = ParentRecord(make_parent(3, prompts=2), vocabulary, totals, stream=True)
    tokens = [[a], [b], [a], [a, b], [a, b], [a, b]]
    for index, ids in enumerate(tokens):
        record.push("g", ParentDelta("p", {index: finished(index, ids)}))
    assert (totals["siblings_total"], totals["siblings_distinct_total"]) == (6, 2 + 1)


def test_greedy_siblings_are_not_counted_as_collapsed(make_parent, vocabulary):
    totals: Counter[str] = Counter()
    record = ParentRecord(make_parent(2, temperature=0.0), vocabulary, totals, stream=True)
    record.push("g", ParentDelta("p", {0: finished(0, [5]), 1: finished(1, [5])}))
    assert totals["parents_finished_total"] == 1
    assert "siblings_total" not in totals
