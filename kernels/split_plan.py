"""The work list of the split attention of the Triton kernels: which rows go through which chunk of positions together.

Positions are cut into chunks at fixed places. The rows of a decoding family share the work of every whole chunk whose
blocks they share; a prompt's rows go through all their chunks one after the other. Made on the CPU from the step's
tables, by array operations only; knows no keys and no heads. Called by `kernels.kv_cache` and CUDA graphs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.transfer import sent

CHUNK = 128
"""Positions whose keys make one partial result. Part of what fixes the bits of a row."""
TOKENS = 16
"""Most query tokens of a work item."""
ITEM = 5
"""Numbers that describe a work item."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """N work items over T rows; all int32, on one device."""

    items: Tensor
    """[N, 5]: first row, rows, sequence whose table is read, first chunk, end of chunks."""
    count: Tensor
    """[1]: items that count; those behind are padding."""
    states: Tensor
    """[T + 1]: row r merges the partial results states[r]:states[r + 1], in this order."""
    num_states: int

    @classmethod
    def build(
        cls, query_starts: Tensor, context_lens: Tensor, block_tables: Tensor, block_size: int, share_prefix: bool
    ) -> "SplitPlan":
        """From the tensors of `AttentionBatch.build`, on the CPU. Work that takes longest comes first."""
        counts = query_starts.diff().long()
        lens = context_lens.long()
        chunks = torch.where(counts == 1, -(-lens // CHUNK), 1)
        common = _common_chunks(counts, lens, block_tables, block_size) if share_prefix else torch.zeros_like(lens)
        prompts = _prompt_items(query_starts.long(), counts, lens)
        items = torch.cat([prompts, _decode_items(query_starts[:-1].long(), counts == 1, chunks, common)])
        states = _exclusive_sum(torch.repeat_interleave(chunks, counts))
        return cls(items.int(), torch.tensor([len(items)], dtype=torch.int32), states.int(), int(states[-1]))

    def to(self, device: torch.device) -> "SplitPlan":
        """The same plan for the kernels of `device`."""
        items, count, states = (sent(x, device) for x in (self.items, self.count, self.states))
        return replace(self, items=items, count=count, states=states)


def _exclusive_sum(x: Tensor) -> Tensor:
    """[n] to [n + 1]."""
    return torch.cat([x.new_zeros(1), x.cumsum(0)])


def _common_chunks(counts: Tensor, lens: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """[S]: leading whole chunks that a decoding sequence has in common with the decoding one before it."""
    common = torch.zeros_like(lens)
    if len(lens) > 1:
        blocks = (tables[1:] == tables[:-1]).long().cumprod(1).sum(1)
        shared = torch.minimum(blocks * block_size, torch.minimum(lens[1:], lens[:-1])) // CHUNK
        common[1:] = shared * ((counts[1:] == 1) & (counts[:-1] == 1))
    return common


def _decode_items(first_row: Tensor, decodes: Tensor, chunks: Tensor, common: Tensor) -> Tensor:
    """One chunk each, for up to TOKENS neighbours that share it; ordered by chunk, so that neighbours run together."""
    width = int(chunks.max()) if len(chunks) else 0
    column = torch.arange(width)
    index = torch.arange(len(chunks))[:, None]
    alive = decodes[:, None] & (column < chunks[:, None])
    begin = torch.where(column < common[:, None], 0, index).cummax(0).values if alive.numel() else index
    opens = (alive & ((index - begin) % TOKENS == 0)).T
    chunk, sequence = opens.nonzero(as_tuple=True)
    owner = opens.flatten().cumsum(0)[alive.T.flatten()] - 1
    return torch.stack([first_row[sequence], owner.bincount(minlength=len(chunk)), sequence, chunk, chunk + 1], 1)


def _prompt_items(starts: Tensor, counts: Tensor, lens: Tensor) -> Tensor:
    """TOKENS neighbouring rows of one sequence through all chunks up to their last position."""
    tiles = torch.where(counts > 1, -(-counts // TOKENS), 0)
    sequence = torch.repeat_interleave(torch.arange(len(counts)), tiles)
    offset = (torch.arange(len(sequence)) - _exclusive_sum(tiles)[sequence]) * TOKENS
    rows = (counts[sequence] - offset).clamp(max=TOKENS)
    last = lens[sequence] - counts[sequence] + offset + rows - 1
    return torch.stack([starts[sequence] + offset, rows, sequence, torch.zeros_like(rows), last // CHUNK + 1], 1).flip(
        0
    )
