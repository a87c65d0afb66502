"""What every rank needs to run one step: a few integer tensors, and their packed form for the way to the other ranks.

Built by rank 0 from the scheduler's batch; carries no request, no sampling value and no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

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
        # Plain lists, one tensor per field at the end: arithmetic on tensors of a few numbers takes ten times as long.
        chunks = batch.chunks
        token_ids, positions, slots, ends = list[int](), list[int](), list[int](), [0]
        for chunk in chunks:
            span = range(chunk.start, chunk.start + chunk.count)
            blocks = chunk.table.blocks
            token_ids += chunk.token_ids
            positions += span
            slots += [blocks[at // block_size] * block_size + at % block_size for at in span]
            ends.append(len(token_ids))
        return cls(
            token_ids=_ints(token_ids),
            positions=_ints(positions),
            slots=_ints(slots),
            query_starts=_ints(ends),
            context_lens=_ints([chunk.start + chunk.count for chunk in chunks]),
            block_tables=_padded([chunk.table.blocks for chunk in chunks]),
            copies=_ints(batch.copies).view(-1, 2),
            logit_rows=_ints([end - 1 for chunk, end in zip(chunks, ends[1:], strict=True) if chunk.draws]),
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


def _ints(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _padded(tables: list[list[int]]) -> Tensor:
    width = max(map(len, tables))
    flat: list[int] = []
    for table in tables:
        flat += table
        flat += [0] * (width - len(table))
    return _ints(flat).view(-1, width)
