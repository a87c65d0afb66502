"""`choral batch` on a running cluster: what it writes, refuses and resumes, and what comes back from a Ray job."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.processes import hear_interrupts
from tests.system.batch_kills import cluster, content, written
from tests.system.conftest import Server, serve
from tests.system.requests import complete

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@dataclass
class Cluster:
    dashboard: str
    address: str
    server: Server


@pytest.fixture(scope="module")
def running(embedded_model: Path) -> Iterator[Cluster]:
    """A Ray cluster with a job server, and Choral on it."""
    with cluster(1) as (address, dashboard, _), serve("--address", address) as server:
        yield Cluster(dashboard, address, server)


@pytest.fixture
def batch(running: Cluster, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command(tmp_path, running, *options), capture_output=True, text=True, check=False)

    return run


def command(folder: Path, running: Cluster, *options: str) -> list[str]:
    where = [] if "--submit" in options else ["--address", running.address]
    words = [str(folder / "in.jsonl"), "--output", str(folder / "out"), *where, *options]
    return [sys.executable, "-m", "deploy.cli", "batch", *words]


def write_input(folder: Path, *rows: Any) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def records(folder: Path) -> list[dict[str, Any]]:
    rows = [record for file in (folder / "out").glob("*.parquet") for record in pq.read_table(file).to_pylist()]
    return sorted(rows, key=lambda record: (record["row"], record["index"]))


ROWS = [{"id": f"r{i}", "prompt": f"The number after {i} is", "seed": i} for i in range(6)]


def test_bad_rows_fail_alone_and_the_job_says_so(batch, tmp_path: Path):
    bad = ["{bad", {"id": "long", "prompt": "x " * 9000}, {"id": "typo", "prompt": "x", "temprature": 1}]
    write_input(tmp_path, *ROWS[:3], *bad, *ROWS[3:])
    done = batch("-n", "2", "--max-tokens", "6")
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["done_rows"], summary["failed_rows"], summary["samples"]) == (9, 3, 12)
    made = records(tmp_path)
    errors = {record["row"]: record["error"] for record in made if record["error"]}
    assert {row: error["param"] for row, error in errors.items()} == {3: None, 4: "prompt", 5: "temprature"}
    assert len(made) == 15

    again = batch("-n", "2", "--max-tokens", "6")
    assert again.returncode == 3 and "finished before" in again.stderr
    other = batch("-n", "3", "--max-tokens", "6")
    assert other.returncode == 1 and "n changed" in other.stderr
    write_input(tmp_path, *ROWS)
    assert "input changed" in batch("-n", "2", "--max-tokens", "6").stderr
    forced = batch("-n", "2", "--max-tokens", "6", "--force")
    assert forced.returncode == 0 and len(records(tmp_path)) == 12


def test_c2_samples_are_those_of_the_http_api(batch, running: Cluster, tmp_path: Path):
    write_input(tmp_path, *ROWS)
    assert batch("-n", "3", "--max-tokens", "8").returncode == 0
    made = records(tmp_path)
    for row in ROWS:
        body = {"prompt": row["prompt"], "n": 3, "max_tokens": 8, "seed": row["seed"], "logprobs": 0}
        reply = complete(running.server.url, **body, return_token_ids=True)
        for choice in reply["choices"]:
            (sample,) = [m for m in made if (m["id"], m["sample"]) == (row["id"], choice["sample"])]
            assert (sample["text"], sample["token_ids"]) == (choice["text"], choice["token_ids"])
            assert sample["logprobs"] == choice["logprobs"]["token_logprobs"]
    running.server.wait_until_idle(10)


def test_a_terminated_job_writes_what_is_finished_and_goes_on_later(running: Cluster, batch, tmp_path: Path):
    rows = [{"prompt": f"Row {i}:", "max_tokens": 16 + 8 * (i % 9), "ignore_eos": True} for i in range(60)]
    write_input(tmp_path, *rows)
    process = subprocess.Popen(command(tmp_path, running, "-n", "4"), preexec_fn=hear_interrupts)
    try:
        deadline = time.monotonic() + 60
        while not written(tmp_path / "out"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait()
    part = {(record["row"], record["index"]) for record in records(tmp_path)}
    assert 0 < len(part) < 240
    running.server.wait_until_idle(15)
    resumed = batch("-n", "4")
    assert resumed.returncode == 0
    assert json.loads(resumed.stdout.splitlines()[-1])["new_samples"] == 240 - len(part)
    digest, keys = content(tmp_path / "out")
    assert len(keys) == 240 and set(keys.values()) == {1}

    (tmp_path / "out").rename(tmp_path / "resumed")
    assert batch("-n", "4").returncode == 0
    assert content(tmp_path / "out")[0] == digest


def test_openai_lines_come_back_as_openai_lines(batch, tmp_path: Path):
    question = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 2, "logprobs": True}
    line = {"method": "POST", "url": "/v1/chat/completions"}
    write_input(
        tmp_path,
        {**line, "custom_id": "good", "body": question},
        {**line, "custom_id": "bad", "body": {**question, "temperature": 5}},
    )
    assert batch("--format", "openai").returncode == 3
    (good,) = [json.loads(text) for text in (tmp_path / "out/output.jsonl").read_text().splitlines()]
    (bad,) = [json.loads(text) for text in (tmp_path / "out/errors.jsonl").read_text().splitlines()]
    assert good["custom_id"] == "good" and good["response"]["status_code"] == 200
    assert [choice["index"] for choice in good["response"]["body"]["choices"]] == [0, 1]
    assert bad["response"]["status_code"] == 400 and bad["response"]["body"]["error"]["param"] == "temperature"


def test_options_of_groups_are_refused_where_others_run(batch, tmp_path: Path):
    write_input(tmp_path, *ROWS)
    done = batch("--tp", "1")
    assert done.returncode == 2 and "--tp" in done.stderr


def test_a_ray_job_gives_its_log_and_its_exit_code(batch, running: Cluster, tmp_path: Path):
    write_input(tmp_path, *ROWS, "{bad")
    done = batch("-n", "2", "--max-tokens", "4", "--submit", running.dashboard)
    assert done.returncode == 3, done.stderr
    assert '"samples": 12' in done.stdout
    assert len(records(tmp_path)) == 13
