"""Drawing tokens: noise, distributions, filters, penalties, log-probabilities, and draws that never look at each
other. Every property is checked for the C++ sampler and for the reference."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kernels import ops, reference_sampler

EMPTY = torch.zeros(0, dtype=torch.int32)
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


def lists(entries: list[list[int]]) -> tuple[Tensor, Tensor]:
    starts = torch.tensor([0, *[len(e) for e in entries]]).cumsum(0).int()
    return starts, torch.tensor([i for e in entries for i in e], dtype=torch.int32)


def batch(count: int, **changes: object) -> ops.SampleBatch:
    """`count` draws from rows 0.., sample numbers 0.., temperature 1; a change is one value for all, or a tensor."""
    starts = torch.zeros(count + 1, dtype=torch.int32)
    values: dict[str, object] = {
        "rows": torch.arange(count), "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "seed": torch.full((count,), 7), "prompt_number": torch.zeros(count, dtype=torch.int64),
        "sample": torch.arange(count), "position": torch.full((count,), 3), "num_logprobs": -1,
        "repetition": 1.0, "presence": 0.0, "frequency": 0.0,
        "seen_starts": starts, "seen_ids": EMPTY, "seen_counts": EMPTY,
        "bias_starts": starts, "bias_ids": EMPTY, "bias_values": torch.zeros(0),
        "banned_starts": starts, "banned_ids": EMPTY, "allowed_starts": starts, "allowed_ids": EMPTY,
    }  # fmt: skip
    values |= changes
    for name, value in values.items():
        if not isinstance(value, Tensor):
            dtype = torch.float32 if name in FLOATS else torch.int32
            values[name] = torch.full((count,), value, dtype=dtype)
    return ops.SampleBatch(**values)


def many(count: int, logits: Tensor, **changes: object) -> Tensor:
    """`count` tokens drawn from one row of logits."""
    return ops.sample(logits[None], batch(count, rows=torch.zeros(count, dtype=torch.int64), **changes)).tokens


def noise(rows: int, size: int, scale: float = 2.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(rows, size, generator=torch.Generator().manual_seed(rows + size)) * scale).to(dtype)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str):
    """The known-answer vectors that the authors of Philox publish with Random123."""
    words = [[torch.tensor([int(w, 16)]) for w in part.split()] for part in (counter, key)]
    assert [f"{int(x):08x}" for x in reference_sampler.philox(*words)] == expected.split()


def test_uniform_is_even_and_each_argument_matters():
    count = 40000
    base = [torch.full((count,), v) for v in (-5, 1, 2, 3)]
    streams = []
    for argument in range(4):
        changed = [x.clone() for x in base]
        changed[argument] = torch.arange(count) * (2**33 if argument == 0 else 1)
        streams.append(ops.uniform(*changed))
    for u in streams:
        assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
        cells = torch.histc(u.float(), 20, 0, 1)
        assert ((cells - count / 20) ** 2 / (count / 20)).sum() < 50.8  # 19 degrees of freedom, p = 1e-4
    assert torch.stack(streams).corrcoef().sub(torch.eye(4)).abs().max() < 0.03


def test_a_draw_is_the_inverse_cdf_at_its_uniform_number(kernels: str):
    size = 3000
    keys = batch(200, rows=torch.zeros(200, dtype=torch.int64), seed=torch.arange(200) * 2**40 - 2**46)
    u = ops.uniform(keys.seed, keys.prompt_number, keys.sample, keys.position)
    tokens = ops.sample(torch.zeros(1, size), keys).tokens
    assert torch.equal(tokens, (u * size).long())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_frequencies_follow_the_softmax(kernels: str, temperature: float):
    logits = noise(1, 16, dtype=torch.float32)[0]
    count = 20000 if kernels == "native" else 2000
    seen = many(count, logits, temperature=temperature).bincount(minlength=16)
    expected = torch.softmax(logits.double() / temperature, 0) * count
    likely = expected >= 5
    rest = [(seen[~likely].sum() - expected[~likely].sum()) ** 2 / expected[~likely].sum().clamp(min=1)]
    statistic = ((seen - expected) ** 2 / expected)[likely].sum() + rest[0]
    assert statistic < 44.3  # 15 degrees of freedom, p = 1e-4


def kept(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that survive the filters, from a plain sorted list."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        order = [i for i in order if logits[i] >= logits[order[min(top_k, len(order)) - 1]]]
    mass = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total, running, last = sum(mass), 0.0, order[-1]
    for i, m in zip(order, mass, strict=True):
        running += m
        if running >= top_p * total:
            last = i
            break
    return {i for i, m in zip(order, mass, strict=True) if logits[i] >= logits[last] and m >= min_p}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1.0, 0.0), (4, 1.0, 0.0), (99, 1.0, 0.0), (0, 0.6, 0.0), (0, 0.01, 0.0), (0, 1.0, 0.3), (6, 0.7, 0.15)],
)
@pytest.mark.parametrize("logits", [[0, 1, 2, 1, 3, 2, 2, -1, 0.5, 3], [1] * 10, [5, 0, 0, 0, 0, 0, 0, 0, 0, 4]])
def test_filters_keep_what_a_sorted_list_keeps(
    kernels: str, logits: list[float], top_k: int, top_p: float, min_p: float
):
    """Also ties: all tokens at the threshold stay. 500 draws miss a kept token of mass 0.03 once in 4 million."""
    wanted = kept(logits, top_k, top_p, min_p)
    flat = torch.tensor(logits, dtype=torch.float32) / 2  # temperature 0.5 below undoes the halving
    drawn = set(many(500, flat, temperature=0.5, top_k=top_k, top_p=top_p, min_p=min_p).tolist())
    likely = {i for i in wanted if math.exp(logits[i]) > 0.03 * sum(math.exp(logits[j]) for j in wanted)}
    assert likely <= drawn <= wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_native_draws_what_the_reference_draws(dtype: torch.dtype, scale: float):
    """All filters over a large vocabulary with many ties."""
    if ops.cpu_kernels(torch.device("cpu")) is None:
        pytest.skip(ops.implementation("cpu"))
    logits = noise(24, 5003, scale, dtype)
    generator = torch.Generator().manual_seed(1)
    draws = batch(
        24,
        temperature=torch.rand(24, generator=generator) * 1.9 + 0.1,
        top_k=torch.tensor([0, 1, 5, 40, 3000, 9999] * 4, dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.95, 0.5, 0.999] * 6),
        min_p=torch.tensor([0.0, 0.0, 0.1] * 8),
        num_logprobs=torch.tensor([-1, 0, 5, 20] * 6, dtype=torch.int32),
    )
    got, wanted = ops.sample(logits, draws), reference_sampler.sample(logits, draws)
    assert torch.equal(got.tokens, wanted.tokens)
    assert torch.equal(got.top_ids, wanted.top_ids)
    torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got.top_logprobs, wanted.top_logprobs, rtol=1e-6, atol=1e-5)


def test_greedy_takes_the_lowest_of_equal_ids(kernels: str):
    logits = noise(3, 700)
    logits[0, [650, 13, 400]] = 50.0
    logits[1] = 0.0
    logits[2, 699] = 99.0
    assert ops.sample(logits, batch(3, temperature=0.0)).tokens.tolist() == [13, 0, 699]


def test_penalties(kernels: str):
    """Greedy choice among few tokens, each near the value at which it loses to the next."""
    logits = torch.tensor([[4.0, 3.0, -1.0, 0.0, 2.5]])
    seen_ids, counts = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    seen = {"seen_starts": starts, "seen_ids": seen_ids, "seen_counts": counts, "temperature": 0.0}

    def greedy(row: Tensor = logits, **changes: float) -> int:
        return int(ops.sample(row, batch(1, **seen, **changes)).tokens)

    assert greedy() == 0
    assert greedy(repetition=1.3) == 0 and greedy(repetition=1.7) == 4  # 4 / 1.7 < 2.5, 3 / 1.7 < 2.5
    assert greedy(presence=0.9) == 0 and greedy(presence=1.1) == 1  # token 1 is only in the prompt
    assert greedy(frequency=0.45) == 0 and greedy(frequency=0.55) == 1  # counted twice
    assert greedy(-logits.abs() - 1, repetition=1.9) == 3 and greedy(-logits.abs() - 1, repetition=2.1) == 2
    assert greedy(torch.tensor([[-1.0, -9.0, -1.2, -9.0, -9.0]]), repetition=1.3) == 2


def test_bias_bans_and_allowed_ids(kernels: str):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(4, 1)
    bias_starts, bias_ids = lists([[0], [], [], [3, 2]])
    banned_starts, banned_ids = lists([[], [3], [2], [3]])
    allowed_starts, allowed_ids = lists([[], [], [1, 2], [0, 2, 3]])
    got = ops.sample(
        logits,
        batch(
            4, temperature=0.0,
            bias_starts=bias_starts, bias_ids=bias_ids, bias_values=torch.tensor([3.5, 100.0, -2.5]),
            banned_starts=banned_starts, banned_ids=banned_ids,
            allowed_starts=allowed_starts, allowed_ids=allowed_ids,
        ),
    )  # fmt: skip
    assert got.tokens.tolist() == [0, 2, 1, 0]


def test_allowed_ids_bound_every_draw(kernels: str):
    starts = torch.arange(201, dtype=torch.int32) * 3
    ids = torch.tensor([5, 1999, 7], dtype=torch.int32).repeat(200)
    tokens = many(200, torch.zeros(2000), allowed_starts=starts, allowed_ids=ids, top_p=0.9)
    assert set(tokens.tolist()) == {5, 7, 1999}


def test_logprobs_are_of_the_raw_logits(kernels: str):
    logits = noise(6, 1500, 3.0)
    logits[2, 100:105] = logits[2].max() + 1  # ties: lower ids first
    starts = torch.arange(7, dtype=torch.int32)
    got = ops.sample(
        logits,
        batch(6, temperature=0.7, top_k=8, num_logprobs=torch.tensor([4, 0, 4, 20, 1, -1], dtype=torch.int32),
              banned_starts=starts, banned_ids=logits.float().argmax(1).int()),
    )  # fmt: skip
    exact = torch.log_softmax(logits.double(), 1)
    for draw, count in enumerate([4, 0, 4, 20, 1]):
        assert got.logprobs[draw] == pytest.approx(float(exact[draw, got.tokens[draw]]), abs=1e-5)
        values, order = logits[draw].float().sort(descending=True, stable=True)
        assert got.top_ids[draw, :count].tolist() == order[:count].tolist()
        assert got.top_logprobs[draw, :count].tolist() == pytest.approx(exact[draw, order[:count]].tolist(), abs=1e-5)
        assert (got.top_ids[draw, count:] == -1).all()
        assert values[0] > logits[draw, got.tokens[draw]] or draw == 2


def test_a_draw_without_choice_is_marked_and_harms_no_other(kernels: str):
    logits = noise(4, 64)
    logits[1] = float("nan")
    logits[3, 5] = float("nan")
    allowed_starts, allowed_ids = lists([[], [], [9], []])
    banned_starts, banned_ids = lists([[], [], [9], []])
    for temperature in (0.0, 1.0):
        same = batch(4, temperature=temperature)
        changed = dataclasses.replace(
            same, allowed_starts=allowed_starts, allowed_ids=allowed_ids,
            banned_starts=banned_starts, banned_ids=banned_ids,
        )  # fmt: skip
        assert ops.sample(logits, changed).tokens[1:].tolist() == [-1, -1, -1]
        unharmed = ops.sample(logits[:1], batch(1, temperature=temperature))
        assert ops.sample(logits, changed).tokens[0] == unharmed.tokens[0]


def test_ids_outside_the_vocabulary_are_refused(kernels: str):
    banned_starts, banned_ids = lists([[64]])
    with pytest.raises((RuntimeError, IndexError)):
        ops.sample(noise(1, 64), batch(1, banned_starts=banned_starts, banned_ids=banned_ids))


def test_an_error_in_one_of_many_draws_is_raised_and_is_over_then(kernels: str):
    torch.set_num_threads(2)
    logits = noise(1, 2100)
    expected = many(40, logits[0])
    starts, ids = lists([[]] * 17 + [[2100]] + [[]] * 22)
    for _ in range(20):
        with pytest.raises((RuntimeError, IndexError)):
            many(40, logits[0], banned_starts=starts, banned_ids=ids)
        assert torch.equal(many(40, logits[0]), expected)


def test_c2_draws_do_not_depend_on_each_other(kernels: str):
    logits = noise(12, 2100)
    settings = {
        "temperature": torch.tensor([0.0, 1.0, 0.8] * 4),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 1.0] * 3),
        "top_k": torch.tensor([0, 0, 50] * 4, dtype=torch.int32),
        "min_p": torch.tensor([0.0, 0.01] * 6),
        "num_logprobs": torch.tensor([0, 3, -1, 5] * 3, dtype=torch.int32),
        "sample": torch.arange(12),
    }
    whole = ops.sample(logits, batch(12, **settings))
    for count in (1, 2):
        torch.set_num_threads(count)
        for order in ([4], [0, 11, 5], list(range(11, -1, -1)), [3, 3, 3]):
            part = {name: value[order] for name, value in settings.items()}
            rows, where = torch.tensor(order).unique(return_inverse=True)
            got = ops.sample(logits[rows], batch(len(order), rows=where, **part))
            assert torch.equal(got.tokens, whole.tokens[order])
            assert torch.equal(got.logprobs, whole.logprobs[order])
            width = got.top_ids.shape[1]
            assert torch.equal(got.top_ids, whole.top_ids[order][:, :width])
            assert torch.equal(got.top_logprobs, whole.top_logprobs[order][:, :width])


def mixed(count: int) -> ops.SampleBatch:
    """Draws of which every one has its own of everything, two from each row of logits."""
    seen_starts, seen_ids = lists([[5, 9] * (i % 3) for i in range(count)])
    bias_starts, bias_ids = lists([[i] * (i % 2) for i in range(count)])
    banned_starts, banned_ids = lists([[3] * (i % 4 == 1) for i in range(count)])
    allowed_starts, allowed_ids = lists([list(range(50)) * (i % 5 == 4) for i in range(count)])
    return batch(
        count,
        rows=torch.arange(count) // 2, top_k=torch.arange(count).int() % 4 * 10,
        top_p=1 - torch.arange(count) % 2 / 7, temperature=torch.arange(count) % 3 / 2 + 0.25,
        num_logprobs=torch.arange(count).int() % 5 - 1, repetition=1.25, frequency=0.5,
        seen_starts=seen_starts, seen_ids=seen_ids, seen_counts=torch.ones(len(seen_ids), dtype=torch.int32),
        bias_starts=bias_starts, bias_ids=bias_ids, bias_values=-torch.rand(len(bias_ids)) / 3,
        banned_starts=banned_starts, banned_ids=banned_ids, allowed_starts=allowed_starts, allowed_ids=allowed_ids,
    )  # fmt: skip


def equal(a: object, b: object) -> bool:
    """Whether two batches or results have the same fields, in data type and bits."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in a.__slots__]
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


def test_draws_and_results_survive_packing(kernels: str):
    whole, logits = mixed(11), noise(6, 300)
    assert equal(ops.SampleBatch.unpack(whole.pack()), whole)
    result = ops.sample(logits, whole)
    assert equal(ops.SampleResult.unpack(result.pack(result.top_ids.shape[1])), result)
    assert torch.equal(ops.SampleResult.unpack(result.pack(7)).top_ids[:, 3:], torch.full((11, 4), -1))


def test_c2_a_part_of_the_draws_on_a_part_of_the_rows_draws_the_same(kernels: str):
    whole, logits = mixed(11), noise(6, 300)
    expected = ops.sample(logits, whole).pack(5)
    for first, last in ((0, 11), (0, 4), (3, 8), (10, 11), (4, 4)):
        row = first // 2
        assert torch.equal(ops.sample(logits[row:], whole.part(first, last, row)).pack(5), expected[first:last])
