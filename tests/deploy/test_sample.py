import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from deploy.cli import make_parser
from deploy.client import Child, Family
from deploy.errors import OptionError
from deploy.sample import SAMPLING, replay, run_sample
from tests.processes import hear_interrupts


def parse(*line):
    return make_parser().parse_args(["sample", *line])


def sample(server, *line):
    return run_sample(parse("--url", server.url, *line))


def test_a_pipe_gets_finished_children_and_a_summary(server, capsys):
    assert sample(server, "Hi", "-n", "2", "--max-tokens", "4") == 0
    assert capsys.readouterr().out.split("\n") == [
        "[1] one 1",
        "[1] two\u20281",
        "[1] -- length, 4 tokens",
        "[0] one 0",
        "[0] two\u20280",
        "[0] -- stop, 4 tokens",
        "seed 77 · 2 children: 1 stop, 1 length · 8 completion tokens · 5 prompt tokens (3 cached)",
        f"replay: choral sample --seed 77 --samples 0 --max-tokens 4 --url {server.url} Hi",
        "",
    ]


def test_json_prints_one_object_and_nothing_else(server, capsys):
    assert sample(server, "Hi", "-n", "3", "--json") == 0
    captured = capsys.readouterr()
    reply = json.loads(captured.out)
    assert [choice["text"] for choice in reply["choices"]] == [f"one {i}\ntwo\u2028{i}" for i in range(3)]
    assert (reply["seed"], reply["usage"]["completion_tokens"], captured.err) == (77, 12, "")


def test_what_is_given_is_sent_and_nothing_else(server, capsys):
    options = [
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--top-k",
        "7",
        "--seed",
        "-3",
        "--stop",
        "A",
        "--stop",
        "B",
    ]
    sample(server, "Hi", "--samples", "4,2", "--completion", "--model", "other", *options)
    ((path, body),) = server.requests
    assert path == "/v1/completions"
    assert {name: body[name] for name in (*SAMPLING, "samples", "model", "prompt")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": -3, "stop": ["A", "B"],
        "samples": [4, 2], "model": "other", "prompt": "Hi",
    }  # fmt: skip
    sample(server, "Hi")
    assert not set(server.requests[-1][1]) & {*SAMPLING, "samples", "logprobs"}
    assert (server.requests[-1][1]["n"], server.requests[-1][1]["model"]) == (4, "tiny")


def test_the_replay_command_asks_for_the_same_child():
    line = [
        "-n",
        "3",
        "--temperature",
        "0.5",
        "--stop",
        "A b",
        "--logprobs",
        "1",
        "--no-prefix-cache",
        "--tp",
        "3",
    ]
    first = parse(*line, "--completion", "--", "-1 is what?")
    command = replay(first, Family([Child(0, 2)], seed=-9))
    again = make_parser().parse_args(shlex.split(shlex.join(command))[1:])
    assert vars(again) == vars(first) | {"n": None, "samples": (2,), "seed": -9}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["-n", "3", "--samples", "1,2"], "-n 3 does not fit --samples with 2 numbers"),
        (["--temperature", "3"], "temperature is out of range"),
        (["--top-p", "0"], "top_p is out of range"),
        (["--logprobs", "21"], "logprobs is out of range"),
        (["--url", "http://x", "--tp", "2"], "--tp: only for a server started here"),
        (["--url", "http://x", "--config", "f"], "--config: only for a server started here"),
        (["-n", "9", "--max-n", "8"], r"9 samples are more than max_n \(8\)"),
        (["--tp", "0"], "tp: "),
    ],
)
def test_bad_combinations_are_refused_before_anything_is_started(line, said):
    with pytest.raises(OptionError, match=said):
        run_sample(parse("Hi", *line))


@pytest.mark.parametrize(
    "line", [["-n", "0"], ["--samples", "1,1"], ["--samples", "a"], ["--samples", "-1"], ["--nope"]]
)
def test_bad_values_end_with_usage(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("Hi", *line)
    assert stopped.value.code == 2
    assert line[0] in capsys.readouterr().err


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_hangs_up_and_exits_130(server, stop):
    server.script = server.endless
    command = [sys.executable, "-m", "deploy.cli", "sample", "Hi", "--url", server.url]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear_interrupts
    )
    try:
        assert server.streaming.wait(20)
        assert not server.hung_up.is_set()
        os.kill(process.pid, stop)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert server.hung_up.wait(5)
    assert (process.returncode, out, err) == (130, "", "choral: interrupted\n")
