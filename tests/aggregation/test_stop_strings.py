import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation.stop_strings import StopMatch, StopStrings

TEXT = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The slow obvious way: the first place where any stop string ends, and the longest that ends there."""
    for end in range(1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            return max(ending, key=len), end
    return None


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_the_match_does_not_depend_on_how_the_text_is_cut(text, stops, cuts):
    strings, state, read, found = StopStrings(stops), 0, 0, None
    bounds = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for bound in bounds:
        state, match = strings.scan(state, text[read:bound])
        if match:
            found = (match.stop, read + match.end)
            break
        read = bound
    assert found == first_match(text, stops)


@given(text=TEXT, stops=STOPS)
def test_held_is_the_longest_end_of_the_text_that_begins_a_stop_string(text, stops):
    strings = StopStrings(stops)
    state, match = strings.scan(0, text)
    if match is None:
        suffixes = (text[len(text) - size :] for size in range(len(text), 0, -1))
        expected = next((len(s) for s in suffixes if any(stop.startswith(s) for stop in stops)), 0)
        assert strings.held(state) == expected


def test_scanning_goes_on_after_a_match_that_is_ignored():
    strings = StopStrings(["aba"])
    state, match = strings.scan(0, "xaba")
    assert match == StopMatch("aba", 4)
    assert strings.scan(state, "ba")[1] == StopMatch("aba", 2)


def test_no_stop_strings_hold_nothing():
    strings = StopStrings([])
    assert not strings
    assert strings.scan(0, "anything") == (0, None)
    assert strings.held(0) == 0


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop"):
        StopStrings(["a", ""])
