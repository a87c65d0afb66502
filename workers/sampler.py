"""From sequences to one sampling call and back: gathers what each draw needs, without any arithmetic of its own.

The draw itself, its order of filters and its counter-based noise are `kernels.ops.sample`, on one rank or dealt out to
all. Several draws may read one logits row: the sequences of a finished prompt do.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels import ops
from workers.outputs import TokenLogprobs
from workers.sampling_params import SamplingParams
from workers.sequence import Sequence

T = TypeVar("T")


class Drawn(NamedTuple):
    """The tokens of a step in the order of its draws; logprobs where asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Describes draws. `eos_ids` are banned, with the stop ids, below a sequence's min_tokens."""

    def __init__(self, eos_ids: frozenset[int]) -> None:
        self._eos_ids = eos_ids
        self._draws: Seq[Sequence] = ()
        self._fixed: dict[str, Tensor] = {}

    def batch(self, draws: Seq[Sequence], rows: Seq[int]) -> ops.SampleBatch:
        """One draw per entry of `draws`, from row `rows[i]` of the logits."""
        if draws != self._draws:
            self._draws, self._fixed = draws, self._parameters(draws)
        seen_starts, seen = self._ragged((sequence.seen or {}).items() for sequence in draws)
        banned_starts, banned = self._ragged(map(self._banned, draws))
        return ops.SampleBatch(
            **self._fixed,
            rows=self._ints(rows),
            position=self._ints([len(sequence.output_ids) for sequence in draws]),
            seen_starts=seen_starts,
            seen_ids=self._ints([i for i, _ in seen], torch.int32),
            seen_counts=self._ints([count for _, count in seen], torch.int32),
            banned_starts=banned_starts,
            banned_ids=self._ints(banned, torch.int32),
        )

    def _parameters(self, draws: Seq[Sequence]) -> dict[str, Tensor]:
        """The fields of a `SampleBatch` that stay while the same sequences draw."""
        params = [sequence.family.request.params for sequence in draws]
        bias_starts, bias = self._ragged(p.logit_bias for p in params)
        allowed_starts, allowed = self._ragged(p.allowed_token_ids or () for p in params)
        return {
            "temperature": self._floats([p.temperature for p in params]),
            "top_k": self._ints([p.top_k for p in params], torch.int32),
            "top_p": self._floats([p.top_p for p in params]),
            "min_p": self._floats([p.min_p for p in params]),
            "seed": self._ints([p.seed for p in params]),
            "prompt_number": self._ints([sequence.family.request.prompt_number for sequence in draws]),
            "sample": self._ints([sequence.sample for sequence in draws]),
            "num_logprobs": self._ints([_num_logprobs(p) for p in params], torch.int32),
            "repetition": self._floats([p.repetition_penalty for p in params]),
            "presence": self._floats([p.presence_penalty for p in params]),
            "frequency": self._floats([p.frequency_penalty for p in params]),
            "bias_starts": bias_starts,
            "bias_ids": self._ints([i for i, _ in bias], torch.int32),
            "bias_values": self._floats([value for _, value in bias]),
            "allowed_starts": allowed_starts,
            "allowed_ids": self._ints(allowed, torch.int32),
        }

    def _banned(self, sequence: Sequence) -> Iterable[int]:
        params = sequence.family.request.params
        if len(sequence.output_ids) >= params.min_tokens:
            return ()
        return {*params.stop_token_ids, *(() if params.ignore_eos else self._eos_ids)}

    def _ragged(self, segments: Iterable[Iterable[T]]) -> tuple[Tensor, list[T]]:
        """Concatenate segments; int32 starts [R + 1] and the flat list."""
        starts: list[int] = [0]
        flat: list[T] = []
        for segment in segments:
            flat += segment
            starts.append(len(flat))
        return self._ints(starts, torch.int32), flat

    def _ints(self, values: Seq[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    def _floats(self, values: Seq[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)


def drawn(draws: Seq[Sequence], result: ops.SampleResult) -> Drawn:
    """Waits for the device."""
    return Drawn(result.tokens.tolist(), _logprobs(draws, result))


def _num_logprobs(params: SamplingParams) -> int:
    return -1 if params.logprobs is None else params.logprobs


def _logprobs(draws: Seq[Sequence], result: ops.SampleResult) -> list[TokenLogprobs | None]:
    counts = [sequence.family.request.params.logprobs for sequence in draws]
    if all(count is None for count in counts):
        return [None] * len(draws)
    columns = zip(
        counts, result.tokens.tolist(), result.logprobs.tolist(), result.top_ids.tolist(),
        result.top_logprobs.tolist(), strict=True,
    )  # fmt: skip
    return [
        None if k is None else TokenLogprobs(token, logprob, tuple(ids[:k]), tuple(values[:k]))
        for k, token, logprob, ids, values in columns
    ]
