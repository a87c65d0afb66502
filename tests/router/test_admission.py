"""Child slots: all or none, and back to zero after any history."""

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission import Admission
from router.errors import ApiError, Fault


@given(limit=st.integers(1, 50), steps=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5), st.booleans())))
def test_slots_are_all_or_none_and_come_back(limit: int, steps: list[tuple[int, int, bool]]) -> None:
    admission = Admission(limit)
    held: list[tuple[int, ExitStack]] = []
    rejected = 0
    for children, leave, fails in steps:
        taken = sum(count for count, _ in held)
        stack = ExitStack()
        try:
            stack.enter_context(admission.reserve(children))
            assert taken + children <= limit
            held.append((children, stack))
        except ApiError as error:
            assert taken + children > limit
            assert error.fault is (Fault.FAMILY_TOO_LARGE if children > limit else Fault.BUSY)
            rejected += children <= limit
        if held and leave < len(held):
            _, gone = held.pop(leave)
            if fails:
                with pytest.raises(RuntimeError), gone:
                    raise RuntimeError
            else:
                gone.close()
        assert admission.in_use == sum(count for count, _ in held) <= limit
    for _, stack in held:
        stack.close()
    assert admission.in_use == 0
    assert admission.rejected == rejected


def test_metrics_say_what_they_count() -> None:
    admission = Admission(7)
    with admission.reserve(3):
        lines = admission.metrics().splitlines()
    assert "choral_admission_children_in_use 3" in lines
    assert "choral_admission_children_limit 7" in lines
    assert "choral_admission_rejected_parents_total 0" in lines
