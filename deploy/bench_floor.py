"""How far a decoding step of the engine is above its floor: the matrix products of the same step, alone.

Runs the engine in a plain process, without Ray and HTTP; steps and products take turns, so that both see the same
machine. `measure_floor` does it in a process of its own with a rank's environment. Called by the bench's command.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.linear import PackedLinear
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model import CausalLM
from workers.model_runner import ModelRunner
from workers.outputs import ChildSpec, FamilyRequest
from workers.sampling_params import SamplingParams
from workers.tensor_parallel import Communicator

SIZES = (8, 32)
PROMPT_LEN = 128
STEPS = 48
"""Decoding steps measured, after a few that are not."""
UNCOUNTED = 4

Clock = Callable[[], float]


class FloorError(Exception):
    """The measurement failed; the message is the end of what its process said."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians over the steps of one family in the state of decoding, in seconds."""

    n: int
    step_s: float
    products_s: float

    @property
    def ratio(self) -> float:
        return self.step_s / self.products_s


def measure_floor(folder: Path) -> list[StepTime]:
    """`step_floor` as a rank would run it. Raises FloorError."""
    return [StepTime(**entry) for entry in run_as_rank("deploy.bench_floor", folder)]


def run_as_rank(module: str, folder: Path) -> list[dict[str, Any]]:
    """What a module prints as JSON in a process of its own with the environment that ranks have. Raises FloorError."""
    from cluster.placement import RANK_ENVIRONMENT

    command = [sys.executable, "-m", module, str(folder)]
    run = subprocess.run(command, env=os.environ | RANK_ENVIRONMENT, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise FloorError("\n".join(run.stderr.strip().splitlines()[-4:]))
    printed: list[dict[str, Any]] = json.loads(run.stdout)
    return printed


def step_floor(
    folder: str | Path,
    sizes: Sequence[int] = SIZES,
    *,
    prompt_len: int = PROMPT_LEN,
    steps: int = STEPS,
    clock: Clock = time.perf_counter,
) -> list[StepTime]:
    """Step time of a family of each size in `sizes`, and the time of its matrix products alone.

    The products are those of the model's own packed linears, one call each. Raises ValueError for a bad folder.
    """
    config = EngineConfig(model_folder=str(folder), prefix_cache=False)
    blocks = 2 + max(sizes) * (2 + (prompt_len + steps + UNCOUNTED) // config.block_size)
    config = replace(config, kv_blocks=blocks)
    runner = ModelRunner(config, Communicator())
    return [_measure(Engine(config, runner), runner.model, n, prompt_len, steps, clock) for n in sizes]


def linears(model: CausalLM) -> list[PackedLinear]:
    """Every linear a decoding step runs, in its order."""
    layers = [layer.weights() for layer in model.layers]
    return [*(part for w in layers for part in (w.qkv, w.out, w.gate_up, w.down)), model.head.local]


def _measure(engine: Engine, model: CausalLM, n: int, prompt_len: int, steps: int, clock: Clock) -> StepTime:
    products = _products(model, n)
    total = steps + UNCOUNTED
    engine.submit([_family(n, [1 + place % (engine.vocab_size - 1) for place in range(prompt_len)], total + 1)])
    while engine.stats()["generation_tokens_total"] < n:
        engine.step()
    times = [(_timed(engine.step, clock), _timed(products, clock)) for _ in range(total)]
    step_s, products_s = (statistics.median(each) for each in zip(*times[UNCOUNTED:], strict=True))
    return StepTime(n, step_s, products_s)


def _family(n: int, prompt: Sequence[int], max_tokens: int) -> FamilyRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return FamilyRequest("floor", 0, tuple(prompt), tuple(ChildSpec(i, i) for i in range(n)), params, "floor")


def _products(model: CausalLM, rows: int) -> Callable[[], object]:
    """A function that runs each linear once on `rows` rows of random input."""
    pairs = [(linear, _random(rows, linear)) for linear in linears(model)]

    @torch.inference_mode()
    def run() -> None:
        for linear, x in pairs:
            linear(x)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def _random(rows: int, linear: PackedLinear) -> torch.Tensor:
    return torch.randn(rows, linear.in_features).to(linear.device, linear.dtype)


def _timed(function: Callable[[], object], clock: Clock) -> float:
    start = clock()
    function()
    return clock() - start


if __name__ == "__main__":
    print(json.dumps([asdict(entry) for entry in step_floor(sys.argv[1])]))
