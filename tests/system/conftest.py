"""Real clusters for the system tests: `choral serve` in processes of its own, stopped and searched for remains."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import hear_interrupts

START_S = 180
STOP_S = 60
MARK = "CHORAL_TEST_MARK"


@dataclass
class Server:
    """A running `choral serve`."""

    url: str
    model: str
    process: subprocess.Popen[str]
    mark: str
    address: str | None = None
    killed: bool = False

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def metrics(self) -> dict[str, float]:
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        return {s.name: s.value for f in text_string_to_metric_families(page) for s in f.samples}

    def processes(self) -> list[int]:
        return marked_processes(self.mark)

    def kill(self) -> None:
        """SIGKILL to every process of the cluster at once."""
        self.killed = True
        while living := self.processes():
            for pid in living:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def wait_until_idle(self, seconds: float = 5.0) -> dict[str, float]:
        """The metrics once every gauge of work is zero; fails after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            metrics = self.metrics()
            busy = {name: metrics[name] for name in GAUGES if metrics[name]}
            if not busy:
                return metrics
            assert time.monotonic() < deadline, f"still busy after {seconds} s: {busy}"
            time.sleep(0.1)


GAUGES = (
    "choral_children_running",
    "choral_children_waiting",
    "choral_parents_alive",
    "choral_children_alive",
    "choral_families_alive",
    "choral_children_placed",
    "choral_tokens_placed",
    "choral_kv_blocks_used",
    "choral_admission_children_in_use",
)


def marked_processes(mark: str) -> list[int]:
    """Every living process that inherited the mark, zombies left out."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@contextmanager
def serve_process(
    *options: str, program: Sequence[str] = ("-m", "deploy.cli")
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`choral serve` on a free port with `options`, and the mark of its processes, of which none may stay behind."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *program, "serve", "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    try:
        yield process, mark
    finally:
        _end(process, mark)


@contextmanager
def serve(*options: str) -> Iterator[Server]:
    """A server that is ready; at the end Ctrl-C, exit code 0 and no process left behind."""
    with serve_process(*options) as (process, mark):
        url = ready_url(process)
        model = httpx.get(f"{url}/v1/models", timeout=30).json()["data"][0]["id"]
        running = Server(url, model, process, mark)
        yield running
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == (-signal.SIGKILL if running.killed else 0)


def ready_url(process: subprocess.Popen[str]) -> str:
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if match := re.match(r"Ready: (http\S+)", line):
            return match[1]
    raise AssertionError("the server did not start:\n" + "".join(lines))


def _end(process: subprocess.Popen[str], mark: str) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while (left := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[Server]:
    """One group, one rank, all defaults."""
    with serve() as running:
        yield running
