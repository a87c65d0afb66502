"""Groups of several ranks in processes of their own, without Ray: the bits of one rank, whatever they exchange by."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import ops
from tests.engines import Bits, Lab, family, finish
from tests.kernels.test_sampler import batch, equal, mixed, noise
from tests.ranks import run_ranks
from workers.config import EngineConfig
from workers.dealt_draws import draw
from workers.engine import Engine
from workers.lockstep import Lead, follow
from workers.model_runner import ModelRunner
from workers.outputs import FamilyRequest
from workers.plan_channel import PlanChannel
from workers.tensor_parallel import Communicator, Split

VOCAB = Split((100, 20, 180))
DRAWS = (11, 2, 1)
FAMILIES = [
    family("plain", range(3, 40), range(5)),
    family("filtered", range(50, 55), range(3), top_p=0.9, top_k=40, min_p=0.01, logprobs=5, seed=3),
    family("penal", [9, 8, 7], range(2), repetition_penalty=1.2, presence_penalty=0.3, min_tokens=4, ignore_eos=False),
    family("greedy", [4] * 20, range(3), temperature=0.0, logprobs=None),
]


def _draw(comm: Communicator) -> list[Tensor]:
    """Packed results of every number of draws, through shared memory and through gloo."""
    shared, results = comm.shared, []
    for way in (shared, None):
        comm.shared = way
        for count in DRAWS:
            logits = noise(6, VOCAB.total, dtype=torch.float32)[: (count + 1) // 2, VOCAB.of(comm.rank)]
            results.append(draw(logits.contiguous(), mixed(count), comm, VOCAB).pack(5))
    return results


def test_c2_draws_dealt_out_to_the_ranks_are_those_of_one_rank(tmp_path: Path) -> None:
    logits = noise(6, VOCAB.total, dtype=torch.float32)
    expected = [ops.sample(logits, mixed(count)).pack(5) for count in DRAWS] * 2
    for results in run_ranks(_draw, 3, folder=tmp_path):
        assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))


def test_one_rank_draws_alone() -> None:
    logits = noise(3, 50, dtype=torch.float32)
    assert equal(draw(logits, batch(3), Communicator(), Split((50,))), ops.sample(logits, batch(3)))


def _generate(comm: Communicator, options: dict[str, object], families: list[FamilyRequest]) -> dict[object, Bits]:
    """What rank 0's engine made; nothing on the others."""
    config = EngineConfig(**options, tp=comm.size)
    channel, runner = PlanChannel(30), ModelRunner(config, comm)
    if comm.rank > 0:
        follow(runner, channel)
        return {}
    engine = Engine(config, runner, Lead(runner, channel))
    engine.submit(families)
    channel.heartbeat()
    made = finish(engine, families)
    channel.stop()
    return made


@pytest.mark.parametrize("size", [2, 3])
def test_c2_a_group_generates_what_one_rank_does(
    tiny_checkpoint: Callable[[str], Path], tmp_path: Path, size: int
) -> None:
    lab = Lab(tiny_checkpoint("llama"), dtype="float32")
    made, *others = run_ranks(_generate, size, lab.options, FAMILIES, folder=tmp_path)
    assert made == lab.run(FAMILIES)
    assert others == [{}] * (size - 1)


def test_plans_larger_than_one_message_arrive(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    lab = Lab(tiny_checkpoint("llama"), dtype="float32", kv_blocks=512)
    many = [replace(request, parent_id=f"{request.parent_id} {i}") for i in range(12) for request in FAMILIES]
    made, _ = run_ranks(_generate, 2, lab.options, many, folder=tmp_path)
    assert made == lab.run(many)
