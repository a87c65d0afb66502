"""C5 and the memory of a family: its prompt once, its suffixes, and no more than a block beside; nothing grows."""

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engines import Lab, family

BLOCK = 16


@pytest.fixture(scope="module")
def lab(tiny_checkpoint: Callable[[str], Path]) -> Lab:
    return Lab(tiny_checkpoint("llama"), dtype="float32", block_size=BLOCK)


@pytest.mark.parametrize(("prompt_len", "n"), [(1, 1), (16, 8), (17, 8), (40, 5), (95, 32)])
def test_a_family_holds_its_prompt_once_and_its_suffixes(lab: Lab, prompt_len: int, n: int):
    engine = lab.engine(kv_blocks=256)
    engine.submit([family("p", range(1, prompt_len + 1), range(n), max_tokens=24)])
    prompt, tokens, most = _blocks(prompt_len), [0] * n, 0
    while engine.has_work:
        for parents in engine.step().values():
            for child in parents["p"].children.values():
                tokens[child.index] += len(child.token_ids)
        used = engine.blocks.num_used
        assert used <= prompt + sum(_blocks(suffix) + 1 for suffix in tokens)
        assert engine.stats()["kv_bytes_used"] == used * lab.runner.block_bytes
        most = max(most, used)
    assert most >= prompt_len // BLOCK + n * _blocks(23)
    assert engine.blocks.num_used == 0


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def test_block_bytes_are_those_of_the_cache(lab: Lab):
    lab.engine(kv_blocks=7)
    assert lab.runner.kv.nbytes == 7 * lab.runner.block_bytes


@pytest.mark.slow
def test_two_thousand_families_leave_nothing_behind(lab: Lab):
    engine = lab.engine(kv_blocks=64)

    def held_after(first: int, count: int) -> int:
        """Bytes held when `count` more families have been served. They come and go with objects torch keeps ready."""
        for number in range(first, first + count):
            engine.submit([family(f"p{number}", [1 + number % 50, 2, 3], range(3), max_tokens=2, prompt_number=number)])
            while engine.has_work:
                engine.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        *before, last = [held_after(first, 500) for first in range(0, 2000, 500)]
    finally:
        tracemalloc.stop()
    assert last - max(before) < 4000, f"bytes held after every 500 families: {before}, {last}"
    assert engine.blocks.num_used == 0 and not engine.scheduler.families
