"""Drives an engine in this process, and says what came out as bits: the tool of the exactness tests."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workers.config import EngineConfig
from workers.engine import Engine
from workers.model_runner import ModelRunner
from workers.outputs import ChildSpec, FamilyRequest, FinishReason, ParentDelta
from workers.sampling_params import SamplingParams
from workers.tensor_parallel import Communicator

Bits = tuple[tuple[int, ...], tuple[str, ...], str]
"""Tokens, log-probabilities as hexadecimal floats, finish reason."""


@dataclass
class Collected:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    finish: FinishReason | None = None


def family(
    name: str, prompt: Sequence[int], samples: Iterable[int], *, prompt_number: int = 0, **params: Any
) -> FamilyRequest:
    values = {"max_tokens": 12, "seed": 7, "logprobs": 2, "ignore_eos": True, **params}
    children = tuple(ChildSpec(index, sample) for index, sample in enumerate(samples))
    return FamilyRequest(name, prompt_number, tuple(prompt), children, SamplingParams(**values), "sink")


class Lab:
    """One loaded model; every run gets an engine and a KV pool of its own."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = {"model_folder": str(folder), "kv_blocks": 128, "block_size": 16, **options}
        self.runner = ModelRunner(EngineConfig(**self.options), Communicator())

    def engine(self, **options: Any) -> Engine:
        config = EngineConfig(**{**self.options, **options})
        runner = self.runner
        runner.allocate(config.kv_blocks, config.block_size)
        runner.max_model_len = min(runner.model.max_len, (config.kv_blocks - 1) * config.block_size)
        return Engine(config, runner)

    def run(self, families: Sequence[FamilyRequest], **options: Any) -> dict[tuple[str, int], Bits]:
        """All children of all families by (parent, sample), from a fresh engine."""
        engine = self.engine(**options)
        engine.submit(families)
        return finish(engine, families)


def finish(engine: Engine, families: Sequence[FamilyRequest]) -> dict[tuple[str, int], Bits]:
    """Step until nothing is left; the blocks must be free again."""
    children = {(f.parent_id, child.index): Collected() for f in families for child in f.children}
    while engine.has_work:
        for parents in engine.step().values():
            for delta in parents.values():
                _collect(children, delta)
        engine.scheduler.check()
    assert engine.blocks.num_used == 0
    sample_of = {(f.parent_id, child.index): child.sample for f in families for child in f.children}
    return {(parent, sample_of[parent, index]): _bits(c) for (parent, index), c in children.items()}


def _collect(children: dict[tuple[str, int], Collected], parent: ParentDelta) -> None:
    for delta in parent.children.values():
        child = children[parent.parent_id, delta.index]
        assert child.finish is None, "a delta after the finish"
        child.tokens += delta.token_ids
        for entry in delta.logprobs or ():
            child.logprobs.append(struct.pack("<f", entry.logprob).hex() + repr(entry.top_ids))
        child.finish = delta.finish_reason


def _bits(child: Collected) -> Bits:
    assert child.finish is not None, "a child without a finish"
    return tuple(child.tokens), tuple(child.logprobs), child.finish.value
