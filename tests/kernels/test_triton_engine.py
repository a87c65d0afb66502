"""The engine over the Triton kernels, interpreted on the CPU, with decoding steps padded as captured ones are.

What stands between this and a GPU is the capture itself and bfloat16; both are checked in `tests/gpu`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels import implementation, kv_cache, ops
from tests import triton_interpreter
from tests.engines import Lab, family
from workers import model_runner
from workers.cuda_graphs import DecodeGraphs, StepBuffer

triton_kernels = triton_interpreter.load()

PROMPT = list(range(3, 13))


def _computed_anew(self: DecodeGraphs, buffer: StepBuffer) -> tuple[SimpleNamespace, torch.Tensor]:
    """In place of a capture: a replay computes what is in the buffer then."""
    logits = self._compute(buffer.token_ids, buffer.batch).clone()
    return SimpleNamespace(replay=lambda: logits.copy_(self._compute(buffer.token_ids, buffer.batch))), logits


@pytest.fixture
def lab(tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, interpreted: None) -> Iterator[Lab]:
    monkeypatch.setenv("CHORAL_KERNELS", "reference")
    implementation._built.cache_clear()
    for module in (ops, kv_cache, model_runner):
        monkeypatch.setattr(module, "triton_kernels", lambda device: triton_kernels)
    monkeypatch.setattr(DecodeGraphs, "_capture", _computed_anew)
    yield Lab(tiny_checkpoint("llama"), device="cpu", dtype="float32")
    implementation._built.cache_clear()


@pytest.mark.slow
def test_tokens_are_those_of_the_reference_and_a_family_equals_its_replays(
    lab: Lab, tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
):
    whole = lab.run([family("p", PROMPT, range(3), max_tokens=3)])
    assert lab.runner.graphs is not None and len(lab.runner.graphs.captured) == 1
    assert lab.run([family("p", PROMPT, [2], max_tokens=3)])["p", 2] == whole["p", 2]
    for module in (ops, kv_cache, model_runner):
        monkeypatch.setattr(module, "triton_kernels", lambda device: None)
    plain = Lab(tiny_checkpoint("llama"), device="cpu", dtype="float32").run(
        [family("p", PROMPT, range(3), max_tokens=3)]
    )
    assert {key: bits[0] for key, bits in plain.items()} == {key: bits[0] for key, bits in whole.items()}
