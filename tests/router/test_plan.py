"""How many tokens a child gets, and what makes a parent's id its own."""

import pytest

from router.errors import ApiError
from router.plan import TokenBudget


@pytest.mark.parametrize(
    ("asked", "default", "longest", "expected"),
    [
        (None, 16, 10, 16),
        (None, 16, 95, 5),
        (None, None, 10, 90),
        (90, 16, 10, 90),
        (0, 16, 100, 0),
    ],
)
def test_budget_in_a_context_of_one_hundred(
    asked: int | None, default: int | None, longest: int, expected: int
) -> None:
    assert TokenBudget("max_tokens", asked, default).fit(longest, 100, "prompt") == expected


@pytest.mark.parametrize(
    ("asked", "longest", "param"),
    [(None, 100, "prompt"), (1, 100, "prompt"), (0, 101, "prompt"), (91, 10, "max_tokens")],
)
def test_what_does_not_fit_names_what_to_change(asked: int | None, longest: int, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        TokenBudget("max_tokens", asked, 16).fit(longest, 100, "prompt")
    assert caught.value.param == param
    assert caught.value.fault.value.code == "context_length_exceeded"
