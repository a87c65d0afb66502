"""Signals while something runs that must not be left halfway. Knows nothing of Ray."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Keep SIGINT and SIGTERM until the end of the block, where their handlers, the ones from before it, get them.

    Native code may put in handlers of its own in the block, so the system holds the signals back from this thread and
    those started in the block. What another thread hears meanwhile is noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: heard.append(number)) or signal.SIG_DFL for number in INTERRUPTS
    }
    before = signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        try:
            for again in heard:
                signal.raise_signal(again)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
