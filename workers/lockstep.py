"""A step on all ranks of a group: rank 0 says what to run and draw, the others make the same calls.

`Lead` is what rank 0's engine runs, `follow` the loop of every other rank. With one rank neither is needed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.ops import SampleBatch, SampleResult
from workers.model_runner import ModelRunner
from workers.plan_channel import PlanChannel
from workers.step_input import StepInput


class Lead:
    """Rank 0's `ModelRunner` together with those of the other ranks."""

    def __init__(self, runner: ModelRunner, channel: PlanChannel) -> None:
        self._runner, self._channel = runner, channel

    def run(self, step: StepInput, draws: Callable[[], SampleBatch]) -> SampleResult | None:
        """See `ModelRunner.run`."""
        packed = [step.pack()]
        if len(step.logit_rows):
            batch = draws()
            packed.append(batch.pack())
        self._channel.send(torch.cat([torch.tensor([len(packed[0])]), *packed]))
        return self._runner.run(step, lambda: batch)


def follow(runner: ModelRunner, channel: PlanChannel) -> None:
    """Run what rank 0 runs; returns when it says stop."""
    while (plan := channel.receive()) is not None:
        _run(runner, plan)


def _run(runner: ModelRunner, plan: Tensor) -> None:
    size = int(plan[0])
    step, draws = torch.split(plan[1:], [size, len(plan) - 1 - size])
    runner.run(StepInput.unpack(step), lambda: SampleBatch.unpack(draws))
