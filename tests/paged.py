"""Batches over a paged cache full of numbers, on the CPU or on a GPU, for the tests of the Triton attention."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kernels import ops
from kernels.split_plan import SplitPlan


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block: int
    dtype: torch.dtype = torch.float32


Part = tuple[int, int, list[int]]
"""Rows, context length, block ids of one sequence."""


class Bench:
    """A cache full of numbers, and one query for every position."""

    def __init__(self, kernels: ModuleType, shape: Shape, *, device: str = "cpu", blocks: int = 64) -> None:
        self.kernels, self.shape, self.device = kernels, shape, torch.device(device)
        self.kv = ops.KVCache.allocate(1, blocks, shape.kv_heads, shape.dim, shape.block, shape.dtype, device)
        generator = torch.Generator().manual_seed(0)
        self.kv.k.copy_(torch.randn(self.kv.k.shape, generator=generator))
        self.kv.v.copy_(torch.randn(self.kv.v.shape, generator=generator))
        queries = torch.randn(512, shape.heads, shape.dim, generator=generator.manual_seed(1))
        self.queries = queries.to(self.device, shape.dtype)

    def batch(self, parts: list[Part], share: bool = True) -> ops.AttentionBatch:
        starts = torch.tensor([0, *[rows for rows, _, _ in parts]]).cumsum(0).int()
        lens = torch.tensor([length for _, length, _ in parts], dtype=torch.int32)
        width = max(len(table) for _, _, table in parts)
        tables = torch.tensor([table + [0] * (width - len(table)) for _, _, table in parts], dtype=torch.int32)
        positions = torch.cat([torch.arange(length - rows, length) for rows, length, _ in parts])
        plan = SplitPlan.build(starts, lens, tables, self.kv.block_size, share).to(self.device)
        tensors = (x.to(self.device) for x in (starts, lens, tables, positions, positions))
        return ops.AttentionBatch(*tensors, (), plan)

    def run(self, parts: list[Part], share: bool = True) -> list[Tensor]:
        """The rows of each sequence; its query at a position is the same in every call."""
        batch = self.batch(parts, share)
        out = self.kernels.attention(self.queries[batch.positions], batch, self.kv, 0, self.shape.dim**-0.5)
        return list(out.split([rows for rows, _, _ in parts]))


def table(shape: Shape, length: int, first: int) -> list[int]:
    return list(range(first, first - (-length // shape.block)))


def family(shape: Shape, children: int, prompt: int) -> list[Part]:
    """Children that share the blocks of a prompt and have some tokens of their own."""
    shared = table(shape, prompt, 1)
    result = []
    for child in range(children):
        length = prompt + 1 + 9 * child
        own = table(shape, length, 40 + 4 * child)[len(shared) :]
        result.append((1, length, shared + own))
    return result
