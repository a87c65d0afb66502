"""What every rank needs to run one step: a few integer tensors, and their packed form for the way to the other ranks.

Built by rank 0 from the scheduler's batch; carries no request, no sampling value and no text.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from workers.scheduler import Batch


@dataclass(frozen=True, slots=True)
class StepInput:
    """T tokens of S sequences; all int64."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T] block * block_size + offset
    query_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    block_tables: Tensor  # [S, B] padded with 0
    copies: Tensor  # [C, 2]
    logit_rows: Tensor  # [M] rows of the T whose logits are drawn from

    @classmethod
    def build(cls, batch: Batch, block_size: int) -> Self:
        chunks = batch.chunks
        counts = torch.tensor([chunk.count for chunk in chunks])
        starts = torch.tensor([chunk.start for chunk in chunks])
        ends = counts.cumsum(0)
        query_starts = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        positions = torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - query_starts[:-1], counts)
        tables = _padded([chunk.table.blocks for chunk in chunks])
        owner = torch.repeat_interleave(torch.arange(len(chunks)), counts)
        return cls(
            token_ids=torch.tensor([token for chunk in chunks for token in chunk.token_ids]),
            positions=positions,
            slots=tables[owner, positions // block_size] * block_size + positions % block_size,
            query_starts=query_starts,
            context_lens=starts + counts,
            block_tables=tables,
            copies=torch.tensor(batch.copies, dtype=torch.int64).reshape(-1, 2),
            logit_rows=ends[torch.tensor([bool(chunk.draws) for chunk in chunks])] - 1,
        )

    def pack(self) -> Tensor:
        """One flat int64 tensor: the sizes, then the values."""
        parts = [getattr(self, f.name) for f in fields(self)]
        sizes = torch.tensor([self.block_tables.shape[1], *(part.numel() for part in parts)])
        return torch.cat([sizes, *(part.reshape(-1) for part in parts)])

    @classmethod
    def unpack(cls, packed: Tensor) -> Self:
        names = [f.name for f in fields(cls)]
        head = len(names) + 1
        width, *sizes = packed[:head].tolist()
        parts = dict(zip(names, torch.split(packed[head:], sizes), strict=True))
        parts["block_tables"] = parts["block_tables"].reshape(-1, width)
        parts["copies"] = parts["copies"].reshape(-1, 2)
        return cls(**parts)


def _padded(tables: list[list[int]]) -> Tensor:
    width = max(map(len, tables))
    return torch.tensor([table + [0] * (width - len(table)) for table in tables])
