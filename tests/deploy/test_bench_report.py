import io
import json

import jsonschema
import pytest

from deploy.bench_client import ChoiceClock, ParentTiming
from deploy.bench_floor import StepTime
from deploy.bench_load import Grid, Workload
from deploy.bench_report import Table, as_json, client_share, floor_lines, medians, numbers, progress_line, ratios
from deploy.bench_run import PromptTokens, Repetition, RowResult

SERVERS = [{"url": "http://a", "model": "m"}, {"url": "http://b", "model": "m"}]


def parent(start, *choices, tokens=10):
    """A parent whose choices are lists of moments at which text came; the last one is the finish."""
    clocks = []
    for moments in choices:
        clock = ChoiceClock()
        for moment in moments:
            clock.hear(start + moment, text=True, finished=moment == moments[-1])
        clocks.append(clock)
    return ParentTiming(start, clocks, tokens=tokens)


def failed(start=0.0):
    return ParentTiming(start, [ChoiceClock()], error="it broke")


def paced(step, tokens=4, counted=None):
    """A repetition of one parent with two children that grow in step."""
    moments = [step * (1 + number) for number in range(tokens)]
    return Repetition([parent(0.0, moments, moments, tokens=2 * tokens)], counted, 0.125)


def results(*servers, **axes):
    row = {
        "prompt_len": [128], "n": [2], "parents": [1], "max_tokens": [4], "top_p": [1.0], "logprobs": [None],
        "temperature": [1.0], "prefix": ["cold"],
    }  # fmt: skip
    rows = Grid(**{**row, **axes}).rows()
    load = Workload(rows=rows, repeat=len(servers[0]), seed=5, vocab_size=9)
    return load, [RowResult(row, [], list(servers)) for row in rows]


def test_numbers_of_a_repetition():
    repetition = Repetition(
        [
            parent(1.0, [0.5, 1.0, 3.0], [1.0, 1.5, 2.0], tokens=6),
            parent(2.0, [1.5, 2.0], [2.0, 4.0], tokens=4),
            failed(),
        ],
        PromptTokens(256, 128),
        0.0,
    )
    assert numbers(repetition) == {
        "tokens_per_s": 10 / 5.0,
        "first_token_s": 1.0,
        "all_first_tokens_s": 1.5,
        "makespan_s": 3.5,
        "gap_s": 0.5,  # of 0.5, 0.5, 0.5, 0.5, 2.0, 2.0
        "gap_p95_s": 2.0,
        "prompt_tokens_asked": 256,
        "prompt_tokens_computed": 128,
    }


def test_the_95th_percentile_leaves_the_worst_twentieth_out():
    moments = [float(moment) for moment in [*range(20), 100]]
    assert numbers(Repetition([parent(0.0, moments)], None, 0.0))["gap_p95_s"] == 1.0
    assert numbers(Repetition([parent(0.0, [0.0, 1.0, 9.0])], None, 0.0))["gap_p95_s"] == 8.0


def test_nothing_that_succeeded_is_nothing_to_say():
    assert set(numbers(Repetition([failed()], None, 0.0)).values()) == {None}
    assert medians([Repetition([failed()], None, 0.0), paced(0.5)])["first_token_s"] == 0.5


def test_ratios_are_taken_pair_by_pair():
    fast = [paced(step) for step in (0.25, 0.5, 0.5)]
    slow = [paced(step) for step in (0.5, 4.0, 0.5)]
    compared = ratios(fast, slow)
    assert compared["makespan_s"] == [0.5, 0.125, 1.0]
    assert compared["tokens_per_s"] == [2.0, 8.0, 1.0]
    # The medians of the two are equal.
    middle, spread = (line.split()[4:] for line in table(fast, slow) if "A/B" in line or "min..max" in line)
    assert middle == ["2.00", "0.50", "0.50", "0.50", "0.50", "0.50", "-", "-"]
    assert spread[:2] == ["1.00..8.00", "0.12..1.00"]


def test_a_pair_with_a_failure_has_no_ratio():
    broken = Repetition([failed()], None, 0.0)
    assert ratios([paced(0.5), broken], [paced(0.5), paced(0.5)])["gap_s"] == [1.0]
    assert ratios([broken], [broken])["gap_s"] == []


def table(*servers, **axes):
    load, measured = results(*servers, **axes)
    out = io.StringIO()
    Table(load, SERVERS[: len(servers)], measured).print(out)
    return out.getvalue().splitlines()


def test_a_pipe_gets_aligned_columns():
    lines = table([paced(0.25, counted=PromptTokens(128, 64)), paced(0.5), paced(0.125)])
    assert lines[0].split("  ")[0] == "prompt"
    assert lines[1].split() == ["128", "2", "1", "8.0", "0.250", "0.250", "1.000", "250.0", "250.0", "64/128", "0"]
    assert len(lines[0]) == len(lines[1])
    assert lines[2] == "A: http://a, m"
    assert lines[3].startswith("max tokens 4, top p 1, logprobs none, temperature 1, prefix cold, seed 5, medians of 3")


