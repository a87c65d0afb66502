"""`choral config` and `serve deploy` on a Ray cluster of its own, and an update under load that breaks no stream."""

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.processes import free_port, hear_interrupts
from tests.system.conftest import MARK, _end
from tests.system.requests import Choice, choices, complete, streamed_choices

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
START_S = 120


@dataclass
class RayHead:
    """A Ray cluster of one node that asks for a token, and the commands an operator runs against it."""

    folder: Path
    environment: dict[str, str]
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(5)])

    def run(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *words], env=self.environment, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def deploy(self, *options: str) -> None:
        """`choral config ... > file && serve deploy file`."""
        file = self.folder / "serve.yaml"
        file.write_text(self.run("deploy.cli", "config", "--port", str(self.ports[0]), *options))
        self.run("ray.serve.scripts", "deploy", str(file), "--address", f"http://127.0.0.1:{self.ports[1]}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"


@contextmanager
def ray_head(folder: Path, cores: int) -> Iterator[RayHead]:
    token, mark = uuid.uuid4().hex + uuid.uuid4().hex, uuid.uuid4().hex
    settings = {
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        MARK: mark,
        "PYTHONPATH": str(ROOT),
    }
    head = RayHead(folder, {**os.environ, **settings})
    _, dashboard, gcs, agent, client = head.ports
    command = f"ray.scripts.scripts start --head --block --num-cpus={cores} --port={gcs} --dashboard-port={dashboard}"
    command += f" --dashboard-agent-listen-port={agent} --ray-client-server-port={client} --disable-usage-stats"
    with (folder / "ray.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.split(), "--object-store-memory=100000000"],
            env=head.environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True, preexec_fn=hear_interrupts,
        )  # fmt: skip
    try:
        wait_until(lambda: process.poll() or httpx.get(f"http://127.0.0.1:{dashboard}").status_code < 500)
        assert process.poll() is None, (folder / "ray.log").read_text()
        yield head
    finally:
        process.terminate()
        process.wait(60)
        _end(process, mark)


def wait_until(answers) -> None:
    """Until `answers()` is true; what it raises while nobody listens counts as no."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            if answers():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, "no answer"
        time.sleep(0.25)


@dataclass
class Load:
    """Threads that stream one family after the other, and what came back."""

    url: str
    done: list[list[Choice]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.stopping.is_set():
            try:
                self.done.append(streamed_choices(self.url, 2, max_tokens=100, ignore_eos=True, logprobs=0))
            except Exception as error:
                self.errors.append(error)
                return

    @contextmanager
    def running(self, threads: int) -> Iterator[None]:
        workers = [threading.Thread(target=self.run) for _ in range(threads)]
        for worker in workers:
            worker.start()
        try:
            yield
        finally:
            self.stopping.set()
            for worker in workers:
                worker.join(300)


def max_model_len(head: RayHead) -> int:
    return httpx.get(f"{head.url}/v1/models", timeout=60).json()["data"][0]["max_model_len"]


def test_a_deployed_file_answers_and_an_update_under_load_loses_no_stream(embedded_model: Path, tmp_path: Path):
    with ray_head(tmp_path, cores=4) as head:
        head.deploy("--groups", "2", "--max-model-len", "512")
        wait_until(lambda: httpx.get(f"{head.url}/health").status_code == 200)
        expected = choices(complete(head.url, n=2, max_tokens=100, ignore_eos=True, logprobs=0))
        load = Load(head.url)
        with load.running(threads=3):
            wait_until(lambda: len(load.done) >= 3 or load.errors)
            before = len(load.done)
            head.deploy("--groups", "2", "--max-model-len", "256")
            wait_until(lambda: max_model_len(head) == 256 or load.errors)
            after = len(load.done)
            wait_until(lambda: len(load.done) >= after + 4 or load.errors)
        assert load.errors == []
        assert len(load.done) > before
        assert all(streamed == expected for streamed in load.done)
        assert max_model_len(head) == 256
