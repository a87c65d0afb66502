"""The obvious version of every kernel in torch: oracle of the tests and fallback where nothing faster runs.

Like the fast versions it gives each row the same bits whatever rows are beside it: a sum is a chain or a
tree of elementwise additions, because the order inside torch's own reductions and matrix products depends
on shapes and threads, and exponentials are rounded from double. Called by `kernels.ops` only.
"""

import torch
from torch import Tensor

from kernels.kv_cache import AttentionBatch, KVCache

_ROWS_AT_ONCE = 64


def _exp(x: Tensor) -> Tensor:
    return torch.exp(x.double()).float()


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving it."""
    while (size := x.shape[-1]) > 1:
        half = size // 2
        halved = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat([halved, x[..., 2 * half :]], -1) if size % 2 else halved
    return x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    mean = _tree_sum(wide * wide) / x.shape[-1]
    return weight * (wide * (1.0 / torch.sqrt(mean + eps))).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return (gate / (1.0 + torch.exp(-gate)) * up).float().to(gate_up.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def rope_and_cache(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: KVCache, layer: int
) -> Tensor:
    cos, sin = cos_sin[batch.positions].unsqueeze(1).chunk(2, -1)
    block = batch.slots // kv.block_size
    offset = batch.slots % kv.block_size
    kv.k[layer][block, :, :, offset] = _rotate(k, cos, sin).to(kv.k.dtype)
    kv.v[layer][block, :, offset] = v.to(kv.v.dtype)
    return _rotate(q, cos, sin)


def attention(q: Tensor, batch: AttentionBatch, kv: KVCache, layer: int, scale: float, exact: bool = True) -> Tensor:
    """Attention by blocks. `exact` fixes the order of every sum; without it matrix products are used."""
    if len(q) == 0:
        return q.flatten(1)
    counts = batch.query_starts.diff().long()
    sequence = torch.repeat_interleave(torch.arange(len(counts), device=q.device), counts)
    tables = batch.block_tables.long()
    kv_heads = kv.k.shape[2]
    grouped = (q.float() * scale).view(len(q), kv_heads, q.shape[1] // kv_heads, q.shape[2])
    parts = [
        _attend(grouped[rows], batch.positions[rows], tables[sequence[rows]], kv.k[layer], kv.v[layer], exact)
        for rows in torch.arange(len(q), device=q.device).split(_ROWS_AT_ONCE)  # type: ignore[no-untyped-call]
    ]
    return torch.cat(parts).flatten(1).to(q.dtype)


def _attend(q: Tensor, positions: Tensor, tables: Tensor, k: Tensor, v: Tensor, exact: bool) -> Tensor:
    """Rows q [R, KV heads, group, D] over their blocks, in ascending order, merged by running maximum."""
    size = k.shape[-1]
    output = torch.zeros_like(q)
    maximum = q.new_full((*q.shape[:-1], 1), float("-inf"))
    total = torch.zeros_like(maximum)
    for index in range(int(positions.max()) // size + 1):
        rows = (positions >= index * size).nonzero().squeeze(1)
        blocks = tables[rows, index]
        visible = torch.arange(index * size, (index + 1) * size, device=q.device) <= positions[rows, None]
        block_maximum, block_total, block_output = _partial(
            q[rows], k[blocks].float(), v[blocks].float(), visible[:, None], exact
        )
        merged = torch.maximum(maximum[rows], block_maximum)
        old, new = _exp(maximum[rows] - merged), _exp(block_maximum - merged)
        maximum[rows] = merged
        total[rows] = total[rows] * old + block_total * new
        output[rows] = output[rows] * old + block_output * new
    return output / total


def _partial(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, exact: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum, sum and weighted values of one block: q [R, H, G, D], k [R, H, D, B], v [R, H, B, D]."""
    v = v.masked_fill(~visible[..., None], 0.0)
    product = _ordered_product if exact else torch.matmul
    scores = product(q, k).masked_fill(~visible[:, :, None], float("-inf"))
    maximum = scores.amax(-1, keepdim=True)
    weights = _exp(scores - maximum)
    return maximum, _tree_sum(weights), product(weights, v)


def _ordered_product(a: Tensor, b: Tensor) -> Tensor:
    """a [..., M, K] @ b [..., K, N], adding the K terms one after the other."""
    result = a[..., 0, None] * b[..., None, 0, :]
    for index in range(1, a.shape[-1]):
        result += a[..., index, None] * b[..., None, index, :]
    return result
