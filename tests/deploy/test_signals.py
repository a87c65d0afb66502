"""Signals in a block that holds them: kept to its end, then heard by the handlers from before it."""

import signal

import pytest

from deploy.signals import INTERRUPTS, interrupts_held


def blocked() -> set[signal.Signals]:
    return set(INTERRUPTS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_signal_is_heard_at_the_end_and_by_the_handler_from_before():
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with interrupts_held():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
            assert not heard
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interrupt_leaves_the_block_when_it_is_done():
    done = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    assert not blocked()


def test_a_signal_that_another_thread_hears_is_kept_too():
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as a thread from before the block
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done
    assert not blocked()
