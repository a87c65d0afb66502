"""The record of one open parent: its children, what they gained since it was last read, and its usage.

What is not read yet is folded, one delta per choice, so a slow reader costs memory for text and nothing else.
Owned by the aggregator; runs on one event loop; knows nothing of other parents, and of groups only their
names.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping

from aggregation.child import ChildStream, TextRules
from aggregation.merger import merge
from aggregation.parent_request import ParentRequest
from aggregation.results import ChoiceDelta, ParentClosedError, ParentResult, ParentUpdate, Usage
from aggregation.vocabulary import Vocabulary
from workers.outputs import ChildDelta, ChildRef, FinishReason, ParentDelta

Placement = tuple[str, ChildRef]
"""A child and the group it is placed on."""


class ParentRecord:
    """One open parent. `totals` are the aggregator's counts; `unfinished` is the number of live children."""

    def __init__(self, parent: ParentRequest, vocabulary: Vocabulary, totals: Counter[str], *, stream: bool) -> None:
        rules = TextRules.of(parent, vocabulary, stream=stream)
        self.parent_id = parent.parent_id
        self.unfinished = parent.num_children
        self.abandoned = False
        self.read_to_end = False
        self._children = [ChildStream(index, rules) for index in range(parent.num_children)]
        self._samples = len(parent.samples)
        self._drawn = not parent.params.greedy
        self._prompt_tokens = sum(len(prompt) for prompt in parent.prompts)
        self._cached_tokens: dict[int, int] = {}
        self._groups: dict[int, str] = {}
        self._pending: dict[int, ChoiceDelta] = {}
        self._totals = totals
        self._claimed = False
        self._closed = False
        self._wake = asyncio.Event()

    def claim(self) -> None:
        """Takes the only place of a reader. Raises RuntimeError when it is taken."""
        if self._claimed:
            raise RuntimeError(f"parent {self.parent_id!r} is being read already")
        self._claimed = True

    def place(self, placement: Mapping[int, str]) -> None:
        """Notes the group of each child named. Raises ValueError for an index the parent does not have."""
        self._check(placement)
        self._groups.update(placement)

    def push(self, group: str, delta: ParentDelta) -> list[ChildRef]:
        """Takes what `group` reports; answers which of the children it named it should stop."""
        if self.abandoned:
            for index in delta.children:
                self._end(index, FinishReason.ABORT)
            return [ChildRef(self.parent_id, index) for index in delta.children]
        for report in delta.prompts:
            known = self._cached_tokens.get(report.prompt_number, report.cached_tokens)
            self._cached_tokens[report.prompt_number] = min(known, report.cached_tokens)
        children = delta.children.values()
        return [ChildRef(self.parent_id, child.index) for child in children if self._advance(group, child)]

    def fail(self, indices: Iterable[int] | None, message: str) -> None:
        """Ends the children named (None: all) with an error. Raises ValueError as `place` does."""
        for index in range(len(self._children)) if indices is None else self._check(indices):
            self._end(index, FinishReason.ERROR, message)

    def children_on(self, group: str) -> list[int]:
        """The unfinished children placed on `group`."""
        return [index for index, placed in self._groups.items() if placed == group and self._alive(index)]

    def abandon(self) -> None:
        """Nobody will read on: from now on every child a group reports is told to stop."""
        self.abandoned = True
        self._pending.clear()

    def close(self) -> list[Placement]:
        """Ends every child and any reader. Answers what was unfinished, where it is placed."""
        placed = [
            (group, ChildRef(self.parent_id, index))
            for index, group in sorted(self._groups.items())
            if self._alive(index)
        ]
        self._closed = True
        for index in range(len(self._children)):
            self._end(index, FinishReason.ABORT)
        self._wake.set()
        return placed

    async def changed(self) -> None:
        """Waits for something to read. Raises ParentClosedError when the parent was closed instead."""
        await self._wake.wait()
        self._wake.clear()
        if self._closed:
            raise ParentClosedError(f"parent {self.parent_id!r} was closed")

    def take(self) -> ParentUpdate:
        """Everything since the last call; with the usage once all children have finished."""
        pending, self._pending = self._pending, {}
        self.read_to_end = self.unfinished == 0
        deltas = [pending[index] for index in sorted(pending)]
        return ParentUpdate(deltas, self._usage() if self.read_to_end else None)

    def result(self) -> ParentResult:
        """The whole reply. Raises IncompleteReplyError."""
        return ParentResult(merge(self._pending.values(), len(self._children)), self._usage())

    def _check(self, indices: Iterable[int]) -> list[int]:
        named = list(indices)
        if unknown := [index for index in named if not 0 <= index < len(self._children)]:
            raise ValueError(f"indices: {self.parent_id!r} has no child {unknown}")
        return named

    def _usage(self) -> Usage:
        completion_tokens = sum(child.tokens for child in self._children)
        return Usage(self._prompt_tokens, completion_tokens, sum(self._cached_tokens.values()))

    def _alive(self, index: int) -> bool:
        return self._children[index].finish_reason is None

    def _advance(self, group: str, delta: ChildDelta) -> bool:
        """Takes one child's delta; whether `group` goes on with a child that is over or placed elsewhere."""
        index = delta.index
        if not 0 <= index < len(self._children) or self._groups.setdefault(index, group) != group:
            return True
        child = self._children[index]
        if choice := child.push(delta):
            self._add(choice)
        return child.finish_reason is not None and delta.finish_reason is None

    def _end(self, index: int, reason: FinishReason, message: str | None = None) -> None:
        """Ends a child from this side; one that has finished is left alone."""
        if choice := self._children[index].push(ChildDelta(index, finish_reason=reason, error=message)):
            self._add(choice)

    def _add(self, choice: ChoiceDelta) -> None:
        if (known := self._pending.get(choice.index)) is None:
            self._pending[choice.index] = choice
        else:
            known.extend(choice)
        self._totals["completion_tokens_total"] += len(choice.token_ids)
        if choice.finish_reason is not None:
            self._count_finished(choice.finish_reason)
        self._wake.set()

    def _count_finished(self, reason: str) -> None:
        self.unfinished -= 1
        self._totals[f"children_finished_{reason}_total"] += 1
        if self.unfinished == 0 and not self._closed and not self.abandoned:
            self._totals["parents_finished_total"] += 1
            if self._drawn and self._samples > 1:
                self._count_siblings()

    def _count_siblings(self) -> None:
        """Counts distinct children per prompt, so that a collapsed sampler shows as a number."""
        for first in range(0, len(self._children), self._samples):
            siblings = self._children[first : first + self._samples]
            self._totals["siblings_total"] += len(siblings)
            self._totals["siblings_distinct_total"] += len({child.fingerprint for child in siblings})
