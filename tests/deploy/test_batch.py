"""The options of `choral batch`, and the command line of its job."""

from pathlib import Path

import pytest

from deploy.batch import job_arguments
from deploy.cli import main, make_parser


def parsed(*argv: str):
    args = make_parser().parse_args(["batch", *argv])
    args.argv = ["batch", *argv]
    return args


def test_a_job_gets_the_same_command_with_absolute_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    args = parsed("in.jsonl", "s3://bucket/more.jsonl", "--output", "out", "-n", "4", "--submit", "http://x:8265")
    paths = [f"{tmp_path}/in.jsonl", "s3://bucket/more.jsonl", "--output", f"{tmp_path}/out"]
    assert job_arguments(args) == ["batch", *paths, "-n", "4"]
    assert job_arguments(parsed("/in.jsonl", "--submit=http://x:8265", "--output", "/out")) == [
        *("batch", "/in.jsonl", "--output", "/out")
    ]


def test_an_input_that_is_not_there_is_named_before_anything_starts(tmp_path: Path, capsys):
    assert main(["batch", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "out")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_job_server_that_is_not_there_is_named(tmp_path: Path, capsys):
    argv = ["batch", str(tmp_path / "a.jsonl"), "--output", str(tmp_path), "--submit", "http://127.0.0.1:9"]
    assert main(argv) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
