"""Ragged paged attention, split over fixed chunks of positions: partial results, then their merge.

A row is one query head of one token. It gets a partial result (maximum, sum, weighted values) from each chunk of its
sequence and merges them in ascending order, in registers or out of memory by the same arithmetic. Tiles have one shape
and their rows share only what is loaded, so sharing, neighbours and chunked prompts change no bit. Called by
`kernels.ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_cache import AttentionBatch, KVCache
from kernels.split_plan import CHUNK, ITEM, TOKENS

_LOWEST = tl.constexpr(-1.0e30)
"""Score of a position that is not seen, and maximum of nothing; finite, so that every difference is a number."""
_AT_ONCE = tl.constexpr(8)
"""Partial results whose loads a merge starts together."""
_FIELDS = tl.constexpr(ITEM)
_PROGRAMS = 1024
"""Most programs per KV head; each takes every so-manieth work item."""
_MOST_ROWS = 64
_LOG2_E = 1.4426950408889634


@triton.jit
def _blend(
    maximum: tl.tensor,
    total: tl.tensor,
    values: tl.tensor,
    part_maximum: tl.tensor,
    part_total: tl.tensor,
    part_values: tl.tensor,
    scale: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Merge a partial result, [R], [R] and [R, D], into a running one. One of the two factors is exactly 1.

    Additions are explicit fused ones: left to the compiler, two kernels might round differently.
    """
    both = tl.maximum(maximum, part_maximum)
    keep = tl.exp2((maximum - both) * scale)
    add = tl.exp2((part_maximum - both) * scale)
    total = tl.fma(total, keep, part_total * add)
    wide = tl.broadcast_to(keep[:, None], values.shape)
    return both, total, tl.fma(values, wide, part_values * add[:, None])


