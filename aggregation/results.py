"""What the aggregator hands to the router: text deltas per choice, whole choices, usage, and the errors of a parent."""

from dataclasses import dataclass, field
from typing import NamedTuple


class TextLogprob(NamedTuple):
    """One token as text with its log-probability (floored at -9999)."""

    token: str
    token_id: int
    logprob: float
    bytes: tuple[int, ...]


class PositionLogprobs(NamedTuple):
    """The drawn token of one position, and the most probable ones, best first (the drawn one appended if absent)."""

    drawn: TextLogprob
    top: tuple[TextLogprob, ...]


@dataclass(slots=True)
class ChoiceDelta:
    """What one choice gained: text, the token ids and log-probabilities that travel with it, at most one finish."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    completion_tokens: int
    """Tokens of this choice so far, this delta included."""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    drawn_logprobs: list[float] | None = None
    """In place of `logprobs` where they were asked for bare."""

    def extend(self, later: "ChoiceDelta") -> None:
        """Fold the next delta of the same choice into this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        if self.drawn_logprobs is not None and later.drawn_logprobs is not None:
            self.drawn_logprobs += later.drawn_logprobs
        self.completion_tokens = later.completion_tokens
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class ParentUpdate:
    """A batch of deltas of one parent, at most one per choice, sorted by index. `usage` comes with the last one."""

    deltas: list[ChoiceDelta] = field(default_factory=list)
    usage: Usage | None = None

    def extend(self, later: "ParentUpdate") -> None:
        """Fold the next update of the same parent into this one."""
        known = {delta.index: delta for delta in self.deltas}
        for delta in later.deltas:
            if (earlier := known.setdefault(delta.index, delta)) is not delta:
                earlier.extend(delta)
        self.deltas = [known[index] for index in sorted(known)]
        self.usage = later.usage


@dataclass(slots=True)
class ParentResult:
    """All choices of a finished parent as whole texts (one ChoiceDelta from first to last token), sorted by index."""

    choices: list[ChoiceDelta]
    usage: Usage


class AggregationError(Exception):
    """A parent cannot be served as asked; the message names it."""


class DuplicateParentError(AggregationError):
    """A parent of this id is open already."""


class UnknownParentError(AggregationError):
    """No parent of this id is open: never opened, or closed or read to its end before."""


class ParentClosedError(AggregationError):
    """The parent was closed while it was being read."""


class AggregatorLostError(AggregationError):
    """The process that merges the parent is gone, or the way to it."""


class IncompleteReplyError(AggregationError):
    """The choices of a parent are not exactly 0..n-1, each once and finished; the message says which."""
