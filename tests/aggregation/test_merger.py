import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation.merger import merge
from aggregation.results import ChoiceDelta, IncompleteReplyError


def choice(index: int, finish: str | None = "stop") -> ChoiceDelta:
    return ChoiceDelta(index, "", [], None, 0, finish)


@given(order=st.permutations(range(9)))
def test_c1_choices_are_sorted_whatever_their_order(order):
    assert [c.index for c in merge([choice(index) for index in order], 9)] == list(range(9))


@pytest.mark.parametrize(
    ("choices", "fault"),
    [
        ([choice(0), choice(2)], r"missing: \[1\]"),
        ([choice(0), choice(1), choice(2), choice(1)], r"repeated: \[1\]"),
        ([choice(0), choice(1), choice(2), choice(3)], r"unknown: \[3\]"),
        ([choice(0), choice(1, None), choice(2)], r"unfinished: \[1\]"),
        ([], r"missing: \[0, 1, 2\]"),
    ],
)
def test_c1_what_is_wrong_is_named(choices, fault):
    with pytest.raises(IncompleteReplyError, match=fault):
        merge(choices, 3)
