"""All decoder layers of a CPU rank as one operator: no Python, and no other thread's turn, between two kernels.

It calls the operators of `kernels.ops` in the order the model would, so the bits are the same; `workers.model` falls
back to its own loop where a stack cannot be built. It knows tensors and cuts, not names or checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.implementation import cpu_kernels
from kernels.kv_cache import AttentionBatch, KVCache
from kernels.linear import PackedLinear
from kernels.shared_memory import SharedMemory

GATHERS_PER_LAYER = 4


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """What one layer holds; linears map as in `workers.model`, norms are [H] or, per head, [head_dim]."""

    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: PackedLinear
    attention_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    following_norm: Tensor

    @property
    def columns(self) -> list[int]:
        return [linear.out_features for linear in (self.qkv, self.out, self.gate_up, self.down)]

    def flat(self) -> list[Tensor | None] | None:
        """The operator's twelve entries; None if a linear is not packed for it."""
        qkv, out, gate_up, down = (w.packed for w in (self.qkv, self.out, self.gate_up, self.down))
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        return [
            *qkv, self.q_norm, self.k_norm, *out, self.attention_norm, *gate_up, *down, self.following_norm,
        ]  # fmt: skip


class DecoderStack:
    """Made by `build`. `cuts` are the widths of attention, hidden and feed-forward columns per rank of the group."""

    def __init__(
        self,
        weights: list[Tensor | None],
        columns: list[int],
        cos_sin: Tensor,
        eps: float,
        cuts: Sequence[Sequence[int]],
        shared: SharedMemory | None,
    ) -> None:
        self._weights, self._columns, self._cos_sin, self._eps, self._shared = weights, columns, cos_sin, eps, shared
        self._widths = [width for cut in cuts for width in cut]
        self._widest = max(map(sum, cuts))

    @classmethod
    def build(
        cls,
        first_norm: Tensor,
        layers: Sequence[LayerWeights],
        cos_sin: Tensor,
        eps: float,
        cuts: Sequence[Sequence[int]],
        shared: SharedMemory | None,
    ) -> "DecoderStack | None":
        """None where the layers are not all packed for the C++ kernels, or a group shares no memory."""
        flat = [layer.flat() for layer in layers]
        if cpu_kernels(first_norm.device) is None or None in flat or (len(cuts[0]) > 1 and shared is None):
            return None
        weights = [first_norm, *(tensor for layer in flat if layer is not None for tensor in layer)]
        return cls(weights, layers[0].columns, cos_sin, eps, cuts, shared)

    def takes(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether a step of so many tokens fits the memory the ranks share."""
        return self._shared is None or self._shared.fits(rows, self._widest, dtype)

    def __call__(self, hidden: Tensor, batch: AttentionBatch, kv: KVCache, rows: Tensor) -> Tensor:
        """Embedded tokens [T, H] through all layers; [R, H] after the last norm, of the `rows` [R] in ascending order.

        What only the others need is left out.
        """
        memory: Tensor | None = None
        rank, sequence, timeout_s = 0, 0, 0.0
        if self._shared is not None:
            memory, rank, sequence, timeout_s = self._shared.reserve(GATHERS_PER_LAYER * kv.k.shape[0])
        out: Tensor = cpu_kernels(hidden.device).decode_layers(
            hidden, rows, self._weights, self._columns, self._cos_sin, batch.positions, batch.slots, batch.block_tables,
            *batch.plan, kv.k, kv.v, kv.k.shape[3] ** -0.5, self._eps, memory, self._widths, rank, sequence, timeout_s,
        )  # fmt: skip
        return out
