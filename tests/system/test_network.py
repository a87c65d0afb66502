"""Two Ray nodes with addresses of their own in network namespaces: a group's ranks find each other over the wire."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import hear_interrupts

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.231.7.1", "10.231.7.2")
ENVIRONMENT = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex + uuid.uuid4().hex}
QUESTION = ["Once upon a time", "--completion", "-n", "3", "--max-tokens", "12", "--seed", "4", "--logprobs", "1"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]

    @property
    def processes(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def python(self, *words: str, timeout: int = 90) -> str:
        """The output of this Python with `words` on the host, beside the Ray node that runs there."""
        done = subprocess.run(
            ["nsenter", f"--target={self.processes[0]}", "--mount", "--net", sys.executable, *words],
            capture_output=True, text=True, timeout=timeout, cwd=ROOT, env=ENVIRONMENT, preexec_fn=hear_interrupts,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end(self) -> None:
        """Kill whatever runs on the host, then remove it."""
        for pid in self.processes:
            os.kill(pid, 9)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two namespaces joined by a cable. Skips where they are not permitted."""
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]:
        pytest.skip(f"network namespaces need {', '.join(missing)}")
    mark = uuid.uuid4().hex[:6]
    hosts = Host(f"choral-a-{mark}", ADDRESSES[0]), Host(f"choral-b-{mark}", ADDRESSES[1])
    try:
        try:
            for host in hosts:
                ip("netns", "add", host.name)
            cable = [f"v{host.name[7]}{mark}" for host in hosts]
            ip("link", "add", cable[0], "netns", hosts[0].name, "type", "veth",
               "peer", "name", cable[1], "netns", hosts[1].name)  # fmt: skip
            for host, interface in zip(hosts, cable, strict=True):
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", interface)
                ip("-n", host.name, "link", "set", interface, "up")
                ip("-n", host.name, "link", "set", "lo", "up")
                ip("-n", host.name, "route", "add", "default", "dev", interface)  # Ray asks which way out it would take
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', error)}")
        yield hosts
    finally:
        for host in hosts:
            host.end()


def start_ray(host: Host, folder: Path, *options: str) -> None:
    """`ray start` on the host, with a /dev/shm and a session folder that it shares with nobody."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}", "--num-cpus=1"]
    ray += ["--object-store-memory=100000000", "--disable-usage-stats", *options]
    alone = "mount -t tmpfs tmpfs /dev/shm && mkdir -p /tmp/ray && mount --bind $0 /tmp/ray && exec $@"
    command = ["unshare", "--mount", "sh", "-c", alone, str(folder), *ray]
    with (folder / "start.log").open("w") as log:  # a pipe would stay open in the processes that are left running
        done = subprocess.run(host.command(*command), stdout=log, stderr=log, timeout=60, env=ENVIRONMENT)
    assert done.returncode == 0, (folder / "start.log").read_text()


def test_c2_ranks_on_two_hosts_exchange_over_the_network_and_give_the_bits_of_one_rank(
    embedded_model: Path, tmp_path: Path
):
    sample = ["-m", "deploy.cli", "sample", *QUESTION, "--json"]
    with two_hosts() as (first, second):
        for host in (first, second):
            (tmp_path / host.name).mkdir()
        start_ray(first, tmp_path / first.name, "--head", "--port=6379", "--include-dashboard=false")
        start_ray(second, tmp_path / second.name, f"--address={first.address}:6379")
        options = ["--address", f"{first.address}:6379", "--tp", "2", "--placement", "STRICT_SPREAD"]
        apart = json.loads(first.python(*sample, *options))
        logs = [log.read_text() for log in tmp_path.glob("*/session_*/logs/**/*") if log.is_file()]
    assert any("rank 1 of 2 exchanges activations through gloo" in log for log in logs)
    alone = json.loads(subprocess.run([sys.executable, *sample], capture_output=True, check=True, cwd=ROOT).stdout)
    assert apart["choices"] == alone["choices"]
    assert len(apart["choices"]) == 3
