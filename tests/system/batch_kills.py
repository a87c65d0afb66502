"""A batch job under fire: SIGKILLs at random moments of driver, groups, ranks and aggregators, and the same samples.

Runs the full form: `choral batch --submit` to a local Ray cluster, groups of the job's own, the embedded model. First
undisturbed, then with kills; whenever the command ends because its driver was killed, it is given again. Compares the
content, and prints the time the kills cost. The slow test runs it small; by hand, in full size:

    python -m tests.system.batch_kills --rows 500 --samples 16 --kills 20
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

TITLES = {
    "group": "ray::ServeReplica:choral:groups",
    "rank": "ray::RankWorker",
    "aggregator": "ray::AggregatorActor",
    "driver": "batch",
}
"""What the command line of each kind of victim begins with; that of a driver holds the output folder besides."""


@dataclass(frozen=True)
class Plan:
    rows: int
    samples: int
    tokens: int
    kills: int
    seed: int = 0
    tp: int = 2
    victims: tuple[str, ...] = tuple(TITLES)

    @property
    def total(self) -> int:
        return self.rows * self.samples


@dataclass
class Run:
    """How far a run of the job has come, and what it took."""

    moments: list[int]
    """Counts of written samples at which a kill is due."""
    seconds: float = 0.0
    commands: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    ended: bool = False

    @classmethod
    def load(cls, file: Path, plan: Plan, kills: int) -> "Run":
        """As `compare` left it, or a new one."""
        if file.exists():
            return cls(**json.loads(file.read_text()))
        rng = random.Random(plan.seed + 1)
        return cls(sorted(rng.randrange(plan.total * 2 // 3) for _ in range(kills)))


@contextmanager
def cluster(cpus: int) -> Iterator[tuple[str, str, str]]:
    """A Ray cluster of its own with a job server: its address, its dashboard, and a mark all its processes inherit.

    Every port is a free one, so that other clusters on the machine do not matter.
    """
    mark, environment = os.urandom(8).hex(), dict(os.environ)
    os.environ |= {"CHORAL_TEST_MARK": mark, "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    port, dashboard, agent = _free_ports(3)
    options = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    options += ["--node-ip-address=127.0.0.1", f"--num-cpus={cpus}", "--disable-usage-stats", "--block"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", *options]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_for_agent(process, agent, log)
            yield f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", mark
        finally:
            # Those that give themselves a title lose the environment, and with it the mark.
            descendants = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            _end(mark, descendants)
            os.environ.clear()
            os.environ.update(environment)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [taken.getsockname()[1] for taken in sockets]


def _wait_for_agent(process: "subprocess.Popen[bytes]", port: int, log: Any) -> None:
    """The agent, which takes jobs, comes up last."""
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, _tail(log)
            time.sleep(0.2)


def _end(mark: str, descendants: list[psutil.Process]) -> None:
    """End the cluster's processes: its head leaves most of them behind."""
    deadline = time.monotonic() + 3
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in psutil.wait_procs(descendants, timeout=1)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def write_input(plan: Plan, file: Path) -> None:
    rng = random.Random(plan.seed)
    with file.open("w") as stream:
        for number in range(plan.rows):
            content = f"What is {rng.randint(2, 99)} plus {rng.randint(2, 99)}?" + " Think." * rng.randint(0, 8)
            row = {"id": f"q{number}", "messages": [{"role": "user", "content": content}]}
            stream.write(json.dumps(row) + "\n")


def run_job(plan: Plan, dashboard: str, mark: str, source: Path, output: Path, run: Run, deadline: float) -> None:
    """Give the command until it ends well, with the kills that are left meanwhile at random counts of samples.

    Raises TimeoutError at the deadline; the run may then be continued in another cluster.
    """
    rng = random.Random(plan.seed + 1 + run.commands)
    started, before = time.monotonic(), run.seconds
    while True:
        run.commands += 1
        command = _command(plan, dashboard, source, output)
        with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            while process.poll() is None:
                time.sleep(0.2)
                run.seconds = before + time.monotonic() - started
                if time.monotonic() > deadline:
                    process.kill()
                    raise TimeoutError
                if run.moments and written(output) >= run.moments[0]:
                    _kill_one(rng, plan, mark, output, run)
            if process.returncode == 0:
                break
            assert run.commands <= plan.kills + 50, _tail(log)
            print(f"{run.seconds:6.1f} s  the command ended with {process.returncode}: {_tail(log)}", flush=True)


