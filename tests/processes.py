"""What tests that start commands need."""

import signal
import socket


def hear_interrupts() -> None:
    """To run before a command: tests in the background of a shell ignore Ctrl-C, and so would what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
