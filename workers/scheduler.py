"""Decides the batch of every step inside one group. Families arrive, sequences run, children leave.

Order of a step: running sequences first (one token each), then those that wait for a slot, then prompts, oldest family
first, prompts in chunks under a token budget. When KV blocks run out the newest sequence gives way and later
recomputes its own output; the oldest family can always go on, so nothing hangs. Knows block numbers, not tensors.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.block_manager import BlockManager
from workers.outputs import FamilyRequest
from workers.sequence import Family, KVTable, Sequence, Status


@dataclass(slots=True)
class Chunk:
    """`count` tokens from `start` of one sequence, or of the family's prompt when `sequence` is None."""

    family: Family
    sequence: Sequence | None
    table: KVTable
    start: int
    count: int
    draws: list[Sequence] = field(default_factory=list)

    def order(self) -> tuple[int, int]:
        """Siblings side by side, so that what they share lies together in the batch."""
        return self.family.arrival, -1 if self.sequence is None else self.sequence.index

    @property
    def token_ids(self) -> tuple[int, ...] | list[int]:
        if self.sequence is None:
            return self.family.request.prompt_token_ids[self.start : self.start + self.count]
        first = self.start - self.family.prompt_len
        return self.sequence.output_ids[first : first + self.count]

    def drawing(self) -> list[Sequence]:
        """Who draws a token from the logits of the last row: the sequence, or all of a finished prompt's."""
        if self.sequence is not None:
            return [self.sequence] if self.start + self.count == self.sequence.num_tokens else []
        finished = self.start + self.count == self.family.prompt_len
        return self.family.live if finished and not self.family.forked else []


@dataclass(slots=True)
class Batch:
    budget: int
    """Tokens still to be had for prompts and recomputing."""
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """KV block copies (source, destination) to do before anything is computed."""


