"""What tests that start commands need."""

import signal


def hear_interrupts() -> None:
    """To run before a command: tests in the background of a shell ignore Ctrl-C, and so would what they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
