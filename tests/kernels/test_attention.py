"""Paged attention: values against dense attention in double precision, and the law that nothing but a row's own
sequence enters its bits: not the batch, not chunking, not shared blocks, not threads, not padding of tables."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import ops, reference


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int
    block: int
    dtype: torch.dtype


SHAPES = [
    Shape(9, 3, 64, 32, torch.bfloat16),
    Shape(4, 4, 8, 16, torch.float32),
    Shape(4, 2, 16, 4, torch.bfloat16),
    Shape(6, 1, 40, 5, torch.float32),
    Shape(2, 1, 128, 48, torch.float16),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}x{s.dim}b{s.block}{s.dtype}"[:20])


@dataclass(frozen=True)
class Text:
    """One sequence: the q, k, v of all its positions and the blocks it lies in."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.q)


def text(shape: Shape, length: int, seed: int, first_block: int) -> Text:
    generator = torch.Generator().manual_seed(seed)
    heads = shape.heads + 2 * shape.kv_heads
    matrix = torch.randn(length, heads, shape.dim, generator=generator).to(shape.dtype)
    count = -(-length // shape.block)
    q, k, v = matrix.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
    return Text(q, k, v, tuple(range(first_block, first_block + count)))


def cache(shape: Shape, blocks: int = 64) -> ops.KVCache:
    return ops.KVCache.allocate(2, blocks, shape.kv_heads, shape.dim, shape.block, shape.dtype, "cpu")


def step(kv: ops.KVCache, parts: list[tuple[Text, int, int]], padding: int = 0, share: bool = True) -> list[Tensor]:
    """Run the rows begin:end of every text in one batch; the outputs text by text."""
    starts = torch.tensor([0, *[end - begin for _, begin, end in parts]]).cumsum(0).int()
    tables = torch.zeros(len(parts), max(len(t.blocks) for t, _, _ in parts) + padding, dtype=torch.int32)
    for row, (t, _, _) in enumerate(parts):
        tables[row, : len(t.blocks)] = torch.tensor(t.blocks)
    positions = torch.cat([torch.arange(begin, end) for _, begin, end in parts])
    owner = torch.repeat_interleave(torch.arange(len(parts)), starts.diff())
    slots = tables[owner, positions // kv.block_size].long() * kv.block_size + positions % kv.block_size
    lens = torch.tensor([end for _, _, end in parts], dtype=torch.int32)
    batch = ops.AttentionBatch.build(starts, lens, tables, positions, slots, kv, share)
    dim = parts[0][0].q.shape[2]
    table = ops.rope_tables(10000.0 ** -(torch.arange(0, dim, 2) / dim), 512)
    q, k, v = (torch.cat([getattr(t, n)[begin:end] for t, begin, end in parts]) for n in ("q", "k", "v"))
    rotated = ops.rope_and_cache(q, k, v, table, batch, kv, 1)
    output = ops.attention(rotated, batch, kv, 1, dim**-0.5)
    return list(output.split(starts.diff().tolist()))


def alone(shape: Shape, t: Text) -> Tensor:
    """All rows of one text, prefilled as a whole and by itself."""
    return step(cache(shape), [(t, 0, len(t))])[0]


def dense(shape: Shape, t: Text) -> Tensor:
    table = ops.rope_tables(10000.0 ** -(torch.arange(0, shape.dim, 2) / shape.dim), 512)
    cos, sin = table[: len(t), None].chunk(2, -1)
    q, k = (reference._rotate(x, cos, sin).double().transpose(0, 1) for x in (t.q, t.k))
    k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 0) for x in (k, t.v.double().transpose(0, 1)))
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return output.transpose(0, 1).flatten(1)


@shapes
@pytest.mark.parametrize("length", [1, 2, 33, 100])
def test_values(kernels: str, shape: Shape, length: int):
    t = text(shape, length, seed=length, first_block=1)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 2e-6}[shape.dtype]
    torch.testing.assert_close(
        alone(shape, t).double(), dense(shape, t), rtol=tolerance, atol=tolerance, check_dtype=False
    )


def test_values_of_the_reference_by_matrix_products(monkeypatch: pytest.MonkeyPatch):
    shape = SHAPES[0]
    product = reference.attention
    monkeypatch.setattr(ops, "cpu_kernels", lambda device: None)
    t = text(shape, 70, seed=1, first_block=1)
    exact = alone(shape, t)
    monkeypatch.setattr(reference, "attention", lambda *args, **_: product(*args, exact=False))
    torch.testing.assert_close(alone(shape, t).float(), exact.float(), rtol=1e-2, atol=1e-2)


@shapes
def test_c2_chunks_of_a_prompt_do_not_show(kernels: str, shape: Shape):
    t = text(shape, 77, seed=1, first_block=3)
    whole = alone(shape, t)
    for chunks in ([1] * 77, [5, 1, 30, 41], [76, 1]):
        kv, done, outputs = cache(shape), 0, []
        for size in chunks:
            outputs += step(kv, [(t, done, done + size)])
            done += size
        assert torch.equal(torch.cat(outputs), whole)


