import io
import itertools
import json

import pytest
from rich.cells import cell_len
from rich.console import Console

from deploy.client import Child, Family, TokenProb
from deploy.live_view import (
    Frame,
    JsonView,
    LiveView,
    PlainView,
    clean,
    last_line,
    last_lines,
    panel_columns,
    summary,
)

USAGE = {"completion_tokens": 9, "prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 3}}


def family(n, text="word 世界\n\x1b[2Jword\t" * 90):
    return Family([Child(index, index, text, 1234, "stop" if index % 3 == 0 else None) for index in range(n)])


def drawn(frame, width, height):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, record=True)
    console.print(frame)
    return console.export_text().splitlines()


@pytest.mark.parametrize("n", [1, 2, 4, 7, 8, 9, 16, 33, 64, 128, 500])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (40, 10), (20, 5)])
def test_a_frame_never_overflows_the_terminal(n, width, height):
    lines = drawn(Frame(family(n), "Why?\n" * 50), width, height)
    assert len(lines) < height
    assert max(map(cell_len, lines)) <= width


@pytest.mark.parametrize("n", [1, 4, 8, 16, 64])
def test_every_child_is_on_the_frame(n):
    text = "\n".join(drawn(Frame(family(n), "Why?"), 80, 24))
    mark = "[{}]" if panel_columns(n, 80, 21) else "{} 1234 "
    assert [index for index in range(n) if mark.format(index) not in text] == []
    assert f"{n - -(-n // 3)} running · {-(-n // 3)} finished · {n * 1234} tokens" in text
    assert "not shown" not in text


def test_children_without_room_are_counted_and_the_unfinished_come_first():
    children = family(128)
    lines = drawn(Frame(children, "Why?"), 80, 24)
    assert "62 not shown" in lines[-1]
    assert sum(line.count("▸") for line in lines) == 66
    assert "✓" not in "".join(lines)


def test_a_panel_shows_the_end_of_its_text():
    children = family(1, text="first " + "middle " * 400 + "last")
    text = "\n".join(drawn(Frame(children, "Why?"), 80, 24))
    assert "last" in text
    assert "first" not in text


def test_earlier_lines_stay_as_they_are_while_a_text_grows():
    console = Console(width=80)
    text = "some words of different lengths that wrap and go on " * 20
    shown = [last_lines(text[:end], console, 38, 8).plain.split("\n") for end in range(600, len(text))]
    for before, after in itertools.pairwise(shown):
        assert after[:-1] == before[:-1] or after[:-2] == before[1:-1]


def test_control_characters_do_not_reach_the_terminal():
    assert clean("a\x1b[2Jb\rc\x9bd\te\nf") == "a·[2Jb·c·d    e\nf"


@pytest.mark.parametrize("text", ["", "short", "世界" * 50, "a世" * 50, "x" * 500])
def test_a_tail_fills_its_cell_exactly(text):
    for width in range(1, 30):
        assert cell_len(last_line(text, width)) == width


def test_the_live_view_ends_with_every_text_in_full_and_the_summary():
    console = Console(file=io.StringIO(), width=120, height=24, force_terminal=True, record=True)
    children = Family([Child(0, 0, "zero [bold]\nlines", 4, "stop"), Child(1, 1, "one", 5, "length")])
    children.seed, children.usage = 77, USAGE
    with (view := LiveView(children, "Why?", console)):
        view.grew(children.children)
    view.ended("choral sample Why?")
    text = console.export_text()
    for part in (
        "[0] stop, 4 tokens",
        "zero [bold]\nlines",
        "[1] length, 5 tokens",
        "one",
        f"{summary(children)}\n",
    ):
        assert part in text
    assert text.rstrip().endswith("\nreplay: choral sample Why?")


def test_the_replay_command_keeps_its_one_line_in_a_narrow_terminal():
    console = Console(file=io.StringIO(), width=30, height=24, force_terminal=True, record=True)
    children = Family([Child(0, 0, "a", 1, "stop")], seed=77, usage=USAGE)
    command = "choral sample --seed 77 --samples 0 'a question of  many words that is longer than the terminal is wide'"
    LiveView(children, "Why?", console).ended(command)
    assert f"replay: {command}" in console.export_text().splitlines()


def test_plain_lines_come_once_per_child_when_it_has_finished():
    out = io.StringIO()
    first, second = Child(0, 0, "a", 1), Child(1, 1, "x\ny", 3, "stop", 7)
    second.logprobs = [TokenProb("x", -0.25, (("x", -0.25), ("z", -2.0)))]
    children = Family([first, second], seed=77, usage=USAGE)
    with (view := PlainView(children, out)):
        view.grew([first, second])
        first.text, first.finish_reason, first.tokens = "ab", "length", 2
        view.grew([first])
        view.ended("choral sample Why?")
    assert out.getvalue().splitlines() == [
        "[1] x",
        "[1] y",
        "[1] | 'x' -0.250   of 'x' -0.250  'z' -2.000",
        "[1] -- stop at 7, 3 tokens",
        "[0] ab",
        "[0] -- length, 2 tokens",
        "seed 77 · 2 children: 1 length, 1 stop · 9 completion tokens · 5 prompt tokens (3 cached)",
        "replay: choral sample Why?",
    ]


def test_json_is_one_object_with_choices_seed_and_usage():
    out = io.StringIO()
    child = Child(0, 3, "a", 1, "stop", logprobs=[TokenProb("a", -0.5, (("a", -0.5),))])
    children = Family([child], "id", "tiny", 77, USAGE)
    with (view := JsonView(children, out)):
        view.grew([child])
        assert out.getvalue() == ""
        view.ended("unused")
    logprobs = [{"token": "a", "logprob": -0.5, "top": [["a", -0.5]]}]
    choice = {"index": 0, "sample": 3, "text": "a", "tokens": 1, "finish_reason": "stop", "stop_reason": None}
    assert json.loads(out.getvalue()) == {
        "id": "id",
        "model": "tiny",
        "seed": 77,
        "choices": [choice | {"logprobs": logprobs}],
        "usage": USAGE,
    }
