"""One group's engine: families in, deltas out, one step at a time. Runs in a plain process, without Ray and HTTP.

The step is schedule, run, draw, hand out. Everything is called from one thread; whoever drives it (the worker group,
a test, a script) calls `step` while there is work and passes the deltas on to the sinks they are for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Protocol

from kernels.ops import SampleBatch, SampleResult
from workers.block_manager import BlockManager
from workers.config import EngineConfig
from workers.model_runner import ModelRunner
from workers.outputs import (
    ChildDelta,
    ChildRef,
    FamilyRequest,
    FinishReason,
    Haste,
    ParentDelta,
    PromptReport,
    TokenLogprobs,
)
from workers.sampler import Drawn, Sampler, drawn
from workers.scheduler import Chunk, Scheduler
from workers.sequence import Family, Sequence
from workers.step_input import StepInput

NOTHING_TO_DRAW = "no token can be drawn: the sampling parameters exclude all of them, or the logits are not numbers"

Outputs = dict[str, dict[str, ParentDelta]]
"""Deltas of one step by sink and parent."""


class StepRunner(Protocol):
    """Runs a step; see `ModelRunner.run`."""

    def run(self, step: StepInput, draws: Callable[[], SampleBatch]) -> SampleResult | None: ...


class Engine:
    """`ranks` runs a step on all ranks of the group; by default `runner` is the only one."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, ranks: StepRunner | None = None) -> None:
        self.max_model_len = runner.max_model_len
        self.vocab_size = runner.model_config.vocab_size
        self._eos_ids = frozenset(runner.model_config.eos_token_ids)
        self._ranks = ranks or runner
        self._block_size = config.block_size
        self._block_bytes = runner.block_bytes
        self._sampler = Sampler(self._eos_ids)
        self.blocks = BlockManager(runner.kv.num_blocks, config.block_size, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(self.blocks, max_running=config.max_running, max_step_tokens=config.max_step_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.families)

    def submit(self, families: Iterable[FamilyRequest]) -> None:
        """Queue families, all or none. Raises ValueError for one that can never run."""
        families = list(families)
        for family in families:
            self._check(family)
        added: list[Family] = []
        try:
            for family in families:
                added.append(self.scheduler.add(family))
        except ValueError:
            for known in added:
                self._finish(known.sequences)
            raise

    def _check(self, family: FamilyRequest) -> None:
        length = len(family.prompt_token_ids)
        if not length or not family.children:
            raise ValueError("a family needs a prompt and at least one child")
        if length + family.params.max_tokens > self.max_model_len:
            raise ValueError(
                f"prompt ({length} tokens) and max_tokens ({family.params.max_tokens}) exceed max_model_len "
                f"({self.max_model_len})"
            )
        if not 0 <= min(family.prompt_token_ids) <= max(family.prompt_token_ids) < self.vocab_size:
            raise ValueError(f"prompt token ids must lie in 0..{self.vocab_size - 1}")

    def abort(self, children: Iterable[ChildRef]) -> None:
        """Stop children at once; no delta of them follows. Unknown or finished ones are passed over."""
        by_parent: defaultdict[str, list[int]] = defaultdict(list)
        for child in children:
            by_parent[child.parent_id].append(child.index)
        for parent_id, indices in by_parent.items():
            self.scheduler.abort(parent_id, indices)

    def abort_sink(self, sink: str) -> int:
        """Stop everything that reports to a sink that is gone; how many children that were."""
        families = [family for family in self.scheduler.families.values() if family.request.sink == sink]
        children = sum(family.num_live for family in families)
        for family in families:
            self._finish(family.sequences)
        return children

    def _finish(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.finish(sequence)

    def step(self) -> Outputs:
        """Advance every running sequence by one token and prompts by a chunk. Returns what each sink gets."""
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return {}
        drawing = [chunk for chunk in batch.chunks if chunk.draws]
        draws = [sequence for chunk in drawing for sequence in chunk.draws]
        rows = [row for row, chunk in enumerate(drawing) for _ in chunk.draws]
        step = StepInput.build(batch, self._block_size)
        result = self._ranks.run(step, lambda: self._sampler.batch(draws, rows))
        self.scheduler.computed(batch)
        return self._outputs(drawing, draws, drawn(draws, result)) if result is not None else {}

    def _outputs(self, drawing: list[Chunk], draws: list[Sequence], made: Drawn) -> Outputs:
        outputs: Outputs = {}
        for chunk in drawing:
            if chunk.sequence is None:
                delta = _delta(outputs, chunk.family)
                delta.prompts.append(_report(chunk.family))
                delta.haste = Haste.NOW if chunk.family.request.stream else Haste.NONE
                chunk.family.forked = True
        for sequence, token, logprobs in zip(draws, made.tokens, made.logprobs, strict=True):
            delta = _delta(outputs, sequence.family)
            for child in self._advance(sequence, token, logprobs):
                delta.add(child)
                delta.haste = max(delta.haste, _haste(sequence.family, child))
        return outputs

    def _advance(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> list[ChildDelta]:
        """What each child gains, in lists of its own: they are folded in place later."""
        if token < 0:
            self.scheduler.finish(sequence)
            return _errors(sequence, NOTHING_TO_DRAW)
        stop_id = sequence.append(token, self._eos_ids)
        self.scheduler.counters.generation_tokens += 1
        if (reason := sequence.finish_reason) is not None:
            self.scheduler.finish(sequence)
        return [
            ChildDelta(index, [token], None if logprobs is None else [logprobs], reason, stop_id)
            for index in sequence.children
        ]

    def fail_all(self, message: str) -> Outputs:
        """End every child with an error delta; for a group that cannot go on."""
        outputs: Outputs = {}
        for family in list(self.scheduler.families.values()):
            mine = _delta(outputs, family)
            mine.haste = Haste.NOW
            for sequence in family.live:
                for child in _errors(sequence, message):
                    mine.add(child)
            self._finish(family.sequences)
        return outputs

    def stats(self) -> dict[str, int]:
        """Gauges and counters of this group, as exported by the metrics page."""
        return {
            "children_running": self.scheduler.num_running,
            "children_waiting": self.scheduler.num_waiting,
            "families_alive": len(self.scheduler.families),
            "kv_blocks_used": self.blocks.num_used,
            "kv_blocks_total": self.blocks.num_blocks,
            "kv_bytes_used": self.blocks.num_used * self._block_bytes,
            **{f"{name}_total": count for name, count in asdict(self.scheduler.counters).items()},
        }


def _delta(outputs: Outputs, family: Family) -> ParentDelta:
    parents = outputs.setdefault(family.request.sink, {})
    return parents.setdefault(family.request.parent_id, ParentDelta(family.request.parent_id))


def _errors(sequence: Sequence, message: str) -> list[ChildDelta]:
    return [ChildDelta(index, finish_reason=FinishReason.ERROR, error=message) for index in sequence.children]


def _haste(family: Family, delta: ChildDelta) -> Haste:
    """A whole reply is complete with its last child only; the others it can do without until a push is due."""
    stream = family.request.stream
    if delta.finish_reason is None:
        return Haste.SOON if stream else Haste.NONE
    return Haste.NOW if stream or family.num_live == 0 else Haste.SOON


def _report(family: Family) -> PromptReport:
    return PromptReport(family.request.prompt_number, family.cached_tokens)
