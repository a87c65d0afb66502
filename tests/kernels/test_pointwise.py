"""Norms, activation and rotary embedding: values against double precision, rows independent of their batch."""

import pytest
import torch
from torch import Tensor

from kernels import ops

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3, torch.float32: 2e-6}


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(
        got.double(), wanted, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype], check_dtype=False
    )


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 576), (3, 4, 24), (1, 8), (0, 32), (2, 1000)])
def test_rms_norm_values(kernels: str, dtype: torch.dtype, shape: tuple[int, ...]):
    x, weight = noise(*shape, dtype=dtype), noise(shape[-1], dtype=dtype, seed=1)
    close(ops.rms_norm(x, weight, 1e-5), normed(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_and_norms_what_it_returns(kernels: str, dtype: torch.dtype):
    x, residual = noise(7, 72, dtype=dtype), noise(7, 72, dtype=dtype, seed=1)
    weight = noise(72, dtype=dtype, seed=2)
    got, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(got, ops.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 40, 1536])
def test_silu_mul_values(kernels: str, dtype: torch.dtype, width: int):
    gate_up = noise(6, 2 * width, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, -1)
    close(ops.silu_mul(gate_up), torch.nn.functional.silu(gate) * up)


def test_silu_mul_at_the_ends_of_the_range(kernels: str):
    gate = torch.tensor([-1e4, -89.0, -20.0, 0.0, 20.0, 89.0, 1e4, 5.0])
    got = ops.silu_mul(torch.cat([gate, torch.ones(8)])[None])[0]
    torch.testing.assert_close(got, torch.nn.functional.silu(gate.double()).float(), rtol=1e-6, atol=1e-34)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_batch(kernels: str, dtype: torch.dtype):
    x, residual = noise(300, 576, dtype=dtype), noise(300, 576, dtype=dtype, seed=1)
    weight = noise(576, dtype=dtype, seed=2)
    torch.set_num_threads(2)
    whole = [ops.rms_norm(x, weight, 1e-5), *ops.add_rms_norm(x, residual, weight, 1e-5), ops.silu_mul(x)]
    for count in (1, 2):
        torch.set_num_threads(count)
        for begin, end in ((0, 1), (299, 300), (17, 50), (3, 300)):
            part, rest = x[begin:end], residual[begin:end]
            got = [ops.rms_norm(part, weight, 1e-5), *ops.add_rms_norm(part, rest, weight, 1e-5)]
            for one, all_rows in zip([*got, ops.silu_mul(part)], whole, strict=True):
                assert torch.equal(one, all_rows[begin:end])


def one_sequence(kv: ops.KVCache, rows: int, slots: Tensor) -> ops.AttentionBatch:
    positions = torch.arange(rows) + 3
    return ops.AttentionBatch.build(
        torch.tensor([0, rows], dtype=torch.int32),
        torch.tensor([rows + 3], dtype=torch.int32),
        torch.arange(kv.num_blocks, dtype=torch.int32)[None],
        positions,
        slots,
        kv,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 8), (2, 1, 40)])
def test_rope_rotates_halves_and_writes_the_slots(
    kernels: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
):
    kv = ops.KVCache.allocate(2, 5, kv_heads, dim, 4, dtype, "cpu")
    slots = torch.tensor([19, 0, 7, 8, 13])
    matrix = noise(5, (heads + 2 * kv_heads) * dim, dtype=dtype).unflatten(1, (-1, dim))
    q, k, v = matrix.split([heads, kv_heads, kv_heads], 1)
    table = ops.rope_tables(10000.0 ** -(torch.arange(0, dim, 2) / dim), 64, scale=1.25)
    batch = one_sequence(kv, 5, slots)
    rotated = ops.rope_and_cache(q, k, v, table, batch, kv, 1)

    angles = batch.positions[:, None].double() * (10000.0 ** -(torch.arange(0, dim, 2).double() / dim))
    turn = torch.polar(torch.full_like(angles, 1.25), angles)
    for got, x in ((rotated, q), (kv.k[1, slots // 4, :, :, slots % 4], k)):
        low, high = x.double().chunk(2, -1)
        spun = torch.complex(low, high) * turn[:, None]
        close(got, torch.cat([spun.real, spun.imag], -1))
    assert torch.equal(kv.v[1, slots // 4, :, slots % 4], v)
    assert not kv.k[0].any() and not kv.v[0].any()
    assert int(kv.v[1].any(-1).sum()) == 5 * kv_heads


def test_positions_and_slots_out_of_range_are_refused(kernels: str):
    kv = ops.KVCache.allocate(1, 2, 1, 8, 4, torch.float32, "cpu")
    x = torch.zeros(1, 1, 8)
    for slot, length in ((8, 64), (0, 3)):
        batch = one_sequence(kv, 1, torch.tensor([slot]))
        with pytest.raises((RuntimeError, IndexError)):
            ops.rope_and_cache(x, x, x, ops.rope_tables(torch.ones(4), length), batch, kv, 0)


def test_parameters_that_require_grad_leave_no_graph(kernels: str):
    with torch.inference_mode(False), torch.no_grad():
        weight = torch.nn.Parameter(torch.ones(32))
        got = ops.rms_norm(torch.randn(2, 32), weight, 1e-5)
        assert not got.requires_grad
