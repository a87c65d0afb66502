"""The table of open parents: takes the groups' step outputs, gives readers text, and forgets what is over.

A plain object without Ray; all methods are called on one event loop. `actor` serves it to the routers and the
groups. Whoever opens a parent reads it to its end or closes it; closing twice or too late is harmless.
"""

from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from aggregation.parent import ParentRecord, Placement
from aggregation.parent_request import ParentRequest
from aggregation.results import DuplicateParentError, ParentResult, ParentUpdate, UnknownParentError
from aggregation.vocabulary import Vocabulary
from workers.outputs import ChildRef, FinishReason, ParentDelta, StepOutput

TOTALS = (
    *(f"children_finished_{reason.value}_total" for reason in FinishReason),
    "parents_finished_total",
    "completion_tokens_total",
    "siblings_total",
    "siblings_distinct_total",
)


class Aggregator:
    """Merges the children of the parents opened on it. `tokenizer_folder` holds tokenizer.json."""

    def __init__(self, tokenizer_folder: str | Path) -> None:
        self._vocabulary = Vocabulary.load(tokenizer_folder)
        self._parents: dict[str, ParentRecord] = {}
        self._totals: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))

    def open(self, parent: ParentRequest, *, stream: bool, placement: Mapping[int, str] | None = None) -> None:
        """Registers a parent; to be done before any group gets its children.

        `placement` names the group of each child, as `place` does. Raises DuplicateParentError, or ValueError
        naming the field.
        """
        if parent.parent_id in self._parents:
            raise DuplicateParentError(f"parent {parent.parent_id!r} is open already")
        if parent.num_children == 0:
            raise ValueError("prompts, samples: a parent has at least one child")
        record = ParentRecord(parent, self._vocabulary, self._totals, stream=stream)
        record.place(placement or {})
        self._parents[parent.parent_id] = record

    def place(self, parent_id: str, placement: Mapping[int, str]) -> None:
        """Notes which group has which child; deltas from any other group are refused from then on.

        A child that was never placed belongs to the first group that reports it. Raises UnknownParentError,
        or ValueError for an index the parent does not have.
        """
        self._record(parent_id).place(placement)

    def push(self, output: StepOutput) -> list[ChildRef]:
        """Takes one push of a group. Answers the children it should stop.

        Those are the ones whose stop string matched, that failed or moved, and all of parents not open here.
        """
        stops: list[ChildRef] = []
        for parent_id, delta in output.parents.items():
            record = self._parents.get(parent_id)
            if record is None:
                stops += _all_children(parent_id, delta)
            else:
                stops += record.push(output.group, delta)
                self._sweep(record)
        return stops

    async def updates(self, parent_id: str) -> AsyncGenerator[ParentUpdate, None]:
        """What the children gained, folded since the last read; ends after the update with the usage.

        Raises UnknownParentError, ParentClosedError, and RuntimeError when the parent is being read already.
        """
        with self._reading(parent_id) as record:
            while not record.read_to_end:
                await record.changed()
                yield record.take()

    async def result(self, parent_id: str) -> ParentResult:
        """The whole reply, when all children have finished; failed ones are choices with their own error.

        Raises IncompleteReplyError, and as `updates` does.
        """
        with self._reading(parent_id) as record:
            while record.unfinished:
                await record.changed()
            return record.result()

    def fail(self, parent_id: str, indices: Iterable[int] | None, message: str) -> None:
        """Ends the children named (None: all) with an error, but for finished ones and parents not open."""
        if (record := self._parents.get(parent_id)) is not None:
            record.fail(indices, message)
            self._sweep(record)

    def fail_group(self, group: str, message: str) -> list[ChildRef]:
        """Ends all unfinished children placed on `group` with an error, and names them."""
        failed: list[ChildRef] = []
        for record in list(self._parents.values()):
            lost = record.children_on(group)
            record.fail(lost, message)
            failed += (ChildRef(record.parent_id, index) for index in lost)
            self._sweep(record)
        return failed

    def close(self, parent_id: str) -> list[Placement]:
        """Forgets the parent in any state. Answers its unfinished children and the groups that have them."""
        record = self._parents.pop(parent_id, None)
        return record.close() if record else []

    def counters(self) -> dict[str, int]:
        """Parents and children alive, and totals since the start.

        `siblings_total` counts finished children of sampled parents with several samples, `siblings_distinct_total` how
        many different token sequences they had; `completion_tokens_total` those that count as usage.
        """
        children = sum(record.unfinished for record in self._parents.values())
        return {"parents_alive": len(self._parents), "children_alive": children, **self._totals}

    def _record(self, parent_id: str) -> ParentRecord:
        if (record := self._parents.get(parent_id)) is None:
            raise UnknownParentError(f"parent {parent_id!r} is not open")
        return record

    @contextmanager
    def _reading(self, parent_id: str) -> Iterator[ParentRecord]:
        """Forgets the parent when it was read to its end.

        A reader that leaves early abandons it: it stays until it is closed, which says where its children
        are, or until each child has been reported by its group and told to stop.
        """
        record = self._record(parent_id)
        record.claim()
        try:
            yield record
        finally:
            record.abandon()
            self._sweep(record)

    def _sweep(self, record: ParentRecord) -> None:
        if record.abandoned and not record.unfinished and self._parents.get(record.parent_id) is record:
            del self._parents[record.parent_id]


def _all_children(parent_id: str, delta: ParentDelta) -> list[ChildRef]:
    return [ChildRef(parent_id, index) for index in delta.children]
