"""Decides the batch of every step inside one group. The unit of arrival is the family, the unit of running the child.

Order of a step: running children first (one token each), then children that wait for a slot, then prompts, oldest
family first, prompts in chunks under a token budget. When KV blocks run out the newest child gives way and later
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
    """`count` tokens from `start` of one child, or of the family's prompt when `child` is None."""

    family: Family
    child: Sequence | None
    table: KVTable
    start: int
    count: int
    draws: list[Sequence] = field(default_factory=list)

    def order(self) -> tuple[int, int]:
        """Siblings side by side, so that what they share lies together in the batch."""
        return self.family.arrival, -1 if self.child is None else self.child.index

    @property
    def token_ids(self) -> tuple[int, ...] | list[int]:
        if self.child is None:
            return self.family.request.prompt_token_ids[self.start : self.start + self.count]
        first = self.start - self.family.prompt_len
        return self.child.output_ids[first : first + self.count]

    def drawing(self) -> list[Sequence]:
        """Who draws a token from the logits of the last row: the child, or all children of a finished prompt."""
        if self.child is not None:
            return [self.child] if self.start + self.count == self.child.num_tokens else []
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
    """A child is in `running` or waits; a family is known from `add` until its last child has finished."""

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
    def num_waiting(self) -> int:
        return sum(family.num_live for family in self.families.values()) - len(self.running)

    def schedule(self) -> Batch:
        """The next batch; blocks are allocated for it. Empty only when nothing is left to do.

        The caller runs it, then calls `computed` and appends the drawn tokens before the next call.
        """
        batch = Batch(budget=max(self.max_step_tokens - len(self.running), self.max_step_tokens // 4, 1))
        for child in list(self.running):
            if child.status is Status.RUNNING:
                self._continue(child, batch)
        for family in list(self.families.values()):
            if not (self._start_children(family, batch) if family.stem_resident else self._prefill(family, batch)):
                break
        batch.chunks.sort(key=Chunk.order)
        for chunk in batch.chunks:
            chunk.draws = chunk.drawing()
        return batch

    def _continue(self, child: Sequence, batch: Batch) -> None:
        """Compute what a running child lacks: one token, or what a preemption made it lose."""
        count = min(child.pending, max(batch.budget, 1))
        need = self.blocks.blocks_for(child.table.computed + count) - len(child.table.blocks)
        if self._make_room(need, child):
            self._extend(batch, Chunk(child.family, child, child.table, child.table.computed, count), need)
        else:
            self._preempt(child)

    def _extend(self, batch: Batch, chunk: Chunk, need: int) -> None:
        """Put a chunk into the batch with the blocks it needs; what is not plain decoding uses up the budget."""
        chunk.table.blocks += self.blocks.allocate(need)
        batch.chunks.append(chunk)
        if chunk.child is None:
            self.counters.prompt_tokens_computed += chunk.count
            batch.budget -= chunk.count
        else:
            self.counters.recomputed_tokens += chunk.count - 1
            batch.budget -= chunk.count - 1

    def _make_room(self, need: int, child: Sequence) -> bool:
        """Free `need` blocks for a running child at the cost of those behind it; False if it must give way itself."""
        while self.blocks.num_free < need:
            last = self.running[-1]
            if last.priority > child.priority:
                self._preempt(last)
            elif not self._drop_stem_behind(child.family):
                return False
        return True

    def _preempt(self, child: Sequence) -> None:
        self.blocks.release(child.table.clear())
        self.running.remove(child)
        child.status = Status.WAITING
        self.counters.preemptions += 1

    def _drop_stem_behind(self, family: Family) -> bool:
        """Release the prompt of the newest family behind `family` that has blocks but no running child."""
        for other in reversed(self.families.values()):
            if other.arrival <= family.arrival:
                return False
            if other.stem.blocks and other.idle:
                self.blocks.release(other.stem.clear())
                return True
        return False

    def _reserve(self, need: int, family: Family) -> bool:
        """Whether `need` blocks are to be had for waiting work, leaving one for each running child to grow."""
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

    def _start_children(self, family: Family, batch: Batch) -> bool:
        """Fork waiting children off the stem while slots and blocks last; False when the queue behind must wait."""
        for child in family.live:
            if child.status is Status.RUNNING:
                continue
            if len(self.running) >= self.max_running or not self._fork(child, batch):
                return False
        return True

    def _fork(self, child: Sequence, batch: Batch) -> bool:
        """Share the stem's full blocks, copy its partly filled one, and let the child run."""
        family, table = child.family, child.table
        full = family.prompt_len // self.blocks.block_size
        count = min(len(child.output_ids), max(batch.budget, 1))
        need = self.blocks.blocks_for(family.prompt_len + count) - full
        if not self._reserve(need, family):
            return False
        table.blocks, table.digests = family.stem.blocks[:full], family.stem.digests[:full]
        table.computed = family.prompt_len
        self.blocks.share(table.blocks)
        self._extend(batch, Chunk(family, child, table, table.computed, count), need)
        batch.copies += zip(family.stem.blocks[full:], table.blocks[full:], strict=False)
        child.status = Status.RUNNING
        insort(self.running, child, key=lambda sequence: sequence.priority)
        return True

    def computed(self, batch: Batch) -> None:
        """Record that the batch has run: KV is in place, full blocks may be reused by others."""
        for chunk in batch.chunks:
            chunk.table.computed = chunk.start + chunk.count
            self._publish(chunk)

    def _publish(self, chunk: Chunk) -> None:
        table, size = chunk.table, self.blocks.block_size
        output_ids = chunk.child.output_ids if chunk.child else []
        while self.blocks.prefix_cache and (len(table.digests) + 1) * size <= table.computed:
            digest = chunk.family.next_digest(table, output_ids, size)
            self.blocks.commit(table.blocks[len(table.digests)], digest)
            table.digests.append(digest)

    def finish(self, child: Sequence) -> None:
        """Let go of a child, and of its family with the last one. Idempotent."""
        if child.status is Status.FINISHED:
            return
        if child.status is Status.RUNNING:
            self.running.remove(child)
        child.status = Status.FINISHED
        child.family.num_live -= 1
        self.blocks.release(child.table.clear())
        family = child.family
        if family.num_live == 0:
            self.blocks.release(family.stem.clear())
            del self.families[family.request.parent_id, family.request.prompt_number]

    def find(self, parent_id: str, indices: Iterable[int] | None = None) -> list[Sequence]:
        """The live children of a parent here, all or those with the given choice indices."""
        wanted = None if indices is None else set(indices)
        families = [family for (parent, _), family in self.families.items() if parent == parent_id]
        return [c for family in families for c in family.live if wanted is None or c.index in wanted]

    def check(self) -> None:
        """Raise AssertionError if blocks and tables, or lists and states, disagree."""
        tables = [family.stem.blocks for family in self.families.values()]
        tables += [child.table.blocks for family in self.families.values() for child in family.children]
        self.blocks.check(tables)
        running = [c for family in self.families.values() for c in family.live if c.status is Status.RUNNING]
        assert sorted(running, key=lambda c: c.priority) == self.running, "running list does not match the states"
