"""How far a decoding step of the engine is above its floor, the matrix products of the same step alone; and what it
costs that a child's bits do not depend on its batch: the products of a library that promises nothing of the kind, and
the step with attention merged over chunks four times as long.

Runs the engine in a plain process, without Ray and HTTP; all of it takes turns, so that it sees the same machine.
`measure_floor` does it in a process of its own with a rank's environment. Called by the bench's command.
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
import torch.nn.functional as F

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
LONG_CHUNKS = 4

Clock = Callable[[], float]


class FloorError(Exception):
    """The measurement failed; the message is the end of what its process said."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Medians over the steps of one family in the state of decoding, in seconds."""

    n: int
    step_s: float
    products_s: float
    library_s: float
    long_chunks_s: float

    @property
    def ratio(self) -> float:
        return self.step_s / self.products_s

    @property
    def products_cost(self) -> float:
        """Of exactness: our products over the library's."""
        return self.products_s / self.library_s

    @property
    def chunks_cost(self) -> float:
        """Of exactness: the step over one with longer chunks."""
        return self.step_s / self.long_chunks_s


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
    """Step time of a family of each size in `sizes`, and the times it is compared with.

    The products are those of the model's own packed linears, one call each. Raises ValueError for a bad folder.
    """
    config = EngineConfig(model_folder=str(folder), prefix_cache=False)
    tokens = prompt_len + steps + UNCOUNTED
    runners = []
    for size in (config.block_size, config.block_size * LONG_CHUNKS):
        sized = replace(config, block_size=size, kv_blocks=2 + max(sizes) * (2 + tokens // size))
        runners.append((sized, ModelRunner(sized, Communicator())))
    model = runners[0][1].model
    return [_measure([Engine(*runner) for runner in runners], model, n, prompt_len, steps, clock) for n in sizes]


def linears(model: CausalLM) -> list[PackedLinear]:
    """Every linear a decoding step runs, in its order."""
    layers = [layer.weights() for layer in model.layers]
    return [*(part for w in layers for part in (w.qkv, w.out, w.gate_up, w.down)), model.head]


def _measure(engines: Sequence[Engine], model: CausalLM, n: int, prompt_len: int, steps: int, clock: Clock) -> StepTime:
    prompt = [1 + place % (engines[0].vocab_size - 1) for place in range(prompt_len)]
    for engine in engines:
        engine.submit([_family(n, prompt, steps + UNCOUNTED + 1)])
        before = engine.stats()["generation_tokens_total"]
        while engine.stats()["generation_tokens_total"] < before + n:
            engine.step()
    ours, long_chunks = (engine.step for engine in engines)
    turns = (ours, _products(model, n, _own), _products(model, n, _library), long_chunks)
    times = [[_timed(turn, clock) for turn in turns] for _ in range(steps + UNCOUNTED)]
    return StepTime(n, *(statistics.median(each) for each in zip(*times[UNCOUNTED:], strict=True)))


def _family(n: int, prompt: Sequence[int], max_tokens: int) -> FamilyRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return FamilyRequest("floor", 0, tuple(prompt), tuple(ChildSpec(i, i) for i in range(n)), params, "floor")


Product = Callable[[torch.Tensor], object]


def _products(model: CausalLM, rows: int, product: Callable[[PackedLinear], Product]) -> Callable[[], object]:
    """A function that runs each linear of the model once on `rows` rows of random input."""
    pairs = [(product(linear), _random(rows, linear)) for linear in linears(model)]

    @torch.inference_mode()
    def run() -> None:
        for multiply, x in pairs:
            multiply(x)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def _own(linear: PackedLinear) -> Product:
    return linear


@torch.inference_mode()
def _library(linear: PackedLinear) -> Product:
    """A product of the same shape as torch computes it, with oneDNN's packed weights where there is oneDNN."""
    weight = torch.zeros(linear.out_features, linear.in_features, dtype=linear.dtype, device=linear.device)
    if linear.device.type != "cpu" or not torch._C._has_mkldnn:
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


def _random(rows: int, linear: PackedLinear) -> torch.Tensor:
    return torch.randn(rows, linear.in_features).to(linear.device, linear.dtype)


def _timed(function: Callable[[], object], clock: Clock) -> float:
    start = clock()
    function()
    return clock() - start


if __name__ == "__main__":
    print(json.dumps([asdict(entry) for entry in step_floor(sys.argv[1])]))
