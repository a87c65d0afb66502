"""Decoding steps as CUDA graphs: one replay instead of some hundred launches.

A step is padded to a bucket of rows and of blocks per sequence. Its integers go into buffers at fixed addresses, and
the first step of a bucket is captured. Padding rows write no keys and have no work. Knows tensors, not requests;
called by the model runner for the steps that `Bucket.of` accepts, all others run eagerly.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.ops import AttentionBatch
from kernels.split_plan import CHUNK, ITEM, SplitPlan
from workers.step_input import StepInput

FEWEST = 16
"""Rows of the smallest bucket; up to so many children meet the same matrix products, alone or together."""
MOST_ROWS = 512
MOST_STATES = 2**16
"""Partial attention results for which a bucket may hold memory."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sizes that steps are padded to; powers of two."""

    rows: int
    blocks: int
    """Per sequence."""
    block_size: int

    @classmethod
    def of(cls, step: StepInput, block_size: int) -> "Bucket | None":
        """The smallest bucket that holds a step; None unless every sequence computes one token and draws from it."""
        rows, width = len(step.token_ids), step.block_tables.shape[1]
        if not rows == len(step.context_lens) == len(step.logit_rows):
            return None
        bucket = cls(_power_of_two(rows), _power_of_two(width), block_size)
        return bucket if bucket.rows <= MOST_ROWS and bucket.states <= MOST_STATES else None

    @property
    def states(self) -> int:
        """Most partial results, and work items, of a step."""
        return self.rows * -(-self.blocks * self.block_size // CHUNK)


def _power_of_two(least: int) -> int:
    return max(FEWEST, 1 << (least - 1).bit_length())


class StepBuffer:
    """The integers of a padded step: one int32 tensor on the host, and its copy at a fixed place of the device."""

    def __init__(self, bucket: Bucket, device: torch.device) -> None:
        rows, states = bucket.rows, bucket.states
        # What is used least comes last, so that the rest of it need not be sent.
        shapes = {
            "count": (1,), "states": (rows + 1,), "query_starts": (rows + 1,), "context_lens": (rows,),
            "token_ids": (rows,), "positions": (rows,), "slots": (rows,), "block_tables": (rows, bucket.blocks),
            "items": (states, ITEM),
        }  # fmt: skip
        size = sum(_room(shape) for shape in shapes.values())
        self._block_size = bucket.block_size
        self._flat = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._sent = torch.zeros(size, dtype=torch.int32, device=device)
        self._host, self._device = _cut(self._flat, shapes), _cut(self._sent, shapes)
        self.token_ids = self._device["token_ids"]
        to = self._device
        plan = SplitPlan(to["items"], to["count"], to["states"], num_states=states)
        self.batch = AttentionBatch(
            to["query_starts"], to["context_lens"], to["block_tables"], to["positions"], to["slots"], (), plan
        )

    def fill(self, step: StepInput, share_prefix: bool = True) -> None:
        """Send a step. The one before must have been computed: whoever drew from its logits has waited for that."""
        plan = SplitPlan.build(step.query_starts, step.context_lens, step.block_tables, self._block_size, share_prefix)
        rows = len(step.token_ids)
        for name, padding in (("context_lens", 0), ("token_ids", 0), ("positions", 0), ("slots", -1)):
            self._put(name, getattr(step, name), padding)
        self._put("query_starts", step.query_starts, rows)
        self._put("states", plan.states, plan.num_states)
        self._host["block_tables"][:rows, : step.block_tables.shape[1]] = step.block_tables
        self._host["count"].copy_(plan.count)
        self._host["items"][: len(plan.items)] = plan.items
        used = len(self._flat) - _room(self._host["items"].shape) + plan.items.numel()
        self._sent[:used].copy_(self._flat[:used], non_blocking=True)

    def _put(self, name: str, values: Tensor, padding: int) -> None:
        self._host[name][: len(values)] = values
        self._host[name][len(values) :] = padding


def _cut(flat: Tensor, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    parts = torch.split(flat, [_room(shape) for shape in shapes.values()])
    named = zip(shapes.items(), parts, strict=True)
    return {name: part[: math.prod(shape)].view(shape) for (name, shape), part in named}


def _room(shape: tuple[int, ...]) -> int:
    """Integers to reserve, so that every part begins at a multiple of 16 bytes; Triton compiles anew for others."""
    return -(-math.prod(shape) // 4) * 4


class DecodeGraphs:
    """`compute` maps token ids int32 [rows] and their batch to logits [rows, V], with the same launches every time."""

    def __init__(self, compute: Callable[[Tensor, AttentionBatch], Tensor], device: torch.device) -> None:
        self._compute, self._device = compute, device
        self.captured: dict[Bucket, tuple[StepBuffer, torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def run(self, bucket: Bucket, step: StepInput, share_prefix: bool) -> Tensor:
        """Logits [M, V] of a step that `Bucket.of` accepted; they last until the next call."""
        if bucket in self.captured:
            buffer, graph, logits = self.captured[bucket]
            buffer.fill(step, share_prefix)
        else:
            buffer = StepBuffer(bucket, self._device)
            buffer.fill(step, share_prefix)
            graph, logits = self._capture(buffer)
            self.captured[bucket] = buffer, graph, logits
        graph.replay()
        return logits[: len(step.token_ids)]

    def _capture(self, buffer: StepBuffer) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Computes the step once before, so that kernels are compiled; that it then runs again changes nothing."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute(buffer.token_ids, buffer.batch)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._compute(buffer.token_ids, buffer.batch)
        self._pool = graph.pool()
        return graph, logits