@triton.jit
def _chunk(
    query: tl.tensor, position: tl.tensor, index: tl.tensor, seen: tl.tensor, table: tl.tensor, k: tl.tensor,
    v: tl.tensor, block_stride: tl.tensor, scale: tl.tensor, DIM: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Partial result of query rows [R, WIDE] at `position` [R] from one chunk, of which positions below `seen` count.

    k and v point to a KV head of block 0. What lies beyond `seen` may be anything, so values there become 0.
    """
    place = index * CHUNK + tl.arange(0, CHUNK)
    block = tl.load(table + place // BLOCK, mask=place < seen, other=0).to(tl.int64) * block_stride
    keys_at = block + place % BLOCK
    if BLOCK % 16 == 0:
        keys_at = tl.max_contiguous(tl.multiple_of(keys_at, 16), 16)
    dim = tl.arange(0, WIDE)
    keys = tl.load(k + dim[:, None] * BLOCK + keys_at[None, :], mask=dim[:, None] < DIM, other=0.0)
    values_at = v + (block + place % BLOCK * DIM)[:, None] + dim[None, :]
    values = tl.load(values_at, mask=(place < seen)[:, None] & (dim < DIM)[None, :], other=0.0)
    visible = place[None, :] <= position[:, None]
    scores = tl.where(visible, tl.dot(query, keys, input_precision="ieee"), _LOWEST)
    maximum = tl.max(scores, 1)
    weights = tl.where(visible, tl.exp2((scores - maximum[:, None]) * scale), 0.0)
    return maximum, tl.sum(weights, 1), tl.dot(weights.to(values.dtype), values, input_precision="ieee")


@triton.jit(do_not_specialize=["width"])
def _partials(
    q: tl.tensor, positions: tl.tensor, tables: tl.tensor, width: tl.tensor, items: tl.tensor, count: tl.tensor,
    states: tl.tensor, k: tl.tensor, v: tl.tensor, block_stride: tl.tensor, token_stride: tl.tensor,
    head_stride: tl.tensor, scale: tl.tensor, part_values: tl.tensor, part_stats: tl.tensor, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:  # fmt: skip
    """Each program: one KV head, and of its work items the rows [z * ROWS, (z + 1) * ROWS) for z = program 2."""
    kv_head = tl.program_id(1)
    begin = tl.program_id(2) * ROWS
    local = begin + tl.arange(0, ROWS)
    dim = tl.arange(0, WIDE)
    head = kv_head * GROUP + local % GROUP
    for number in range(tl.program_id(0), tl.load(count), tl.num_programs(0)):
        item = items + number * _FIELDS
        rows = tl.load(item + 1) * GROUP
        if begin < rows:
            mine = local < rows
            stored = mine[:, None] & (dim < DIM)[None, :]
            token = tl.load(item) + local // GROUP
            position = tl.load(positions + token, mask=mine, other=-1)
            query_at = token.to(tl.int64) * token_stride + head * head_stride
            query = tl.load(q + query_at[:, None] + dim[None, :], mask=stored, other=0.0)
            table = tables + tl.load(item + 2).to(tl.int64) * width
            seen = tl.max(position, 0) + 1
            maximum = tl.full((ROWS,), _LOWEST, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            values = tl.zeros((ROWS, WIDE), tl.float32)
            first = tl.load(item + 3)
            for index in range(first, tl.load(item + 4)):
                new_maximum, new_total, new_values = _chunk(
                    query, position, index, seen, table, k + kv_head * DIM * BLOCK, v + kv_head * DIM * BLOCK,
                    block_stride, scale, DIM, WIDE, BLOCK, CHUNK,
                )  # fmt: skip
                maximum, total, values = _blend(maximum, total, values, new_maximum, new_total, new_values, scale)
            state = (tl.load(states + token, mask=mine, other=0) + first).to(tl.int64) * (GROUP * KV_HEADS) + head
            tl.store(part_stats + state * 2, maximum, mask=mine)
            tl.store(part_stats + state * 2 + 1, total, mask=mine)
            tl.store(part_values + state[:, None] * DIM + dim[None, :], values, mask=stored)


@triton.jit
def _merge(
    states: tl.tensor, part_values: tl.tensor, part_stats: tl.tensor, out: tl.tensor, scale: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr,
) -> None:  # fmt: skip
    """Each program: one head of one row. A row without partial results, as padding is, gives zeros."""
    row, head = tl.program_id(0), tl.program_id(1)
    dim = tl.arange(0, WIDE)
    maximum = tl.full((1,), _LOWEST, tl.float32)
    total = tl.zeros((1,), tl.float32)
    values = tl.zeros((1, WIDE), tl.float32)
    end = tl.load(states + row + 1)
    for begin in range(tl.load(states + row), end, _AT_ONCE):
        for ahead in tl.static_range(_AT_ONCE):
            there = begin + ahead + tl.arange(0, 1) < end
            state = (begin + ahead + tl.arange(0, 1)).to(tl.int64) * HEADS + head
            new_maximum = tl.load(part_stats + state * 2, mask=there, other=_LOWEST)
            new_total = tl.load(part_stats + state * 2 + 1, mask=there, other=0.0)
            mask = there[:, None] & (dim < DIM)[None, :]
            new_values = tl.load(part_values + state[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
            maximum, total, values = _blend(maximum, total, values, new_maximum, new_total, new_values, scale)
    result = values / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (row.to(tl.int64) * HEADS + head) * DIM + dim[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=(dim < DIM)[None, :])


def attention(q: Tensor, batch: AttentionBatch, kv: KVCache, layer: int, scale: float) -> Tensor:
    """See `kernels.ops.attention`; the batch must have been built with a split plan."""
    plan = batch.split
    if plan is None:
        raise ValueError("the batch was built for another device: it has no split plan")
    (tokens, heads, dim), kv_heads = q.shape, kv.k.shape[2]
    out = q.new_empty(tokens, heads * dim)
    if tokens == 0:
        return out
    values = q.new_empty(plan.num_states, heads, dim, dtype=torch.float32)
    stats = q.new_empty(plan.num_states, heads, 2, dtype=torch.float32)
    wide, group = max(16, triton.next_power_of_2(dim)), heads // kv_heads
    rows = min(_MOST_ROWS, triton.next_power_of_2(TOKENS * group))
    grid = (min(_PROGRAMS, max(1, len(plan.items))), kv_heads, triton.cdiv(TOKENS * group, rows))
    _partials[grid](
        q, batch.positions, batch.block_tables, batch.block_tables.stride(0), plan.items, plan.count, plan.states,
        kv.k[layer], kv.v[layer], kv.k.stride(1), q.stride(0), q.stride(1), scale * _LOG2_E, values, stats,
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, WIDE=wide, BLOCK=kv.block_size, CHUNK=CHUNK, ROWS=rows,
        num_warps=rows // 16, enable_fp_fusion=False, num_stages=_stages(wide, kv.k.element_size()),
    )  # fmt: skip
    _merge[tokens, heads](
        plan.states,
        values,
        stats,
        out,
        scale * _LOG2_E,
        HEADS=heads,
        DIM=dim,
        WIDE=wide,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


def _stages(wide: int, item_size: int) -> int:
    """Chunks whose keys and values are in shared memory together: two where they leave room for a second program."""
    return 2 if CHUNK * wide * item_size * 2 <= 32 * 1024 else 1
