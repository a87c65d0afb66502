"""Sequences and families: the state of one group's work, as the scheduler and the sampler see it.

A family is one prompt and its children. What is computed for a child is its *sequence*; greedy siblings have one
together, because they are equal. The family's *stem* holds the computed prompt as a block table of its own, as long as
any child is alive; every sequence starts by sharing the stem's blocks, the first time and after a preemption alike.
"""

from dataclasses import dataclass, field
from enum import Enum

from workers.block_manager import ROOT, content_digest
from workers.outputs import ChildSpec, FamilyRequest, FinishReason


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class KVTable:
    """A block table and how many leading tokens of its sequence have their KV in it."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    digests: list[bytes] = field(default_factory=list)
    """Content digests of the leading full blocks that were published or matched."""

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks to release."""
        blocks, self.blocks, self.computed, self.digests = self.blocks, [], 0, []
        return blocks


class Family:
    """One prompt on one group with all children placed here. `arrival` orders families: lower goes first."""

    def __init__(self, request: FamilyRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.stem = KVTable()
        self.forked = False
        """Whether every child has its first token; from then on the stem is only a prefix to start from."""
        self.cached_tokens = 0
        self.sequences = [Sequence(self, specs) for specs in _equal_children(request)]
        self.num_live = len(request.children)
        """Children whose sequence goes on and who were not aborted."""

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def stem_resident(self) -> bool:
        return self.stem.computed == self.prompt_len

    @property
    def live(self) -> list["Sequence"]:
        return [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]

    @property
    def idle(self) -> bool:
        return not any(sequence.status is Status.RUNNING for sequence in self.sequences)

    def next_digest(self, table: KVTable, output_ids: list[int], block_size: int) -> bytes:
        """Digest of the first full block of `table` that has none yet."""
        start = len(table.digests) * block_size
        tokens = list(self.request.prompt_token_ids[start : start + block_size])
        if len(tokens) < block_size:
            first = max(start - self.prompt_len, 0)
            tokens += output_ids[first : first + block_size - len(tokens)]
        return content_digest(table.digests[-1] if table.digests else ROOT, tokens)


def _equal_children(request: FamilyRequest) -> list[tuple[ChildSpec, ...]]:
    """The children, those together whose tokens are equal by definition: without noise all, else each alone."""
    return [request.children] if request.params.greedy else [(spec,) for spec in request.children]


class Sequence:
    """One child, or several that are equal: computed once, handed out to each.

    Its KV covers prompt and output but for the newest token, which the next step computes.
    """

    __slots__ = ("children", "family", "finish_reason", "index", "output_ids", "sample", "seen", "status", "table")

    def __init__(self, family: Family, specs: tuple[ChildSpec, ...]) -> None:
        self.family = family
        self.children = [spec.index for spec in specs]
        """Choice indices of those it goes on for, or went on for when it finished; never empty."""
        self.index = specs[0].index
        """Its place among the family's sequences; stays when that child leaves."""
        self.sample = specs[0].sample
        self.output_ids: list[int] = []
        self.table = KVTable()
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.seen: dict[int, int] | None = None
        """Distinct tokens of prompt and output with their count in the output; kept only where penalties need it."""
        if family.request.params.has_penalties:
            self.seen = dict.fromkeys(family.request.prompt_token_ids, 0)

    @property
    def num_tokens(self) -> int:
        return self.family.prompt_len + len(self.output_ids)

    @property
    def pending(self) -> int:
        """Tokens whose KV is not computed yet; one in plain decoding."""
        return self.num_tokens - self.table.computed

    @property
    def priority(self) -> tuple[int, int]:
        return self.family.arrival, self.index

    def append(self, token_id: int, eos_ids: frozenset[int]) -> int | None:
        """Take the drawn token and set the finish reason if it ends the sequence; returns the stop id that matched."""
        params = self.family.request.params
        self.output_ids.append(token_id)
        if self.seen is not None:
            self.seen[token_id] = self.seen.get(token_id, 0) + 1
        matched = token_id if token_id in params.stop_token_ids else None
        if matched is not None or (token_id in eos_ids and not params.ignore_eos):
            self.finish_reason = FinishReason.STOP
        elif len(self.output_ids) >= params.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        return matched
