"""The packed step arrives as it was sent, and its positions and slots are those of the block tables."""

from dataclasses import fields

import torch

from tests.workers.test_scheduler import family, run_step, scheduler
from workers.step_input import StepInput


def test_pack_and_unpack_are_inverse():
    s = scheduler()
    s.add(family("p", 40, 3))
    for _ in range(3):
        batch = run_step(s)
        step = StepInput.build(batch, 16)
        back = StepInput.unpack(step.pack())
        assert all(torch.equal(getattr(step, f.name), getattr(back, f.name)) for f in fields(StepInput))


def test_slots_point_into_the_blocks_of_each_sequence():
    s = scheduler(max_step_tokens=64)
    s.add(family("p", 20, 2))
    s.add(family("q", 5, 1))
    batch = s.schedule()
    step = StepInput.build(batch, 16)
    assert step.positions.tolist() == [*range(20), *range(5)]
    for chunk, begin in zip(batch.chunks, step.query_starts.tolist(), strict=False):
        for offset in range(chunk.count):
            position = chunk.start + offset
            expected = chunk.table.blocks[position // 16] * 16 + position % 16
            assert step.slots[begin + offset] == expected
    assert step.logit_rows.tolist() == [19, 24]
    assert step.context_lens.tolist() == [20, 5]
