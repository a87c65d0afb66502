"""Split attention, interpreted on the CPU: values of the reference, and bits that nothing but a row's own sequence
enters: not sharing, not the batch, not chunked prompts, not block sizes, not what lies beyond a position."""

from dataclasses import replace

import pytest
import torch

from kernels import reference
from tests import triton_interpreter
from tests.paged import Bench, Shape, family, table

triton_kernels = triton_interpreter.load()
pytestmark = pytest.mark.usefixtures("interpreted")


PLAIN = Shape(3, 1, 16, 32)
SHAPES = [PLAIN, Shape(2, 2, 24, 5), Shape(5, 1, 16, 16, torch.float16)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}x{s.dim}b{s.block}")


@shapes
def test_values_are_those_of_the_reference(shape: Shape):
    bench = Bench(triton_kernels, shape)
    parts = [
        (1, 140, table(shape, 140, 1)),
        (7, 20, table(shape, 20, 30)),
        (1, 1, [40]),
        (18, 150, table(shape, 150, 9)),
    ]
    batch = bench.batch(parts)
    wanted = reference.attention(bench.queries[batch.positions], batch, bench.kv, 0, shape.dim**-0.5)
    tolerance = 2e-3 if shape.dtype == torch.float16 else 2e-6
    torch.testing.assert_close(torch.cat(bench.run(parts)), wanted, rtol=tolerance, atol=tolerance)


def test_c2_sharing_does_not_show():
    """Two whole chunks are shared by all; the interpreter visits them once, or once for each."""
    bench = Bench(triton_kernels, PLAIN)
    parts = family(PLAIN, 4, 256)
    assert torch.equal(torch.cat(bench.run(parts)), torch.cat(bench.run(parts, share=False)))


def test_c2_the_batch_does_not_show():
    bench = Bench(triton_kernels, PLAIN)
    parts = [*family(PLAIN, 3, 128), (5, 150, table(PLAIN, 150, 30)), (1, 33, table(PLAIN, 33, 50))]
    alone = [bench.run([part])[0] for part in parts]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        got = bench.run([parts[i] for i in order])
        assert all(torch.equal(o, alone[i]) for o, i in zip(got, order, strict=True))


@shapes
def test_c2_chunks_of_a_prompt_do_not_show(shape: Shape):
    """Rows computed one by one merge their chunks out of memory, rows of a prompt in registers."""
    bench = Bench(triton_kernels, shape)
    blocks = table(shape, 140, 1)
    whole = bench.run([(12, 134, blocks)])[0]
    for sizes in ([1, 2, 9], [11, 1]):
        done, outputs = 122, []
        for size in sizes:
            done += size
            outputs += bench.run([(size, done, blocks)])
        assert torch.equal(torch.cat(outputs), whole)


def test_c2_the_block_size_does_not_show():
    """The same keys and values in blocks of 16 and of 64."""
    small, large = Bench(triton_kernels, replace(PLAIN, block=16)), Bench(triton_kernels, replace(PLAIN, block=64))
    keys, values = torch.randn(256, 16), torch.randn(256, 16)
    for bench in (small, large):
        size = bench.kv.block_size
        bench.kv.k[0, : 256 // size, 0] = keys.view(-1, size, 16).transpose(1, 2)
        bench.kv.v[0, : 256 // size, 0] = values.view(-1, size, 16)
    assert torch.equal(small.run([(3, 200, list(range(16)))])[0], large.run([(3, 200, list(range(4)))])[0])


def test_positions_beyond_a_row_never_enter():
    clean, dirty = Bench(triton_kernels, PLAIN), Bench(triton_kernels, PLAIN)
    parts = [(1, 140, table(PLAIN, 140, 1)), (3, 50, table(PLAIN, 50, 20))]
    last = {parts[0][2][-1]: 140 % 32, parts[1][2][-1]: 50 % 32}
    for block in range(64):
        beyond = last.get(block, 32 if block in (*parts[0][2], *parts[1][2]) else 0)
        dirty.kv.k[:, block, :, :, beyond:] = float("nan")
        dirty.kv.v[:, block, :, beyond:] = float("nan")
    assert torch.equal(torch.cat(clean.run(parts)), torch.cat(dirty.run(parts)))


def test_rows_without_work_come_out_as_zeros():
    """As padding rows of a captured step do."""
    bench = Bench(triton_kernels, PLAIN)
    batch = bench.batch([(1, 40, [1, 2])])
    plan = batch.split
    assert plan is not None
    padded = replace(
        batch,
        positions=torch.tensor([39, 0, 0]),
        split=replace(
            plan,
            items=torch.cat([plan.items, torch.ones(4, 5, dtype=torch.int32)]),
            states=torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        ),
    )
    got = triton_kernels.attention(bench.queries[[39, 0, 0]], padded, bench.kv, 0, 0.25)
    assert torch.equal(got[0], bench.run([(1, 40, [1, 2])])[0][0]) and not got[1:].any()


def test_a_batch_without_a_plan_is_refused():
    bench = Bench(triton_kernels, PLAIN)
    batch = replace(bench.batch([(1, 40, [1, 2])]), split=None)
    with pytest.raises(ValueError, match="split plan"):
        triton_kernels.attention(bench.queries[:1], batch, bench.kv, 0, 0.25)