@shapes
def test_c2_the_batch_does_not_show(kernels: str, shape: Shape):
    texts = [text(shape, n, seed=n, first_block=b) for n, b in ((3, 1), (64, 5), (1, 25), (50, 30), (20, 50))]
    expected = [alone(shape, t) for t in texts]
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        got = step(cache(shape), [(texts[i], 0, len(texts[i])) for i in order])
        assert all(torch.equal(o, expected[i]) for o, i in zip(got, order, strict=True))


@shapes
def test_c2_block_ids_and_table_padding_do_not_show(kernels: str, shape: Shape):
    t = text(shape, 40, seed=2, first_block=1)
    moved = Text(t.q, t.k, t.v, tuple(63 - 2 * i for i in range(len(t.blocks))))
    assert torch.equal(step(cache(shape), [(moved, 0, 40)], padding=9)[0], alone(shape, t))


def family(shape: Shape, prompt: int, children: int, first_block: int, seed: int, system: Text | None) -> list[Text]:
    """Siblings that share the full blocks of their prompt, and those of `system` that the prompt starts with."""
    head = text(shape, prompt, seed, first_block)
    blocks = head.blocks
    if system is not None:
        kept = len(system) // shape.block * shape.block
        head = Text(*(torch.cat([getattr(system, n)[:kept], getattr(head, n)[kept:]]) for n in "qkv"), blocks)
        blocks = (*system.blocks[: kept // shape.block], *blocks[kept // shape.block :])
    full = prompt // shape.block
    result = []
    for child in range(children):
        tail = text(shape, 9 + child, seed * 100 + child, first_block + len(blocks) + child * 8)
        joined = (torch.cat([getattr(head, n), getattr(tail, n)]) for n in "qkv")
        own = tuple(range(first_block + 20 + 16 * child, first_block + 36 + 16 * child))
        count = -(-(prompt + len(tail)) // shape.block)
        result.append(Text(*joined, (*blocks[:full], *own)[:count]))
    return result


@shapes
def test_c2_shared_blocks_do_not_show(kernels: str, shape: Shape):
    """Two families over one system prompt and a stranger, decoding together: bits as for each text by itself."""
    system = text(shape, 2 * shape.block, 99, first_block=1)
    prompt = 3 * shape.block + 2
    first = family(shape, prompt, 5, 10, 1, system)
    second = family(shape, prompt, 4, 200, 2, system)
    stranger = text(shape, 30, 3, first_block=400)
    texts = [*first, *second, stranger]
    expected = [alone(shape, Text(t.q, t.k, t.v, tuple(range(len(t.blocks))))) for t in texts]

    kv = cache(shape, 512)
    for t in texts:
        step(kv, [(t, 0, len(t) - 3)])
    for count, share in ((2, True), (1, True), (2, False), (1, False)):
        torch.set_num_threads(count)
        got = step(kv, [(t, len(t) - 3, len(t)) for t in texts], share=share)
        assert all(torch.equal(o, e[-3:]) for o, e in zip(got, expected, strict=True))


@shapes
def test_c2_threads_do_not_show_in_a_long_prompt(kernels: str, shape: Shape):
    t = text(shape, 150, seed=4, first_block=1)
    outputs = []
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs.append(alone(shape, t))
    assert torch.equal(*outputs)


@shapes
def test_positions_beyond_a_row_never_enter(kernels: str, shape: Shape):
    """Whatever lies in the rest of the last block, and in later positions, not-a-number included."""
    t = text(shape, 2 * shape.block + 3, seed=5, first_block=1)
    kv = cache(shape)
    kv.k.fill_(float("nan"))
    kv.v.fill_(float("nan"))
    assert torch.equal(step(kv, [(t, 0, len(t))])[0], alone(shape, t))


def test_sharing_is_planned_where_tables_agree():
    """The plan takes siblings through common blocks once: block visits fall from 4 x 5 to 4 + 4 x 1."""
    native = ops.cpu_kernels(torch.device("cpu"))
    if native is None:
        pytest.skip(ops.implementation("cpu"))
    tables = torch.tensor([[1, 2, 3, 4, 10 + i] for i in range(4)], dtype=torch.int32)
    starts, lens = torch.arange(5, dtype=torch.int32), torch.full((4,), 18, dtype=torch.int32)
    visits = []
    for share in (True, False):
        _, spans = native.attention_plan(starts, lens, tables, 4, 3, share)
        visits.append(int((spans[:, 4] - spans[:, 3]).sum()))
    assert visits == [4 + 4, 20]


def test_an_empty_batch(kernels: str):
    shape = SHAPES[0]
    kv = cache(shape)
    none = torch.zeros(0, dtype=torch.int64)
    batch = ops.AttentionBatch.build(
        torch.zeros(1, dtype=torch.int32), none.int(), torch.zeros(0, 1, dtype=torch.int32), none, none, kv
    )
    q = torch.zeros(0, shape.heads, shape.dim, dtype=shape.dtype)
    assert ops.attention(q, batch, kv, 0, 1.0).shape == (0, shape.heads * shape.dim)
