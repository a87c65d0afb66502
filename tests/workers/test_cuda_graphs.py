"""Buckets and buffers of captured steps, without a GPU: what is accepted, how it is padded, and what padding does."""

from dataclasses import fields

import pytest
import torch

from tests.workers.test_scheduler import family, run_step, scheduler
from workers.cuda_graphs import FEWEST, MOST_ROWS, Bucket, StepBuffer
from workers.step_input import StepInput

CPU = torch.device("cpu")
BLOCK = 16


def decoding(children: int, prompt: int = 40) -> StepInput:
    """The first step in which all children of a family compute one token."""
    s = scheduler(max_step_tokens=512)
    s.add(family("p", prompt, children))
    run_step(s)
    return StepInput.build(run_step(s), BLOCK)


def test_only_plain_decoding_has_a_bucket():
    s = scheduler(max_step_tokens=64)
    s.add(family("p", 40, 3))
    prefill = StepInput.build(run_step(s), BLOCK)
    assert Bucket.of(prefill, BLOCK) is None
    assert Bucket.of(StepInput.build(run_step(s), BLOCK), BLOCK) == Bucket(FEWEST, FEWEST, BLOCK)
    s.add(family("q", 5, 1))
    assert Bucket.of(StepInput.build(run_step(s), BLOCK), BLOCK) is None


def test_a_row_that_is_only_recomputed_has_no_bucket():
    step = decoding(3)
    values = {f.name: getattr(step, f.name) for f in fields(StepInput)}
    assert Bucket.of(StepInput(**{**values, "logit_rows": step.logit_rows[:2]}), BLOCK) is None


def sized(rows: int, blocks: int) -> StepInput:
    ones = torch.ones(rows, dtype=torch.int64)
    tables = torch.zeros(rows, blocks, dtype=torch.int64)
    starts = torch.arange(rows + 1)
    return StepInput(ones, ones, ones, starts, ones, tables, torch.zeros(0, 2, dtype=torch.int64), starts[:-1])


@pytest.mark.parametrize(
    ("rows", "blocks", "wanted"), [(1, 1, (16, 16)), (16, 17, (16, 32)), (17, 64, (32, 64)), (512, 65, (512, 128))]
)
def test_sizes_are_rounded_up_to_powers_of_two(rows: int, blocks: int, wanted: tuple[int, int]):
    bucket = Bucket.of(sized(rows, blocks), BLOCK)
    assert bucket is not None and (bucket.rows, bucket.blocks) == wanted


def test_what_is_too_large_has_no_bucket():
    assert Bucket.of(sized(MOST_ROWS + 1, 1), BLOCK) is None
    assert Bucket.of(sized(256, 4096), BLOCK) is None


def test_a_buffer_holds_the_step_and_padding_that_does_nothing():
    step = decoding(3)
    bucket = Bucket.of(step, BLOCK)
    assert bucket is not None
    buffer = StepBuffer(bucket, CPU)
    buffer.fill(decoding(5, prompt=200))  # what it held before must not show
    buffer.fill(step)
    batch, plan = buffer.batch, buffer.batch.split
    assert plan is not None
    assert buffer.token_ids.tolist() == step.token_ids.tolist() + [0] * 13
    assert batch.positions.tolist() == step.positions.tolist() + [0] * 13
    assert batch.slots.tolist() == step.slots.tolist() + [-1] * 13
    assert torch.equal(batch.block_tables[:3, : step.block_tables.shape[1]].long(), step.block_tables)
    assert plan.count.tolist() == [3] and plan.items[:3].tolist() == [[i, 1, i, 0, 1] for i in range(3)]
    assert plan.states.tolist() == [0, 1, 2] + [3] * 14
    assert plan.num_states == bucket.states >= 3
