"""The layers of a decoder as one rank holds them: cut weights, and the collectives that join their outputs.

The model above composes these layers and hardly knows that there are ranks; the weights come through a
`WeightReader`, which knows files and no layers.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from kernels.ops import PackedLinear
from workers.model_config import ModelConfig
from workers.tensor_parallel import Communicator, ShardPlan, Split

ALL = slice(None)


class WeightReader(Protocol):
    """A checkpoint."""

    def read(self, name: str, shape: tuple[int, ...], rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """Part of tensor `name`; `shape` is what the whole must have. ValueError names the tensor."""


def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Where the kernel of a linear layer is chosen. weight [N, K], bias [N]; maps [T, K] to [T, N]."""
    return PackedLinear(weight, bias)


class Embedding:
    """Token embedding cut by vocabulary rows."""

    def __init__(self, weight: torch.Tensor, start: int, comm: Communicator) -> None:
        # Adding zero turns -0.0 into 0.0, as the sum over ranks does: the same bits at every group size.
        self.weight, self.start, self.comm = weight + 0.0, start, comm

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] ids of the whole vocabulary to [T, H]."""
        if self.comm.size == 1:
            return functional.embedding(token_ids, self.weight)
        local = token_ids - self.start
        foreign = (local < 0) | (local >= len(self.weight))
        rows = functional.embedding(local.masked_fill(foreign, 0), self.weight)
        return self.comm.all_reduce(rows.masked_fill_(foreign[:, None], 0))


class GatheredLinear:
    """A linear cut by output columns whose input is cut too: gather, multiply, gather. No sum is split."""

    def __init__(self, local: PackedLinear, inputs: Split, outputs: Split, comm: Communicator) -> None:
        self.local, self.inputs, self.outputs, self.comm = local, inputs, outputs, comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's input columns] to the whole [T, N] on every rank."""
        whole = self.comm.all_gather_columns(x, self.inputs.sizes)
        return self.comm.all_gather_columns(self.local(whole), self.outputs.sizes)


class ReducedLinear:
    """A linear cut by input columns (row-parallel): multiply, then sum over the ranks."""

    def __init__(self, local: PackedLinear, comm: Communicator) -> None:
        self.local, self.comm = local, comm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, this rank's input columns] to the whole [T, N] on every rank."""
        return self.comm.all_reduce(self.local(x))


class LayerBuilder:
    """Makes the layers of one rank: reads its part of each weight and joins what is computed together."""

    def __init__(self, weights: WeightReader, config: ModelConfig, plan: ShardPlan, comm: Communicator) -> None:
        if plan.size != comm.size:
            raise ValueError(f"the plan is for {plan.size} ranks, the group has {comm.size}")
        self.weights, self.config, self.plan, self.comm = weights, config, plan, comm
        self.kv_columns = plan.kv_heads.scaled(config.head_dim)
        self.query_columns = self.kv_columns.scaled(config.group_size)

    def norm(self, name: str, width: int) -> torch.Tensor:
        """The [width] weight of a norm; every rank holds all of it."""
        return self.weights.read(f"{name}.weight", (width,))

    def embedding(self, name: str) -> Embedding:
        return Embedding(self._vocabulary(name), self.plan.vocab.of(self.comm.rank).start, self.comm)

    def output_head(self, name: str) -> PackedLinear:
        """The projection [R, H] to this rank's part of the vocabulary, in float32."""
        return PackedLinear(self._vocabulary(name), None, unrounded=True)

    def qkv(self, prefix: str) -> PackedLinear:
        """[T, H] to this rank's queries, keys and values side by side."""
        parts = (("q_proj", self.query_columns), ("k_proj", self.kv_columns), ("v_proj", self.kv_columns))
        return self._joined(prefix, parts, self.config.qkv_bias)

    def gate_up(self, prefix: str) -> PackedLinear:
        """[T, H] to this rank's columns of the gate and of the up projection side by side."""
        parts = (("gate_proj", self.plan.ffn), ("up_proj", self.plan.ffn))
        return self._joined(prefix, parts, self.config.mlp_bias)

    def attention_out(self, prefix: str) -> GatheredLinear | ReducedLinear:
        return self._closing(f"{prefix}.o_proj", self.query_columns, self.config.o_bias)

    def ffn_out(self, prefix: str) -> GatheredLinear | ReducedLinear:
        return self._closing(f"{prefix}.down_proj", self.plan.ffn, self.config.mlp_bias)

    def _vocabulary(self, name: str) -> torch.Tensor:
        shape = (self.config.vocab_size, self.config.hidden_size)
        return self.weights.read(f"{name}.weight", shape, rows=self.plan.vocab.of(self.comm.rank))

    def _joined(self, prefix: str, parts: Sequence[tuple[str, Split]], has_bias: bool) -> PackedLinear:
        pairs = [self._by_output(f"{prefix}.{name}", split, has_bias) for name, split in parts]
        biases = [bias for _, bias in pairs if bias is not None]
        return linear(torch.cat([weight for weight, _ in pairs]), torch.cat(biases) if biases else None)

    def _by_output(
        self, name: str, outputs: Split, has_bias: bool, inputs: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = outputs.of(self.comm.rank)
        shape = (outputs.total, inputs or self.config.hidden_size)
        weight = self.weights.read(f"{name}.weight", shape, rows=rows)
        bias = self.weights.read(f"{name}.bias", (outputs.total,), rows=rows) if has_bias else None
        return weight, bias

    def _closing(self, name: str, inputs: Split, has_bias: bool) -> GatheredLinear | ReducedLinear:
        """A linear that takes what is cut over the ranks and gives every rank the whole."""
        if self.plan.exact:
            weight, bias = self._by_output(name, self.plan.hidden, has_bias, inputs.total)
            return GatheredLinear(linear(weight, bias), inputs, self.plan.hidden, self.comm)
        hidden = self.config.hidden_size
        weight = self.weights.read(f"{name}.weight", (hidden, inputs.total), columns=inputs.of(self.comm.rank))
        bias = self.weights.read(f"{name}.bias", (hidden,)) if has_bias else None
        # The bias enters the sum over ranks once.
        return ReducedLinear(linear(weight, bias if self.comm.rank == 0 else None), self.comm)
