"""A captured step, padded and interpreted on the CPU: the rows of the step as without padding, no other key touched."""

from dataclasses import replace

import pytest
import torch

from kernels import ops
from kernels.split_plan import SplitPlan
from tests import triton_interpreter
from workers.cuda_graphs import Bucket, StepBuffer
from workers.step_input import StepInput

triton_kernels = triton_interpreter.load()
pytestmark = pytest.mark.usefixtures("interpreted")

BLOCK = 16


def test_padding_changes_no_row_and_writes_no_key():
    tables = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10], [11] + [0] * 8])
    lens = torch.tensor([130, 133, 9])
    slots = tables[torch.arange(3), (lens - 1) // BLOCK] * BLOCK + (lens - 1) % BLOCK
    copies = torch.zeros(0, 2, dtype=torch.int64)
    step = StepInput(torch.arange(3), lens - 1, slots, torch.arange(4), lens, tables, copies, torch.arange(3))
    bucket = Bucket.of(step, BLOCK)
    assert bucket is not None
    buffer = StepBuffer(bucket, torch.device("cpu"))
    buffer.fill(step)
    plan = SplitPlan.build(step.query_starts, lens, tables, BLOCK, True)
    plain = ops.AttentionBatch(step.query_starts, lens, tables, step.positions, slots, (), plan)

    kv = ops.KVCache.allocate(1, 12, 1, 16, BLOCK, torch.float32, "cpu")
    kv.k.normal_()
    kv.v.normal_()
    heads = torch.randn(16, 4, 16)
    results = []
    for batch, count in ((plain, 3), (buffer.batch, 16)):
        cache = replace(kv, k=kv.k.clone(), v=kv.v.clone())
        q, k, v = heads[:count].split([2, 1, 1], 1)
        q = triton_kernels.rope_and_cache(q, k, v, ops.rope_tables(torch.ones(8), 140), batch, cache, 0)
        results.append((triton_kernels.attention(q, batch, cache, 0, 0.25)[:3], cache.k, cache.v))
    assert all(torch.equal(padded, alone) for padded, alone in zip(*results, strict=True))
