"""pass@k and maj@k against brute force, and intervals that hold what they should."""

from itertools import combinations

import pytest

from deploy.estimates import Grade, counts, majority_at, over_rows, pass_at


def grades(text: str) -> list[Grade]:
    """One grade per letter; capitals are right."""
    return [Grade(letter, letter.isupper()) for letter in text]


@pytest.mark.parametrize("text", ["Aaaa", "AAab", "aaaa", "AAAA", "abcAB"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_share_of_all_choices_of_k_samples_that_hold_a_right_one(text: str, k: int):
    chosen = list(combinations(grades(text), k))
    expected = sum(any(grade.correct for grade in some) for some in chosen) / len(chosen)
    assert pass_at(grades(text), k) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [("AAb", 3, 1), ("Abb", 3, 0), ("Abb", 1, 1 / 3), ("Ab", 2, 1), ("bA", 2, 0), ("AAbbbA", 3, 0.5)],
)
def test_the_majority_wins_and_of_equals_the_earlier(text: str, k: int, expected: float):
    assert majority_at(grades(text), k) == pytest.approx(expected)


def test_rows_with_too_few_samples_are_left_out():
    rows = [grades("Ab"), grades("aaaa"), grades("AAAA")]
    estimate = over_rows(rows, 4, pass_at)
    assert estimate.rows == 2 and estimate.mean == 0.5 and estimate.low == 0 and estimate.high == 1
    assert over_rows(rows, 5, pass_at) is None


def test_the_interval_narrows_with_the_rows():
    few, many = (over_rows([grades("Ab")] * n + [grades("ab")] * n, 1, pass_at) for n in (5, 500))
    assert few.low < many.low < 0.25 < many.high < few.high


def test_k_runs_over_powers_of_two_and_the_most_samples():
    assert counts(1) == [1] and counts(6) == [1, 2, 4, 6] and counts(8) == [1, 2, 4, 8] and counts(0) == []