def test_axes_that_vary_have_a_column_and_failures_are_counted():
    lines = table([Repetition([failed(), failed()], None, 0.0)], top_p=[1.0, 0.95], rate=[2.0], requests=2)
    assert lines[0].split()[:5] == ["prompt", "n", "rate", "top", "p"]
    assert [line.split() for line in lines[1:3]] == [
        ["128", "2", "2", top_p, *"-------", "2/2"] for top_p in ("1", "0.95")
    ]
    assert "top p" not in lines[-1]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("columns", "boxed"), [("200", True), ("80", False)])
def test_a_terminal_gets_a_box_only_if_it_holds_every_column(columns, boxed, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    load, measured = results([paced(0.25)], [paced(0.5)])
    out = Terminal()
    Table(load, SERVERS, measured).print(out)
    assert ("┃" in out.getvalue()) is boxed
    assert "…" not in out.getvalue()
    assert "250.0" in out.getvalue()


def test_the_clients_share_is_its_largest():
    _, measured = results([paced(0.25), paced(0.5)])
    assert client_share(measured) == 0.125
    assert client_share([]) == 0.0


def test_a_line_of_progress_names_row_server_and_failures():
    load, _ = results([paced(0.25)])
    line = progress_line(load.rows[0], 1, paced(0.25))
    assert line.startswith("prompt 128, n 2, parents 1, cold, B  tok/s 8.0  first s 0.250")
    assert progress_line(load.rows[0], None, Repetition([failed()], None, 0.0)).endswith("FAILED 1")


NUMBER = {"type": ["number", "null"]}
MEASURES = [
    "tokens_per_s", "first_token_s", "all_first_tokens_s", "makespan_s", "gap_s", "gap_p95_s",
    "prompt_tokens_asked", "prompt_tokens_computed",
]  # fmt: skip


def closed(properties):
    """An object with these keys and no others."""
    required = sorted(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


CHOICE = closed({"first_token_s": NUMBER, "end_s": NUMBER, "gap_s": NUMBER, "chunks": {"type": "integer"}})
PARENT = closed(
    {
        "start_s": {"type": "number", "minimum": 0},
        "tokens": NUMBER,
        "error": {"type": ["string", "null"]},
        "choices": {"type": "array", "items": CHOICE},
    }
)
MEDIAN = closed(dict.fromkeys(MEASURES, NUMBER))
REPETITION = closed(
    MEDIAN["properties"]
    | {"failed": {"type": "integer"}, "client_cpu_s": NUMBER, "parents": {"type": "array", "items": PARENT}}
)
SERVER = closed({"median": MEDIAN, "repetitions": {"type": "array", "items": REPETITION}})
RATIO = closed({"median": NUMBER, "min": NUMBER, "max": NUMBER, "each": {"type": "array", "items": {"type": "number"}}})
RATIOS = closed({name: {"anyOf": [{"type": "null"}, RATIO]} for name in MEASURES[:6]})
ROW = {
    "prompt_len": NUMBER, "n": NUMBER, "parents": NUMBER, "rate": NUMBER, "requests": NUMBER, "max_tokens": NUMBER,
    "top_p": NUMBER, "logprobs": NUMBER, "temperature": NUMBER, "prefix": {"enum": ["cold", "warm"]},
    "servers": {"type": "array", "items": SERVER}, "warm_up_errors": {"type": "array"},
}  # fmt: skip


def document(row):
    head = dict.fromkeys(("seed", "repeat", "vocab_size", "client_cpu_share"), NUMBER)
    named = closed({"url": {"type": "string"}, "model": {"type": "string"}})
    extra = {"ignore_eos": {"type": "boolean"}, "extra": {"type": "object"}}
    servers = {"servers": {"type": "array", "items": named}, "rows": {"type": "array", "items": closed(row)}}
    return closed({**head, **extra, **servers})


def test_the_object_for_programs_has_a_fixed_shape():
    repetitions = [paced(0.25), Repetition([failed()], PromptTokens(3, 2), 0.0)]
    load, measured = results(repetitions)
    one = json.loads(json.dumps(as_json(load, SERVERS[:1], measured), allow_nan=False))
    jsonschema.validate(one, document(ROW))
    load, measured = results(repetitions, [paced(0.5), paced(0.5)])
    two = json.loads(json.dumps(as_json(load, SERVERS, measured), allow_nan=False))
    jsonschema.validate(two, document(ROW | {"ratio": RATIOS}))
    assert two["rows"][0]["ratio"]["gap_s"] == {"median": 0.5, "min": 0.5, "max": 0.5, "each": [0.5]}
    first, broken = two["rows"][0]["servers"][0]["repetitions"]
    assert first["parents"][0]["choices"] == [{"first_token_s": 0.25, "end_s": 1.0, "gap_s": 0.25, "chunks": 4}] * 2
    assert (broken["failed"], broken["parents"][0]["error"], broken["prompt_tokens_computed"]) == (1, "it broke", 2)


def test_the_floor_is_a_ratio():
    assert floor_lines([StepTime(8, 0.03, 0.02, 0.04, 0.06)]) == [
        "engine step, n 8: 30.0 ms, its matrix products alone 20.0 ms, ratio 1.50",
        "cost of exactness, n 8: products 0.50 of the library's, step 0.50 of that with longer chunks",
    ]
