"""The draws of one step as plain tensors, and what comes back.

One row of a batch is one draw. Several draws may read one row of logits: the first tokens of siblings do.
It knows nothing of requests or children; the worker's sampler builds a `SampleBatch` and
`kernels.ops.sample` consumes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """R draws. A `*_starts` is int32 [R + 1]: draw r owns the entries starts[r]:starts[r + 1]."""

    rows: Tensor
    """int64 [R]: the row of logits each draw reads."""
    temperature: Tensor
    """float32 [R]; 0 is greedy."""
    top_k: Tensor
    """int32 [R]; 0 is off."""
    top_p: Tensor
    """float32 [R]; 1 is off."""
    min_p: Tensor
    """float32 [R]; 0 is off."""
    seed: Tensor
    """int64 [R]; with the next three it names the noise of a draw."""
    prompt_number: Tensor
    sample: Tensor
    position: Tensor
    num_logprobs: Tensor
    """int32 [R]: -1 none, 0 only of the drawn token, k also the k most probable ones."""
    repetition: Tensor
    """float32 [R]; 1 is off."""
    presence: Tensor
    frequency: Tensor
    seen_starts: Tensor
    seen_ids: Tensor
    """int32: the distinct tokens of prompt and output."""
    seen_counts: Tensor
    """int32: how often each occurs in the output; 0 when only in the prompt."""
    bias_starts: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    """float32, added to the logits."""
    banned_starts: Tensor
    banned_ids: Tensor
    """int32: tokens that may not be drawn."""
    allowed_starts: Tensor
    allowed_ids: Tensor
    """int32: the only tokens that may be drawn; a draw without entries allows all."""

    def fields(self) -> list[Tensor]:
        """All tensors, in the order of their declaration."""
        return [getattr(self, name) for name in self.__slots__]

    def to(self, device: torch.device) -> "SampleBatch":
        """The same draws with all tensors on `device`."""
        return SampleBatch(*(x.to(device) for x in self.fields()))


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What R draws gave; the log-probabilities are valid where they were asked for."""

    tokens: Tensor
    """int64 [R]; -1 where nothing could be drawn: every token excluded, or logits that are not numbers."""
    logprobs: Tensor
    """float32 [R]: of the drawn token."""
    top_ids: Tensor
    """int64 [R, k], most probable first, ties by lower id; -1 beyond what a draw asked for."""
    top_logprobs: Tensor
    """float32 [R, k]"""
