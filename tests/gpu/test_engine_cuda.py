"""The engine on a CUDA device, without Ray: the same greedy tokens as on the CPU, families, and nothing left behind.

Run with `pytest -m gpu tests/gpu` on a machine with a GPU; a few seconds.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.engines import Lab, family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPT = list(range(3, 40))


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
