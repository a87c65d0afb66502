"""Norms, activation, rotary embedding and block copies in Triton, interpreted on the CPU, against the reference."""

import pytest
import torch
from torch import Tensor

from kernels import ops, reference
from tests import triton_interpreter

triton_kernels = triton_interpreter.load()
pytestmark = pytest.mark.usefixtures("interpreted")

DTYPES = [torch.float32, torch.float16]


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, wanted: Tensor) -> None:
    tolerance = 1e-3 if got.dtype == torch.float16 else 1e-6
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 40), (2, 4, 24), (1, 600), (0, 32)])
def test_rms_norm_is_that_of_the_reference(dtype: torch.dtype, shape: tuple[int, ...]):
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype, seed=1)
    close(triton_kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_and_norms_what_it_returns(dtype: torch.dtype):
    x, residual, weight = noise(4, 72, dtype=dtype), noise(4, 72, dtype=dtype, seed=1), noise(72, dtype=dtype, seed=2)
    got, total = triton_kernels.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(got, triton_kernels.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 40, 1100])
def test_silu_mul_is_that_of_the_reference(dtype: torch.dtype, width: int):
    gate_up = noise(3, 2 * width, dtype=dtype) * 4
    close(triton_kernels.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_c2_rows_do_not_depend_on_their_batch():
    x, residual, weight = noise(6, 80), noise(6, 80, seed=1), noise(80, seed=2)
    whole = [*triton_kernels.add_rms_norm(x, residual, weight, 1e-5), triton_kernels.silu_mul(x)]
    for part in (slice(0, 1), slice(2, 6)):
        got = [*triton_kernels.add_rms_norm(x[part], residual[part], weight, 1e-5), triton_kernels.silu_mul(x[part])]
        assert all(torch.equal(one, rows[part]) for one, rows in zip(got, whole, strict=True))


def rope(kernels: object, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, slots: Tensor):
    kv = ops.KVCache.allocate(2, 5, kv_heads, dim, 4, dtype, "cpu")
    matrix = noise(5, (heads + 2 * kv_heads) * dim, dtype=dtype).unflatten(1, (-1, dim))
    q, k, v = matrix.split([heads, kv_heads, kv_heads], 1)
    table = ops.rope_tables(100.0 ** -(torch.arange(0, dim, 2) / dim), 64, scale=1.25)
    none = torch.zeros(0)
    batch = ops.AttentionBatch(none, none, none, torch.tensor([3, 60, 0, 7, 8]), slots, ())
    return kernels.rope_and_cache(q, k, v, table, batch, kv, 1), kv  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 1, 16), (2, 2, 24)])
def test_rope_and_cache_is_that_of_the_reference(dtype: torch.dtype, heads: int, kv_heads: int, dim: int):
    slots = torch.tensor([19, 0, 7, 8, 13])
    got, kv = rope(triton_kernels, dtype, heads, kv_heads, dim, slots)
    wanted, expected = rope(reference, dtype, heads, kv_heads, dim, slots)
    close(got, wanted)
    close(kv.k, expected.k)
    assert torch.equal(kv.v, expected.v)


def test_a_row_with_a_negative_slot_is_written_nowhere():
    """Padding of a captured step must not reach anybody's keys."""
    _, kv = rope(triton_kernels, torch.float32, 3, 1, 16, torch.tensor([-1, -1, 6, -1, -1]))
    _, whole = rope(triton_kernels, torch.float32, 3, 1, 16, torch.tensor([0, 1, 6, 8, 9]))
    for cache, other in ((kv.k.transpose(3, 4), whole.k.transpose(3, 4)), (kv.v, whole.v)):
        assert int(cache.any(-1).sum()) == 1
        assert torch.equal(cache[1, 1, 0, 2], other[1, 1, 0, 2])


def test_blocks_are_copied_in_every_layer_and_nothing_else_changes():
    kv = ops.KVCache.allocate(3, 6, 2, 24, 32, torch.float32, "cpu")
    kv.k.normal_()
    kv.v.normal_()
    before = kv.k.clone(), kv.v.clone()
    triton_kernels.copy_blocks(kv, torch.tensor([[0, 4], [0, 5], [2, 1]]))
    for cache, old in zip((kv.k, kv.v), before, strict=True):
        assert torch.equal(cache, old[:, [0, 2, 2, 3, 0, 0]])
