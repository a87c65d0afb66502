"""The draws of one step as plain tensors, and what comes back.

One row of a batch is one draw. Several draws may read one row of logits: the first tokens of siblings do.
It knows nothing of requests or children; the worker's sampler builds a `SampleBatch` and
`kernels.ops.sample` consumes it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


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

    def part(self, first: int, last: int, row: int) -> "SampleBatch":
        """Draws first to last - 1, of logits that begin with what is row `row` of the whole."""
        values: dict[str, Tensor] = {"rows": self.rows[first:last] - row}
        for name, lists in _RAGGED.items():
            starts = values[name] = getattr(self, name)[first : last + 1]
            values |= {entries: getattr(self, entries)[starts[0] : starts[-1]] for entries in lists}
            values[name] = starts - starts[0]
        return SampleBatch(**{name: getattr(self, name)[first:last] for name in self.__slots__} | values)

    def pack(self) -> Tensor:
        """One flat int64 tensor: the sizes, then the values; a float's bits are a value."""
        parts = self.fields()
        values = [part.view(torch.int32) if part.is_floating_point() else part for part in parts]
        return torch.cat([torch.tensor([len(part) for part in parts]), *values])

    @classmethod
    def unpack(cls, packed: Tensor) -> "SampleBatch":
        """What `pack` made."""
        count = len(cls.__slots__)
        values = torch.split(packed[count:], packed[:count].tolist())
        return cls(*(_typed(name, value) for name, value in zip(cls.__slots__, values, strict=True)))


_RAGGED = {
    "seen_starts": ("seen_ids", "seen_counts"),
    "bias_starts": ("bias_ids", "bias_values"),
    "banned_starts": ("banned_ids",),
    "allowed_starts": ("allowed_ids",),
}
_LONGS = frozenset(("rows", "seed", "prompt_number", "sample", "position"))
_FLOATS = frozenset(("temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values"))


def _typed(name: str, values: Tensor) -> Tensor:
    """A field from its int64 values."""
    if name in _LONGS:
        return values
    return values.int().view(torch.float32) if name in _FLOATS else values.int()


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

    def pack(self, width: int) -> Tensor:
        """int64 [R, 2 + 2 * width], the bits of everything, with room for `width` >= k most probable tokens."""
        room = (0, width - self.top_ids.shape[1])
        top_ids, top_logprobs = functional.pad(self.top_ids, room, value=-1), functional.pad(self.top_logprobs, room)
        logprobs = torch.cat([self.logprobs[:, None], top_logprobs], 1)
        return torch.cat([self.tokens[:, None], top_ids, logprobs.view(torch.int32)], 1)

    @classmethod
    def unpack(cls, packed: Tensor) -> "SampleResult":
        """What `pack` made."""
        width = packed.shape[1] // 2 - 1
        tokens, top_ids, logprobs = torch.split(packed, [1, width, 1 + width], 1)
        logprobs = logprobs.int().view(torch.float32)
        return cls(tokens[:, 0], logprobs[:, 0], top_ids, logprobs[:, 1:])
