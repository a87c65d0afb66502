"""Families on groups: siblings together, load in sequences and tokens, counts back to zero."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.dispatcher import MISSED_ROUNDS, Dispatcher, NoGroupError


def dispatcher(*groups: str) -> Dispatcher:
    d = Dispatcher(tokens_per_child=100)
    d.update_groups(set(groups))
    return d


def test_without_groups_placing_fails():
    with pytest.raises(NoGroupError):
        Dispatcher().place("p", [0], 1)


def test_a_family_weighs_its_children():
    d = dispatcher("a", "b")
    assert d.place("p", list(range(8)), 10) == "a"
    assert [d.place(str(i), [0], 10) for i in range(7)] == ["b"] * 7


def test_a_long_prompt_weighs_its_tokens():
    d = dispatcher("a", "b")
    d.place("p", [0], 1000)
    assert [d.place(str(i), [0], 10) for i in range(5)] == ["b"] * 5


def test_finished_children_make_room():
    d = dispatcher("a", "b")
    d.place("p", list(range(4)), 8)
    d.place("q", [0], 8)
    for index in range(4):
        d.finished("p", index)
        d.finished("p", index)
    assert d.place("r", [0], 8) == "a"


def test_a_silent_group_is_reported_and_forgotten_when_it_is_dropped():
    d = dispatcher("a", "b")
    d.place("p", [0, 1], 8)
    assert [d.update_groups({"b"}) for _ in range(MISSED_ROUNDS)] == [*[set()] * (MISSED_ROUNDS - 1), {"a"}]
    assert d.groups == ["b"]
    d.drop_group("a")
    assert d.update_groups({"b"}) == set()
    assert d.counters() == {"children_placed": 0, "tokens_placed": 0}
    d.finished("p", 0)
    assert d.place("q", [0], 8) == "b"


def test_a_group_that_answers_again_was_never_lost():
    d = dispatcher("a")
    d.place("p", [0], 8)
    for answered in (set(), set(), {"a"}, set(), set()):
        assert d.update_groups(answered) == set()
    assert d.counters()["children_placed"] == 1


def test_a_silent_group_keeps_its_children_but_gets_no_more_until_it_answers():
    d = dispatcher("a", "b")
    assert d.place("p", [0], 8) == "a"
    for _ in range(MISSED_ROUNDS):
        d.update_groups({"b"})
    assert [d.place(str(i), list(range(4)), 8) for i in range(3)] == ["b"] * 3
    assert d.counters()["children_placed"] == 13
    d.update_groups({"a", "b"})
    assert d.place("q", [0], 8) == "a"


def test_a_group_that_missed_a_round_comes_last():
    d = dispatcher("a", "b")
    d.update_groups({"b"})
    assert [d.place(str(i), [0], 8) for i in range(3)] == ["b"] * 3
    d.update_groups(set())
    assert d.place("p", [0], 8) == "b"


def test_a_family_its_group_refused_is_placed_elsewhere_and_counted_once():
    d = dispatcher("a", "b")
    assert d.place("p", [0, 1], 8) == "a"
    d.leave("a")
    assert d.place("p", [0, 1], 8) == "b"
    assert d.counters() == {"children_placed": 2, "tokens_placed": 8}
    d.leave("b")
    with pytest.raises(NoGroupError):
        d.place("q", [0], 8)
    d.release("p", range(2))
    assert d.counters() == {"children_placed": 0, "tokens_placed": 0}


def test_load_stays_even_over_many_families():
    d = dispatcher(*map(str, range(8)))
    counts = dict.fromkeys(d.groups, 0)
    for i in range(480):
        counts[d.place(str(i), list(range(1 + i % 4)), 10 + i % 50)] += 1 + i % 4
    assert max(counts.values()) - min(counts.values()) <= 8


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 300), st.integers(0, 5), st.booleans()), max_size=30))
def test_counts_return_to_zero_however_parents_end(parents: list[tuple[int, int, int, bool]]):
    d = dispatcher("a", "b", "c")
    for i, (n, tokens, finished, lost) in enumerate(parents):
        where = d.place(str(i), list(range(n)), tokens)
        for index in range(min(finished, n)):
            d.finished(str(i), index)
        if lost and len(d.groups) > 1:
            d.drop_group(where)
    for i, (n, *_) in enumerate(parents):
        d.release(str(i), range(n))
    assert d.counters() == {"children_placed": 0, "tokens_placed": 0}
    assert all(d._groups[g].children == 0 for g in d.groups)
