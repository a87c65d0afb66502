"""What tests that start commands need."""

import signal
import socket
from contextlib import suppress
from pathlib import Path


def hear_interrupts() -> None:
    """To run before a command: tests in the background of a shell ignore Ctrl-C, and so would what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def resident_memory(pid: int) -> dict[str, int]:
    """Bytes of a process: `RssAnon`, which no file or other process has, and `RssShmem`. Zero where it has ended."""
    found = {"RssAnon": 0, "RssShmem": 0}
    with suppress(OSError):
        for line in (Path("/proc") / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in found:
                found[name] = int(value.split()[0]) << 10
    return found
