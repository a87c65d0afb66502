"""A batch job over a large input file: how soon its first samples are written, and how flat its memory stays.

    python -m tests.system.batch_large --megabytes 1024 --rows 5000
    python -m tests.system.batch_large --megabytes 1024 --rows 500000 --seconds 120

Writes an input of that size, every row a short question and a field that fills it up, and runs `choral batch` over it
with a group of the job's own and one token a sample, to the end or for so many seconds. Prints the time from the groups
being ready to the first shard, and then, as the job goes on, the memory of the driver, of the group's process and of
all its processes together that no file or other process has, and what is shared through Ray's object store.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.processes import resident_memory
from tests.system.batch_kills import is_kind, written

INTERVAL_S = 5.0
MIB = 1 << 20


@dataclass(frozen=True)
class Memory:
    """MiB at one moment of the job."""

    seconds: float
    samples: int
    driver: float
    group: float
    all: float
    store: float

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {getattr(self, name):.0f}" for name in ("driver", "group", "all", "store"))
        return f"{self.seconds:6.1f} s  {self.samples} samples, MiB: {parts}"


def write_input(megabytes: int, rows: int, file: Path) -> None:
    size = (megabytes << 20) // rows
    with file.open("w") as stream:
        for number in range(rows):
            row: dict[str, Any] = {"id": f"q{number}", "prompt": f"{number} plus {number % 7} is", "note": ""}
            row["note"] = "x" * max(0, size - len(json.dumps(row)) - 1)
            stream.write(json.dumps(row) + "\n")


class Job:
    """The command, and when its groups were ready."""

    def __init__(self, source: Path, output: Path) -> None:
        options = ["--extra", "note", "--max-tokens", "1", "--output", str(output)]
        command = [sys.executable, "-m", "deploy.cli", "batch", str(source), *options]
        self._output = output
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ready = threading.Event()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for line in self.process.stderr or ():
            print(line.rstrip(), flush=True)
            if line.startswith("ready after"):
                self.ready.set()

    def stop(self) -> str:
        """Its last words. It is asked to end where it has not."""
        self.process.terminate()
        with self.process:
            return (self.process.stdout.read() if self.process.stdout else "").strip()

    def memory(self, seconds: float, samples: int) -> Memory:
        driver = psutil.Process(self.process.pid)
        pids = [process.pid for process in (driver, *driver.children(recursive=True))]
        resident = {pid: resident_memory(pid) for pid in pids}
        own = {pid: parts["RssAnon"] / MIB for pid, parts in resident.items()}
        group = sum(own[pid] for pid in pids if is_kind("group", pid, self._output))
        store = max(parts["RssShmem"] for parts in resident.values()) / MIB
        return Memory(seconds, samples, own[driver.pid], group, sum(own.values()), store)


def follow(job: Job, output: Path, seconds: float) -> Iterator[Memory]:
    """The memory every few seconds from the first shard on; prints when that came."""
    while not job.ready.wait(timeout=1):
        if job.process.poll() is not None:
            return
    started = time.monotonic()
    while not any(output.glob("part-*")) and job.process.poll() is None:
        time.sleep(0.02)
    print(f"first samples written {time.monotonic() - started:.1f} s after the groups were ready", flush=True)
    while job.process.poll() is None and (passed := time.monotonic() - started) < seconds:
        with contextlib.suppress(psutil.NoSuchProcess):
            yield job.memory(passed, written(output))
        time.sleep(INTERVAL_S)


def spread(memories: Sequence[Memory]) -> str:
    """Smallest and largest of each part while the group ran, after the first quarter, when buffers have filled."""
    running = [memory for memory in memories if memory.group]
    later = running[len(running) // 4 :]
    ranges = {name: [getattr(memory, name) for memory in later] for name in ("driver", "group", "all", "store")}
    return ", ".join(f"{name} {min(values):.0f}..{max(values):.0f}" for name, values in ranges.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="A batch job over a large input: its first samples, and its memory.")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the input (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=5000, help="rows of the input (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop the job after so long")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, output, memories = Path(folder) / "in.jsonl", Path(folder) / "out", []
        write_input(args.megabytes, args.rows, source)
        job = Job(source, output)
        try:
            for memory in follow(job, output, args.seconds):
                memories.append(memory)
                print(memory, flush=True)
        finally:
            print(job.stop())
        print(f"MiB after the first quarter: {spread(memories)}")


if __name__ == "__main__":
    main()
