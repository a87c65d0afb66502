"""The engine on a CUDA device, without Ray: the same greedy tokens as on the CPU, families, and nothing left behind.

Run with `pytest -m gpu tests/gpu` on a machine with a GPU; a few seconds.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import implementation
from tests.engines import Lab, family, finish

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT = list(range(3, 40))
LONG = [3 + i % 300 for i in range(200)]
"""More than one chunk of attention, so that siblings share one."""


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_greedy_tokens_equal_those_of_the_cpu(tiny_checkpoint: Callable[[str], Path], name: str):
    request = family("p", PROMPT, range(3), temperature=0.0, logprobs=None, max_tokens=32)
    runs = [Lab(tiny_checkpoint(name), dtype="float32", device=d).run([request]) for d in ("cpu", "cuda")]
    assert runs[0] == runs[1]


def test_a_family_shares_its_prompt_and_repeats_itself(embedded_model: Path):
    lab = Lab(embedded_model, device="cuda")
    request = family("p", PROMPT, range(16), max_tokens=24)
    first = lab.run([request])
    assert len({bits[0] for bits in first.values()}) == 16
    assert {key: bits[0] for key, bits in lab.run([request]).items()} == {key: b[0] for key, b in first.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_c2_a_family_equals_its_children_replayed_one_by_one(tiny_checkpoint: Callable[[str], Path], dtype: str):
    """Up to FEWEST children decode in steps of one padded size, so that even the matrix products are the same."""
    lab = Lab(tiny_checkpoint("llama"), device="cuda", dtype=dtype)
    whole = lab.run([family("p", LONG, range(8))])
    assert len({bits[0] for bits in whole.values()}) > 1
    for sample in range(8):
        assert lab.run([family("p", LONG, [sample])])["p", sample] == whole["p", sample]


def test_captured_steps_draw_what_eager_steps_draw(tiny_checkpoint: Callable[[str], Path]):
    """Buckets of several sizes, used again and again, beside prompts that run eagerly."""
    lab = Lab(tiny_checkpoint("qwen3"), device="cuda", dtype="float32", max_running=64)
    requests = [family("p", LONG, range(20)), family("q", PROMPT, range(3), seed=2, max_tokens=30, top_p=0.9)]
    captured = lab.run(requests)
    assert lab.runner.graphs is not None and len(lab.runner.graphs.captured) >= 2
    engine = lab.engine()
    lab.runner.graphs = None
    engine.submit(requests)
    eager = finish(engine, requests)
    assert {key: bits[0] for key, bits in eager.items()} == {key: bits[0] for key, bits in captured.items()}


def test_the_reference_can_be_forced_on_a_gpu(tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch):
    """The same tokens without Triton and without graphs."""
    request = family("p", LONG, range(3), temperature=0.0, logprobs=None)
    fast = Lab(tiny_checkpoint("llama"), device="cuda", dtype="float32").run([request])
    monkeypatch.setenv("CHORAL_KERNELS", "reference")
    implementation._compiled.cache_clear()
    try:
        lab = Lab(tiny_checkpoint("llama"), device="cuda", dtype="float32")
        assert lab.runner.graphs is None
        assert lab.run([request]) == fast
    finally:
        implementation._compiled.cache_clear()
