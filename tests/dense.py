"""Drives a model over one sequence at a time, as the tests of its logits need it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.ops import AttentionBatch, KVCache
from workers.loader import load_model
from workers.model import CausalLM
from workers.tensor_parallel import Communicator

BLOCK = 16
CPU = torch.device("cpu")


class OneSequence:
    """One sequence in a KV cache of its own, whose blocks lie in descending order."""

    def __init__(self, model: CausalLM, length: int) -> None:
        config, self.model, self.computed = model.config, model, 0
        blocks = -(-length // BLOCK)
        self.table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None]
        self.kv = KVCache.allocate(
            config.num_layers, blocks, model.local_kv_heads, config.head_dim, BLOCK, model.dtype, model.device
        )

    def feed(self, tokens: Sequence[int], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the next tokens: their logits [T, V], or those of some rows."""
        positions = torch.arange(self.computed, self.computed + len(tokens))
        self.computed += len(tokens)
        slots = self.table[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
        batch = AttentionBatch.build(
            torch.tensor([0, len(tokens)], dtype=torch.int32),
            torch.tensor([self.computed], dtype=torch.int32),
            self.table,
            positions,
            slots,
            self.kv,
        )
        part = self.model.logits(self.model.forward(torch.tensor(tokens), batch, self.kv, rows))
        return self.model.comm.all_gather_columns(part, self.model.plan.vocab.sizes)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Prefill `prompt` in chunks, then decode greedily."""

    folder: str
    dtype: torch.dtype
    exact: bool
    prompt: tuple[int, ...]
    chunk: int
    steps: int


@dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    """[prompt + steps, V]: of every position but the last token's."""
    tokens: tuple[int, ...]


def run_job(comm: Communicator, job: Job) -> Result:
    """The job's logits and greedy tokens, as one rank of a group sees them."""
    model = load_model(job.folder, dtype=job.dtype, device=CPU, comm=comm, exact=job.exact)
    sequence = OneSequence(model, len(job.prompt) + job.steps)
    chunks = [job.prompt[start : start + job.chunk] for start in range(0, len(job.prompt), job.chunk)]
    logits = [sequence.feed(chunk) for chunk in chunks]
    tokens = [int(logits[-1][-1].argmax())]
    for _ in range(job.steps):
        logits.append(sequence.feed(tokens[-1:]))
        tokens.append(int(logits[-1][-1].argmax()))
    return Result(torch.cat(logits), tuple(tokens))


def run_jobs(comm: Communicator, jobs: Sequence[Job]) -> list[Result]:
    return [run_job(comm, job) for job in jobs]
