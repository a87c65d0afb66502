"""Norms, activation, and rotary embedding with the write of keys and values. One program per row, or per head of a row.

Arithmetic is float32 and rounds where `kernels.reference` does. A program sees one row only, so the rows beside it
cannot change its bits. Called by `kernels.ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_cache import AttentionBatch, KVCache

_COLUMNS = 1024


@triton.jit
def _rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """One row of `size` values. With ADD the residual comes first, and the rounded sum is stored in `total`."""
    at = tl.program_id(0).to(tl.int64) * size
    column = tl.arange(0, WIDE)
    inside = column < size
    row = tl.load(x + at + column, mask=inside, other=0.0)
    if ADD:
        added = row.to(tl.float32) + tl.load(residual + at + column, mask=inside, other=0.0).to(tl.float32)
        row = added.to(x.dtype.element_ty)
        tl.store(total + at + column, row, mask=inside)
    row = row.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / size + eps)
    normed = (row * scale).to(x.dtype.element_ty).to(tl.float32)
    result = normed * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at + column, result.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up: tl.tensor, out: tl.tensor, size: tl.tensor, WIDE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    inside = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotated(
    x: tl.tensor, cos_sin: tl.tensor, dim: tl.tensor, inside: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves of one head, turned; the table row is HALF cosines, then HALF sines."""
    low = tl.load(x + dim, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(x + HALF + dim, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_sin + dim, mask=inside, other=0.0)
    sin = tl.load(cos_sin + HALF + dim, mask=inside, other=0.0)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _rope_and_cache(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, cos_sin: tl.tensor, positions: tl.tensor, slots: tl.tensor,
    k_cache: tl.tensor, v_cache: tl.tensor, out: tl.tensor, q_stride: tl.tensor, k_stride: tl.tensor,
    v_stride: tl.tensor, q_head: tl.tensor, k_head: tl.tensor, v_head: tl.tensor, block_stride: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, head): a query head, or one key head and its value. A negative slot is written nowhere."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, WIDE)
    inside = dim < HALF
    turn = cos_sin + tl.load(positions + row).to(tl.int64) * (2 * HALF)
    if head < HEADS:
        low, high = _rotated(q + row * q_stride + head * q_head, turn, dim, inside, HALF)
        to = out + (row * HEADS + head) * (2 * HALF) + dim
        tl.store(to, low.to(out.dtype.element_ty), mask=inside)
        tl.store(to + HALF, high.to(out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            kv_head = head - HEADS
            low, high = _rotated(k + row * k_stride + kv_head * k_head, turn, dim, inside, HALF)
            offset = slot % BLOCK
            block = slot // BLOCK * block_stride + kv_head * (2 * HALF * BLOCK)
            to = k_cache + block + offset + dim * BLOCK
            tl.store(to, low.to(k.dtype.element_ty), mask=inside)
            tl.store(to + HALF * BLOCK, high.to(k.dtype.element_ty), mask=inside)
            value = v + row * v_stride + kv_head * v_head + dim
            to = v_cache + block + offset * (2 * HALF) + dim
            tl.store(to, tl.load(value, mask=inside), mask=inside)
            tl.store(to + HALF, tl.load(value + HALF, mask=inside), mask=inside)


@triton.jit
def _copy_blocks(
    k: tl.tensor, v: tl.tensor, pairs: tl.tensor, layer_stride: tl.tensor, block_stride: tl.tensor, WIDE: tl.constexpr
) -> None:
    """Program (pair, layer, piece): WIDE values of a block of keys and as many of its values."""
    pair = pairs + tl.program_id(0) * 2
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    column = tl.program_id(2) * WIDE + tl.arange(0, WIDE)
    inside = column < block_stride
    source = layer + tl.load(pair).to(tl.int64) * block_stride + column
    target = layer + tl.load(pair + 1).to(tl.int64) * block_stride + column
    tl.store(k + target, tl.load(k + source, mask=inside), mask=inside)
    tl.store(v + target, tl.load(v + source, mask=inside), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.ops.rms_norm`."""
    return _normed(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.add_rms_norm`."""
    return _normed(x, residual, weight, eps)


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, size = x.contiguous(), x.shape[-1]
    out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    if x.numel():
        added = x if residual is None else residual.contiguous()
        wide = triton.next_power_of_2(size)
        _rms_norm[x.numel() // size,](
            x,
            added,
            weight,
            out,
            total,
            size,
            eps,
            ADD=residual is not None,
            WIDE=wide,
            num_warps=_warps(wide),
            enable_fp_fusion=False,
        )
    return out, total


def _warps(wide: int) -> int:
    return max(1, min(8, wide // 256))


def silu_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.ops.silu_mul`."""
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    if out.numel():
        wide = min(_COLUMNS, triton.next_power_of_2(size))
        _silu_mul[out.numel() // size, triton.cdiv(size, wide)](
            gate_up, out, size, WIDE=wide, num_warps=_warps(wide), enable_fp_fusion=False
        )
    return out


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: KVCache, layer: int
) -> Tensor:
    """See `kernels.ops.rope_and_cache`. A row with a negative slot is rotated and written nowhere."""
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    out = q.new_empty(tokens, heads, dim)
    if tokens:
        _rope_and_cache[tokens, heads + kv_heads](
            q, k, v, cos_sin, batch.positions, batch.slots, kv.k[layer], kv.v[layer], out,
            q.stride(0), k.stride(0), v.stride(0), q.stride(1), k.stride(1), v.stride(1), kv.k.stride(1),
            HEADS=heads, KV_HEADS=kv_heads, HALF=dim // 2, BLOCK=kv.block_size,
            WIDE=triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def copy_blocks(kv: KVCache, pairs: Tensor) -> None:
    """See `kernels.kv_cache.KVCache.copy_blocks`; `pairs` [C, 2] lies on the cache's device."""
    if len(pairs):
        size = kv.k.stride(1)
        grid = len(pairs), kv.k.shape[0], triton.cdiv(size, _COLUMNS)
        _copy_blocks[grid](
            kv.k, kv.v, pairs.contiguous(), kv.k.stride(0), size, WIDE=_COLUMNS, num_warps=4, enable_fp_fusion=False
        )
