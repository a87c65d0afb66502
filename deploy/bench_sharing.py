"""What sharing a prompt's blocks among siblings is worth: the same decoding steps with it and without.

Runs the engine in a plain process. Every step is computed both ways, and the logits must be the same bits. Results are
points for the charts of `deploy.bench_charts`; called by the bench's command.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from deploy.bench_floor import FloorError, run_as_rank
from kernels.ops import SampleBatch, SampleResult
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model_runner import ModelRunner
from workers.outputs import ChildSpec, FamilyRequest
from workers.sampling_params import SamplingParams
from workers.step_input import StepInput
from workers.tensor_parallel import Communicator

STEPS = 7
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
SIZES_PROMPT = 1000
PROMPTS = (128, 256, 512, 1000, 2000, 4000, 8000)
PROMPTS_SIZE = 32
POINTS = sorted({*((SIZES_PROMPT, n) for n in SIZES), *((prompt_len, PROMPTS_SIZE) for prompt_len in PROMPTS)})
"""(prompt length, n) of every point, the one that is on both charts once."""


@dataclass(frozen=True, slots=True)
class SharingPoint:
    """Medians over the decoding steps of one family, in seconds of the model's part of a step."""

    prompt_len: int
    n: int
    shared_s: float
    apart_s: float


class BothWays:
    """Runs each step with sharing and without, in turns which comes first. Raises FloorError if a bit differs."""

    def __init__(self, runner: ModelRunner) -> None:
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self._runner = runner

    def run(self, step: StepInput, draws: Callable[[], SampleBatch]) -> SampleResult | None:
        first = len(self.times[True]) % 2 == 0
        logits = [self._timed(step, share) for share in (first, not first)]
        if logits[0] is not None and logits[1] is not None and not torch.equal(logits[0], logits[1]):
            raise FloorError("sharing changed the logits")
        return None if logits[0] is None else self._runner.draw(logits[0], draws())

    def _timed(self, step: StepInput, share: bool) -> torch.Tensor | None:
        self._runner.share_prefix = share
        start = time.perf_counter()
        logits = self._runner.execute(step)
        self.times[share].append(time.perf_counter() - start)
        return logits


def measure_sharing(folder: Path) -> list[SharingPoint]:
    """All `POINTS` as a rank would run them, in a process of its own. Raises FloorError."""
    return [SharingPoint(**entry) for entry in run_as_rank("deploy.bench_sharing", folder)]


def sharing_points(folder: str | Path, points: Sequence[tuple[int, int]], *, steps: int = STEPS) -> list[SharingPoint]:
    """One point per (prompt length, n). Raises ValueError for a bad folder, FloorError if sharing changes a bit."""
    config = EngineConfig(model_folder=str(folder), prefix_cache=False)
    longest, most = max(length for length, _ in points) + steps + 2, max(n for _, n in points)
    blocks = 2 + longest // config.block_size + most * (3 + steps // config.block_size)
    config = replace(config, kv_blocks=blocks)
    runner = ModelRunner(config, Communicator())
    return [_measure(config, runner, prompt_len, n, steps) for prompt_len, n in points]


def _measure(config: EngineConfig, runner: ModelRunner, prompt_len: int, n: int, steps: int) -> SharingPoint:
    ways = BothWays(runner)
    engine = Engine(config, runner, ways)
    prompt = tuple(1 + place % (engine.vocab_size - 1) for place in range(prompt_len))
    params = SamplingParams(max_tokens=steps + 2, seed=1, ignore_eos=True)
    children = tuple(ChildSpec(index, index) for index in range(n))
    engine.submit([FamilyRequest("sharing", 0, prompt, children, params, "sharing")])
    while engine.has_work:
        engine.step()
    runner.share_prefix = True
    shared_s, apart_s = (statistics.median(ways.times[share][-steps:]) for share in (True, False))
    return SharingPoint(prompt_len, n, shared_s, apart_s)


if __name__ == "__main__":
    print(json.dumps([asdict(point) for point in sharing_points(sys.argv[1], POINTS)]))
