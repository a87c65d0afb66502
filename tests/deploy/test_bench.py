import contextlib
import json
import threading

import pytest

import deploy.bench
from deploy.bench import run_bench
from deploy.bench_floor import FloorError, StepTime
from deploy.cli import main, make_parser
from deploy.errors import OptionError


class Cluster:
    def __init__(self, url):
        self.url, self.model_name = url, "own"


def parse(*line):
    return make_parser().parse_args(["bench", *line])


def completion(server):
    """A script that grows every child by one token per round."""

    def script(body):
        for token in range(body["max_tokens"]):
            for index in range(body["n"]):
                finish = "length" if token + 1 == body["max_tokens"] else None
                yield {"choices": [{"index": index, "text": "x", "finish_reason": finish}]}
        yield server.total(body["n"] * body["max_tokens"])
        yield server.done

    return script


@pytest.fixture
def bench_server(server):
    server.script = completion(server)
    return server


SMALL = ["--prompt-len", "6", "--n", "1,3", "--max-tokens", "2", "--repeat", "2", "--parents", "2"]


def test_the_table_goes_to_stdout_and_progress_to_stderr(bench_server, capsys):
    assert run_bench(parse("--url", bench_server.url, *SMALL)) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["6", "1", "2"], ["6", "3", "2"]]
    assert lines[3] == f"A: {bench_server.url}, tiny"
    assert [line.split()[0] for line in err.splitlines()] == ["seed", "[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    # Each of the two rows: a warm-up and two repetitions of two parents.
    assert [body["n"] for _, body in bench_server.requests] == [1] * 5 + [3] * 5
    assert {path for path, _ in bench_server.requests} == {"/v1/completions"}


def test_json_on_stdout_is_all_there_is(bench_server, capsys):
    assert run_bench(parse("--url", bench_server.url, *SMALL, "--json", "-", "--seed", "4", "--prefix", "both")) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["seed"], [row["prefix"] for row in written["rows"]]) == (4, ["cold", "warm"] * 2)
    assert {len(row["servers"][0]["repetitions"]) for row in written["rows"]} == {2}


def test_json_in_a_file_leaves_the_table(bench_server, capsys, tmp_path):
    file = tmp_path / "bench.json"
    assert run_bench(parse("--url", bench_server.url, *SMALL, "--json", str(file))) == 0
    assert "tok/s" in capsys.readouterr().out
    assert json.loads(file.read_text())["servers"] == [{"url": bench_server.url, "model": "tiny"}]


def test_two_servers_are_compared(bench_server, capsys):
    with type(bench_server)() as other:
        other.model, other.script = "peer", completion(other)
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        both = ["--url", bench_server.url, "--model", "mine", "--compare", other.url]
        assert run_bench(parse(*both, *SMALL, "--n", "1")) == 0
        assert run_bench(parse(*both, *SMALL, "--n", "1", "--model2", "theirs")) == 0
        other.shutdown()
        thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in lines[1:5]] == ["A", "B", "A/B", "min..max"]
    assert [body["model"] for _, body in other.requests] == ["peer"] * 5 + ["theirs"] * 5
    assert {body["model"] for _, body in bench_server.requests} == {"mine"}


def test_a_failed_request_is_exit_code_1_and_named(bench_server, capsys):
    def script(body):
        last = len(bench_server.requests) == 5
        yield from [{"error": {"message": "rank 1 was lost"}}] if last else completion(bench_server)(body)

    bench_server.script = script
    assert main(["bench", "--url", bench_server.url, *SMALL, "--n", "2", "--parents", "1", "--requests", "2"]) == 1
    out, err = capsys.readouterr()
    assert err.endswith("choral: failed requests: 1; the first: the server reported an error: rank 1 was lost\n")
    assert out.splitlines()[1].endswith("1/4")


def test_a_server_that_is_not_there_is_exit_code_1(capsys):
    assert main(["bench", "--url", "http://127.0.0.1:9", *SMALL]) == 1
    assert "no server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_a_server_of_its_own_gets_a_free_port_and_is_stopped(bench_server, capsys, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def running_cluster(config):
        seen.append(config)
        yield Cluster(bench_server.url)
        seen.append("stopped")

    monkeypatch.setattr(deploy.bench, "running_cluster", running_cluster)
    monkeypatch.setattr("workers.checkpoint.resolve", lambda model: f"folder of {model}")
    monkeypatch.setattr("deploy.bench_floor.measure_floor", lambda folder: [StepTime(8, 3.0, 2.0, 4.0, 6.0)])
    assert run_bench(parse("--serve", "--groups", "2", "--model", "m", *SMALL, "--floor", "--json", "-")) == 0
    config, stopped = seen
    assert (config.port, config.groups, stopped) == (0, 2, "stopped")
    written = json.loads(capsys.readouterr().out)
    times = {"step_s": 3.0, "products_s": 2.0, "library_s": 4.0, "long_chunks_s": 6.0}
    assert written["floor"] == [{"n": 8, **times, "ratio": 1.5, "products_cost": 0.5, "chunks_cost": 0.5}]
    assert {body["model"] for _, body in bench_server.requests} == {"own"}


def test_a_floor_that_cannot_be_measured_is_an_error(bench_server, capsys, monkeypatch):
    def measure_floor(folder):
        raise FloorError("no memory")

    monkeypatch.setattr(
        deploy.bench, "running_cluster", lambda config: contextlib.nullcontext(Cluster(bench_server.url))
    )
    monkeypatch.setattr("workers.checkpoint.resolve", lambda model: model)
    monkeypatch.setattr("deploy.bench_floor.measure_floor", measure_floor)
    assert main(["bench", "--serve", *SMALL, "--floor"]) == 1
    assert "the step could not be measured: no memory" in capsys.readouterr().err


URL = ["--url", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([*URL, "--rate", "2", "--parents", "1", "--requests", "3"], "--rate and --parents"),
        ([*URL, "--rate", "2"], "--rate needs --requests"),
        ([*URL, "--top-p", "1,2"], "top_p is out of range"),
        ([*URL, "--logprobs", "none,21"], "logprobs is out of range"),
        ([*URL, "--temperature", "3"], "temperature is out of range"),
        ([*URL, "--extra", '{"stream": false}'], "the bench itself sets stream"),
        ([*URL, "--model2", "x"], "--model2"),
        ([*URL, "--groups", "2"], "--groups: only for a server started here"),
        ([*URL, "--config", "f"], "--config: only"),
        ([*URL, "--floor"], "--floor: only"),
        ([*URL, "--json", "/nowhere/at/all.json"], "no such folder"),
        (["--serve", "--n", "9", "--max-n", "8"], r"n 9 is more than max_n \(8\)"),
        (["--serve", "--tp", "0"], "tp: "),
    ],
)
def test_bad_combinations_are_refused_before_anything_is_started(line, said):
    with pytest.raises(OptionError, match=said):
        run_bench(parse(*line))


@pytest.mark.parametrize(
    "line",
    [
        [],
        [*URL, "--serve"],
        [*URL, "--n", "0"],
        [*URL, "--n", "1,,2"],
        [*URL, "--rate", "0"],
        [*URL, "--rate", "nan"],
        [*URL, "--logprobs", "all"],
        [*URL, "--prefix", "hot"],
        [*URL, "--extra", "[]"],
        [*URL, "--extra", "{"],
    ],
)
def test_bad_values_end_with_usage(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse(*line)
    assert stopped.value.code == 2
    assert (line[2] if line else "--url") in capsys.readouterr().err