@dataclass(slots=True)
class Counters:
    prompt_tokens_asked: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """A sequence is in `running` or waits; a family is known from `add` until its last child has finished."""

    def __init__(self, blocks: BlockManager, *, max_running: int, max_step_tokens: int) -> None:
        self.blocks = blocks
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.families: dict[tuple[str, int], Family] = {}
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._arrivals = 0

    def add(self, request: FamilyRequest) -> Family:
        """Queue a family. Raises ValueError if the parent already has a family for this prompt here."""
        key = request.parent_id, request.prompt_number
        if key in self.families:
            raise ValueError(f"prompt {request.prompt_number} of this parent is already here")
        family = self.families[key] = Family(request, self._arrivals)
        self._arrivals += 1
        self.counters.prompt_tokens_asked += family.prompt_len
        return family

    @property
    def num_running(self) -> int:
        return sum(len(sequence.children) for sequence in self.running)

    @property
    def num_waiting(self) -> int:
        """Children, as is `num_running`."""
        return sum(family.num_live for family in self.families.values()) - self.num_running

    def schedule(self) -> Batch:
        """The next batch; blocks are allocated for it. Empty only when nothing is left to do.

        The caller runs it, then calls `computed` and appends the drawn tokens before the next call.
        """
        batch = Batch(budget=max(self.max_step_tokens - len(self.running), self.max_step_tokens // 4, 1))
        for sequence in list(self.running):
            if sequence.status is Status.RUNNING:
                self._continue(sequence, batch)
        for family in list(self.families.values()):
            if not (self._start_sequences(family, batch) if family.stem_resident else self._prefill(family, batch)):
                break
        batch.chunks.sort(key=Chunk.order)
        for chunk in batch.chunks:
            chunk.draws = chunk.drawing()
        return batch

    def _continue(self, sequence: Sequence, batch: Batch) -> None:
        """Compute what a running sequence lacks: one token, or what a preemption made it lose."""
        count = min(sequence.pending, max(batch.budget, 1))
        need = self.blocks.blocks_for(sequence.table.computed + count) - len(sequence.table.blocks)
        if self._make_room(need, sequence):
            self._extend(batch, Chunk(sequence.family, sequence, sequence.table, sequence.table.computed, count), need)
        else:
            self._preempt(sequence)

    def _extend(self, batch: Batch, chunk: Chunk, need: int) -> None:
        """Put a chunk into the batch with the blocks it needs; what is not plain decoding uses up the budget."""
        chunk.table.blocks += self.blocks.allocate(need)
        batch.chunks.append(chunk)
        if chunk.sequence is None:
            self.counters.prompt_tokens_computed += chunk.count
            batch.budget -= chunk.count
        else:
            self.counters.recomputed_tokens += chunk.count - 1
            batch.budget -= chunk.count - 1

    def _make_room(self, need: int, sequence: Sequence) -> bool:
        """Free `need` blocks for a running sequence at the cost of those behind; False if it must give way itself."""
        while self.blocks.num_free < need:
            last = self.running[-1]
            if last.priority > sequence.priority:
                self._preempt(last)
            elif not self._drop_stem_behind(sequence.family):
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.blocks.release(sequence.table.clear())
        self.running.remove(sequence)
        sequence.status = Status.WAITING
        self.counters.preemptions += 1

    def _drop_stem_behind(self, family: Family) -> bool:
        """Release the prompt of the newest family behind `family` that has blocks but no running sequence."""
        for other in reversed(self.families.values()):
            if other.arrival <= family.arrival:
                return False
            if other.stem.blocks and other.idle:
                self.blocks.release(other.stem.clear())
                return True
        return False

    def _reserve(self, need: int, family: Family) -> bool:
        """Whether `need` blocks are to be had for waiting work, leaving one for each running sequence to grow."""
        while self.blocks.num_free < need and not self.running and self._drop_stem_behind(family):
            pass
        return self.blocks.num_free >= need + len(self.running)

    def _prefill(self, family: Family, batch: Batch) -> bool:
        """Compute the next chunk of a prompt; False when it is not complete with it and those behind must wait."""
        stem = family.stem
        if not stem.blocks:
            self._reuse_cached(family)
        missing = family.prompt_len - stem.computed
        count = min(missing, batch.budget)
        need = self.blocks.blocks_for(stem.computed + count) - len(stem.blocks)
        if count <= 0 or not self._reserve(need, family):
            return False
        self._extend(batch, Chunk(family, None, stem, stem.computed, count), need)
        return count == missing

    def _reuse_cached(self, family: Family) -> None:
        """Start the stem from the prefix cache; the last prompt token is computed anew, for its logits."""
        stem = family.stem
        blocks, digests = self.blocks.match(
            family.request.prompt_token_ids, (family.prompt_len - 1) // self.blocks.block_size
        )
        self.blocks.share(blocks)
        stem.blocks, stem.digests, stem.computed = blocks, digests, len(blocks) * self.blocks.block_size
        self.counters.prompt_tokens_cached += stem.computed
        if not family.forked:
            family.cached_tokens = stem.computed

    def _start_sequences(self, family: Family, batch: Batch) -> bool:
        """Fork waiting sequences off the stem while slots and blocks last; False when the queue behind must wait."""
        for sequence in family.live:
            if sequence.status is Status.RUNNING:
                continue
            if len(self.running) >= self.max_running or not self._fork(sequence, batch):
                return False
        return True

    def _fork(self, sequence: Sequence, batch: Batch) -> bool:
        """Share the stem's full blocks, copy its partly filled one, and let the sequence run."""
        family, table = sequence.family, sequence.table
        full = family.prompt_len // self.blocks.block_size
        count = min(len(sequence.output_ids), max(batch.budget, 1))
        need = self.blocks.blocks_for(family.prompt_len + count) - full
        if not self._reserve(need, family):
            return False
        table.blocks, table.digests = family.stem.blocks[:full], family.stem.digests[:full]
        table.computed = family.prompt_len
        self.blocks.share(table.blocks)
        self._extend(batch, Chunk(family, sequence, table, table.computed, count), need)
        batch.copies += zip(family.stem.blocks[full:], table.blocks[full:], strict=False)
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=lambda other: other.priority)
        return True

    def computed(self, batch: Batch) -> None:
        """Record that the batch has run: KV is in place, full blocks may be reused by others."""
        for chunk in batch.chunks:
            chunk.table.computed = chunk.start + chunk.count
            self._publish(chunk)

    def _publish(self, chunk: Chunk) -> None:
        table, size = chunk.table, self.blocks.block_size
        output_ids = chunk.sequence.output_ids if chunk.sequence else []
        while self.blocks.prefix_cache and (len(table.digests) + 1) * size <= table.computed:
            digest = chunk.family.next_digest(table, output_ids, size)
            self.blocks.commit(table.blocks[len(table.digests)], digest)
            table.digests.append(digest)

    def finish(self, sequence: Sequence) -> None:
        """Let go of a sequence with all its children, and of its family with the last one. Idempotent."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        sequence.status = Status.FINISHED
        self.blocks.release(sequence.table.clear())
        family = sequence.family
        family.num_live -= len(sequence.children)
        if family.num_live == 0:
            self.blocks.release(family.stem.clear())
            del self.families[family.request.parent_id, family.request.prompt_number]

    def abort(self, parent_id: str, indices: Iterable[int]) -> None:
        """Let go of children of a parent by choice index; a sequence goes on for those it has left. Idempotent."""
        gone = frozenset(indices)
        for family in [family for (parent, _), family in self.families.items() if parent == parent_id]:
            for sequence in family.live:
                self._take_out(sequence, gone.intersection(sequence.children))

    def _take_out(self, sequence: Sequence, gone: frozenset[int]) -> None:
        if len(gone) == len(sequence.children):
            self.finish(sequence)
        elif gone:
            sequence.children = [index for index in sequence.children if index not in gone]
            sequence.family.num_live -= len(gone)

    def check(self) -> None:
        """Raise AssertionError if blocks and tables, or lists and states, disagree."""
        tables = [family.stem.blocks for family in self.families.values()]
        tables += [sequence.table.blocks for family in self.families.values() for sequence in family.sequences]
        self.blocks.check(tables)
        running = [s for family in self.families.values() for s in family.live if s.status is Status.RUNNING]
        assert sorted(running, key=lambda s: s.priority) == self.running, "running list does not match the states"
        for family in self.families.values():
            counted = sum(len(sequence.children) for sequence in family.live)
            assert counted == family.num_live, "the number of live children does not match the sequences"
