"""Every Triton kernel on the device against the reference, in bfloat16 and float32, and contract C2 as equal bits.

Run with `pytest -m gpu tests/gpu` on a machine with a GPU; a minute or two, most of it compiling.
"""

import pytest
import torch
from torch import Tensor

from kernels import implementation, ops, reference, reference_sampler
from tests.kernels.test_sampler import batch, lists, noise
from tests.paged import Bench, Shape, family, table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
SHAPES = [
    Shape(9, 3, 64, 32, torch.bfloat16),
    Shape(32, 8, 128, 16, torch.bfloat16),
    Shape(14, 2, 64, 64, torch.bfloat16),
    Shape(4, 4, 80, 32, torch.bfloat16),
    Shape(9, 3, 64, 32),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}x{s.dim}b{s.block}{s.dtype}")
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture(scope="module")
def kernels():
    """The package under test; a test that silently compared the reference with itself would prove nothing."""
    found = implementation.triton_kernels(CUDA)
    assert found is not None, ops.implementation(CUDA)
    return found


def bench(kernels, shape: Shape) -> Bench:
    return Bench(kernels, shape, device="cuda", blocks=512)


def on_device(*size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def close(got: Tensor, wanted: Tensor, loose: float = 1.6e-2) -> None:
    tolerance = loose if got.dtype == torch.bfloat16 else 2e-5
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@dtypes
def test_pointwise_kernels(kernels, dtype: torch.dtype):
    x, residual, weight = (on_device(*s, dtype=dtype, seed=i) for i, s in enumerate([(37, 576), (37, 576), (576,)]))
    close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    for got, wanted in zip(
        kernels.add_rms_norm(x, residual, weight, 1e-5), reference.add_rms_norm(x, residual, weight, 1e-5), strict=True
    ):
        close(got, wanted)
    wide = on_device(37, 3072, dtype=dtype)
    close(kernels.silu_mul(wide), reference.silu_mul(wide))


@shapes
def test_rope_writes_and_block_copies(kernels, shape: Shape):
    matrix = on_device(5, shape.heads + 2 * shape.kv_heads, shape.dim, dtype=shape.dtype)
    q, k, v = matrix.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    slots = torch.tensor([3, 40, 7, 81, 100], device=CUDA)
    turns = ops.rope_tables(100.0 ** -(torch.arange(0, shape.dim, 2, device=CUDA) / shape.dim), 200)
    results = []
    for one in (kernels, reference):
        kv = ops.KVCache.allocate(2, 16, shape.kv_heads, shape.dim, shape.block, shape.dtype, CUDA)
        step = ops.AttentionBatch(slots, slots, slots, slots, slots, ())
        results.append([one.rope_and_cache(q, k, v, turns, step, kv, 1), kv.k, kv.v])
    for got, wanted in zip(*results, strict=True):
        close(got, wanted)
    kv.copy_blocks(torch.tensor([[0, 8], [2, 9]]))
    assert kv.v.any() and torch.equal(kv.v[:, 8], kv.v[:, 0]) and torch.equal(kv.k[:, 9], kv.k[:, 2])


@shapes
def test_attention_values(kernels, shape: Shape):
    lab = bench(kernels, shape)
    parts = [(1, 340, table(shape, 340, 1)), (40, 200, table(shape, 200, 60)), (1, 1, [40]), *family(shape, 6, 256)]
    step = lab.batch(parts)
    wanted = reference.attention(lab.queries[step.positions], step, lab.kv, 0, shape.dim**-0.5, exact=False)
    close(torch.cat(lab.run(parts)), wanted, 2e-2)


@shapes
def test_c2_neither_sharing_nor_the_batch_shows(kernels, shape: Shape):
    lab = bench(kernels, shape)
    parts = [*family(shape, 20, 256), (50, 300, table(shape, 300, 300)), (1, 130, table(shape, 130, 400))]
    shared = lab.run(parts)
    assert torch.equal(torch.cat(shared), torch.cat(lab.run(parts, share=False)))
    for order in ([21, 3, 20, 0], [7], [20]):
        assert all(torch.equal(o, shared[i]) for o, i in zip(lab.run([parts[i] for i in order]), order, strict=True))


@shapes
def test_c2_chunks_of_a_prompt_do_not_show(kernels, shape: Shape):
    lab, blocks = bench(kernels, shape), table(shape, 400, 1)
    whole = lab.run([(400, 400, blocks)])[0]
    for sizes in ([1] * 40, [130, 1, 200, 69]):
        done, outputs = 400 - sum(sizes), []
        for size in sizes:
            done += size
            outputs += lab.run([(size, done, blocks)])
        assert torch.equal(torch.cat(outputs), whole[-sum(sizes) :])


def close_draws(got: ops.SampleResult, wanted: ops.SampleResult) -> None:
    assert torch.equal(got.tokens, wanted.tokens)
    assert torch.equal(got.top_ids, wanted.top_ids)
    torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(got.top_logprobs, wanted.top_logprobs, rtol=0, atol=2e-5)


@dtypes
def test_draws_are_those_of_the_reference(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    draws = batch(
        24,
        temperature=torch.rand(24, generator=generator) * 1.9 + 0.1,
        top_k=torch.tensor([0, 1, 5, 40, 3000, 99999] * 4, dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.95, 0.5, 0.999] * 6),
        min_p=torch.tensor([0.0, 0.0, 0.1] * 8),
        num_logprobs=torch.tensor([-1, 0, 5, 20] * 6, dtype=torch.int32),
    )
    logits = noise(24, 49152, 3.0, dtype)
    on_cpu = reference_sampler.sample(logits, draws)
    got = ops.sample(logits.to(CUDA), draws)
    close_draws(
        ops.SampleResult(got.tokens.cpu(), got.logprobs.cpu(), got.top_ids.cpu(), got.top_logprobs.cpu()), on_cpu
    )


def test_noise_has_the_bits_of_the_reference():
    """Over equal logits the token is the uniform number cut to the vocabulary."""
    size, count = 2**18, 200
    keys = batch(
        count, rows=torch.zeros(count, dtype=torch.int64), seed=torch.arange(count) * 2**50 - 2**56,
        prompt_number=torch.arange(count) % 3, sample=torch.arange(count) * 2**25, position=torch.arange(count) % 7,
    )  # fmt: skip
    u = ops.uniform(keys.seed, keys.prompt_number, keys.sample, keys.position)
    tokens = ops.sample(torch.zeros(1, size, device=CUDA), keys).tokens.cpu()
    assert torch.equal(tokens, (u * size).long())


def test_lists_penalties_and_draws_without_choice():
    logits = noise(4, 1000, 3.0, torch.float32)
    logits[3, 5] = float("nan")
    seen_starts, seen_ids = lists([[0, 1, 999], [], [7], []])
    bias_starts, bias_ids = lists([[], [9], [7, 8], []])
    banned_starts, banned_ids = lists([[5], [], [], []])
    allowed_starts, allowed_ids = lists([[], [], [7, 8], []])
    draws = batch(
        4, temperature=0.0, repetition=1.3, presence=0.4, frequency=0.2,
        seen_starts=seen_starts, seen_ids=seen_ids, seen_counts=torch.tensor([0, 1, 2, 1], dtype=torch.int32),
        bias_starts=bias_starts, bias_ids=bias_ids, bias_values=torch.tensor([30.0, -1.0, 2.0]),
        banned_starts=banned_starts, banned_ids=banned_ids, allowed_starts=allowed_starts, allowed_ids=allowed_ids,
    )  # fmt: skip
    wanted = reference_sampler.sample(logits, draws).tokens
    assert torch.equal(ops.sample(logits.to(CUDA), draws).tokens.cpu(), wanted) and wanted[3] == -1
