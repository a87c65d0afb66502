"""The paged KV memory of one rank and the description of one attention step over it.

Owns the block layout (keys transposed, so that scores vectorise over positions) and the copying of
blocks. It knows neither sequences nor reference counts: a block is an integer. The model runner allocates
one `KVCache`, and builds one `AttentionBatch` per step that every layer then uses.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.implementation import cpu_kernels, triton_kernels
from kernels.split_plan import SplitPlan
from kernels.transfer import sent


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers of one rank, in blocks of `block_size` positions."""

    k: Tensor
    """[layers, blocks, KV heads, head_dim, block_size]"""
    v: Tensor
    """[layers, blocks, KV heads, block_size, head_dim]"""

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """A zeroed cache; see `bytes_per_block` for its size."""
        leading = (num_layers, num_blocks, num_kv_heads)
        native = cpu_kernels(torch.device(device))
        zeros = partial(torch.zeros, device=device) if native is None else native.lasting_zeros
        return cls(
            zeros((*leading, head_dim, block_size), dtype=dtype),
            zeros((*leading, block_size, head_dim), dtype=dtype),
        )

    @staticmethod
    def bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return 2 * num_layers * num_kv_heads * head_dim * block_size * dtype.itemsize

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        return self.k.shape[4]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copy blocks in every layer; `pairs` [C, 2] holds (source, destination) block ids.

        No block may be both a source and a destination of one call.
        """
        pairs = sent(pairs.long(), self.k.device)
        fast = triton_kernels(self.k.device)
        if fast is not None:
            fast.copy_blocks(self, pairs)
            return
        source, destination = pairs.unbind(1)
        for cache in (self.k, self.v):
            cache.index_copy_(1, destination, cache.index_select(1, source))


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows of a step belong to which sequence, and where their keys lie.

    Sequence s owns the rows query_starts[s]:query_starts[s + 1], its last tokens; row i has the absolute
    position positions[i], writes its key and value to slots[i] = block id * block_size + offset, and attends
    to the positions 0..positions[i] of its own sequence.
    """

    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    positions: Tensor
    slots: Tensor
    plan: tuple[Tensor, ...]
    """Work list of the C++ kernel, (tiles, spans); empty elsewhere."""
    split: SplitPlan | None = None
    """Work list of the Triton kernels; None elsewhere."""

    @classmethod
    def build(
        cls,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: KVCache,
        share_prefix: bool = True,
    ) -> "AttentionBatch":
        """Describe one step: query_starts int32 [S + 1], context_lens int32 [S], block_tables int32 [S, B]
        padded with 0, positions and slots int64 [T], all on the CPU. They are sent to the device of `kv`.

        Adjacent sequences whose tables start with the same blocks are computed together over these;
        `share_prefix` switches that off, for measurements, and changes no bit of any result.
        """
        device = kv.k.device
        split = None
        if triton_kernels(device) is not None:
            split = SplitPlan.build(query_starts, context_lens, block_tables, kv.block_size, share_prefix).to(device)
        native = cpu_kernels(device)
        plan: tuple[Tensor, ...] = ()
        if native is not None:
            plan = native.attention_plan(
                query_starts, context_lens, block_tables, kv.block_size, kv.k.shape[2], share_prefix
            )
        return cls(
            sent(query_starts, device), sent(context_lens, device), sent(block_tables, device),
            sent(positions, device), sent(slots, device), plan, split,
        )  # fmt: skip