def _command(plan: Plan, dashboard: str, source: Path, output: Path) -> list[str]:
    options = ["-n", str(plan.samples), "--max-tokens", str(plan.tokens), "--tp", str(plan.tp)]
    command = [sys.executable, "-m", "deploy.cli", "batch", str(source), "--output", str(output)]
    return [*command, *options, "--submit", dashboard]


def _tail(log: Any) -> str:
    log.seek(0)
    return str(log.read()[-300:])


def _kill_one(rng: random.Random, plan: Plan, mark: str, output: Path, run: Run) -> None:
    """Kill a process of a random kind a moment later, if there is one."""
    time.sleep(rng.random() * 2)
    kind = rng.choice(plan.victims)
    if found := [pid for pid in _marked(mark) if is_kind(kind, pid, output)]:
        os.kill(rng.choice(found), signal.SIGKILL)
        run.kills[kind] = run.kills.get(kind, 0) + 1
        run.moments.pop(0)
        print(f"{run.seconds:6.1f} s  killed {kind}", flush=True)


def is_kind(kind: str, pid: int, output: Path) -> bool:
    words = _words(pid)
    if kind == "driver":
        return "batch" in words and str(output) in words and "--submit" not in words
    return bool(words) and words[0].startswith(TITLES[kind])


def _words(pid: int) -> list[str]:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _marked(mark: str) -> list[int]:
    from tests.system.conftest import marked_processes

    return marked_processes(mark)


def written(output: Path) -> int:
    return sum(pq.read_metadata(file).num_rows for file in output.glob("part-*.parquet"))


def content(output: Path) -> tuple[str, Counter[tuple[int, int]]]:
    """A hash of all samples in order, and how often each is there."""
    records = [record for file in output.glob("part-*.parquet") for record in pq.read_table(file).to_pylist()]
    records.sort(key=lambda record: (record["row"], record["index"]))
    lines = "".join(json.dumps(record, sort_keys=True) + "\n" for record in records)
    return hashlib.sha256(lines.encode()).hexdigest(), Counter((r["row"], r["index"]) for r in records)


def compare(plan: Plan, folder: Path, seconds: float = float("inf")) -> bool:
    """The undisturbed run and the disturbed one, as far as they get in so many seconds; whether both have ended.

    What is done is kept in the folder, and is not done again.
    """
    deadline = time.monotonic() + seconds
    source = folder / "in.jsonl"
    write_input(plan, source)
    with cluster(plan.tp + 1) as (_, dashboard, mark):
        for name, kills in (("calm", 0), ("hit", plan.kills)):
            run = Run.load(folder / f"{name}.json", plan, kills)
            try:
                if not run.ended:
                    run_job(plan, dashboard, mark, source, folder / name, run, deadline)
                    run.ended = True
            except TimeoutError:
                print(f"{name}: {written(folder / name)} of {plan.total} samples, {len(run.moments)} kills to come")
                return False
            finally:
                (folder / f"{name}.json").write_text(json.dumps(asdict(run)))
    return True


def check(plan: Plan, folder: Path) -> None:
    """Nothing is missing, doubled or different after the kills. Prints what they cost."""
    calm, hit = (Run.load(folder / f"{name}.json", plan, 0) for name in ("calm", "hit"))
    print(f"undisturbed: {calm.seconds:.1f} s; with {sum(hit.kills.values())} kills {hit.kills}: ", end="")
    print(f"{hit.seconds:.1f} s, {hit.commands} commands")
    lost = hit.seconds - calm.seconds
    print(f"time lost: {lost:.1f} s, {lost / max(plan.kills, 1):.1f} s per kill")
    expected = Counter({(row, index): 1 for row in range(plan.rows) for index in range(plan.samples)})
    (digest, keys), (digest_hit, keys_hit) = content(folder / "calm"), content(folder / "hit")
    assert keys == expected, "samples are missing or doubled in the undisturbed run"
    assert keys_hit == expected, "samples are missing or doubled after the kills"
    assert digest_hit == digest, "the content differs"
    assert sum(hit.kills.values()) == plan.kills, "the job ended before the last kill"
    print(f"equal content: {digest}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill a batch job again and again, and compare what it writes.")
    for name, default in (("rows", 500), ("samples", 16), ("tokens", 16), ("kills", 20), ("seed", 0), ("tp", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="keep everything here; the same command again goes on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, to go on later")
    args = vars(parser.parse_args())
    folder, seconds = args.pop("folder"), args.pop("seconds")
    plan = Plan(**args)
    with tempfile.TemporaryDirectory() as temporary:
        if compare(plan, folder or Path(temporary), seconds):
            check(plan, folder or Path(temporary))


if __name__ == "__main__":
    main()
