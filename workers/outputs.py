"""What crosses the border of a group: families going in, deltas of children coming out.

These are the messages of hop 1 and hop 2. They carry ids, token ids and log-probabilities, never text. A parent is a
field and a child an integer beside it; no id is ever built from another or parsed back.
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

from workers.sampling_params import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ChildRef:
    """Names one child: its parent's id and its choice index."""

    parent_id: str
    index: int


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child as the router fixed it: choice index in the reply, sample number for the noise."""

    index: int
    sample: int


@dataclass(frozen=True, slots=True)
class FamilyRequest:
    """The children of one prompt of one parent, placed on one group.

    A parent with several prompts is several families; `prompt_number` enters the noise. `sink` names the aggregator
    that gets the deltas. Without `stream` nobody reads a child before it has finished.
    """

    parent_id: str
    prompt_number: int
    prompt_token_ids: tuple[int, ...]
    children: tuple[ChildSpec, ...]
    params: SamplingParams
    sink: str
    stream: bool = True


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one output position, from the raw logits: of the drawn token and the k most probable."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(slots=True)
class ChildDelta:
    """What one child gained. After a delta with a finish reason nothing follows for that child.

    A token that ended the child (end-of-sequence or a stop id) is part of `token_ids`; `stop_reason` is the stop id
    that matched, None for end-of-sequence. `logprobs` is parallel to `token_ids` when asked for.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None

    def extend(self, later: "ChildDelta") -> None:
        """Fold the next delta of the same child into this one."""
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error


class PromptReport(NamedTuple):
    """Sent once per family, when its prompt has been computed: how much of it was cached before the family arrived."""

    prompt_number: int
    cached_tokens: int


class Haste(IntEnum):
    """When a delta has to leave its group, by what its parent's client can do with it."""

    NONE = 0
    """With the next push, or in a while: tokens nobody reads yet."""
    SOON = 1
    """When the next push is due."""
    NOW = 2
    """First tokens, and what ends something a client waits for."""


@dataclass(slots=True)
class ParentDelta:
    parent_id: str
    children: dict[int, ChildDelta] = field(default_factory=dict)
    prompts: list[PromptReport] = field(default_factory=list)
    haste: Haste = Haste.NONE

    def add(self, delta: ChildDelta) -> None:
        if (known := self.children.get(delta.index)) is None:
            self.children[delta.index] = delta
        else:
            known.extend(delta)


@dataclass(slots=True)
class StepOutput:
    """All that one aggregator gets from one group in one push: one or several steps folded together."""

    group: str
    parents: dict[str, ParentDelta] = field(default_factory=dict)

    def parent(self, parent_id: str) -> ParentDelta:
        return self.parents.setdefault(parent_id, ParentDelta(parent_id))

    def fold(self, later: ParentDelta) -> None:
        """Fold what a parent gained in a later step into this output, child by child."""
        mine = self.parent(later.parent_id)
        mine.prompts += later.prompts
        mine.haste = max(mine.haste, later.haste)
        for child in later.children.values():
            mine.add(child)
