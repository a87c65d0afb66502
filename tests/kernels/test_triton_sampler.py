"""The Triton sampler, interpreted on the CPU: the draws of the reference, with every filter, list and penalty."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels import ops, reference_sampler
from tests import triton_interpreter
from tests.kernels.test_sampler import batch, lists, noise

triton_kernels = triton_interpreter.load()
pytestmark = pytest.mark.usefixtures("interpreted")


def same(logits: Tensor, draws: ops.SampleBatch) -> ops.SampleResult:
    """What the kernels draw, after a look that the reference draws the same."""
    got, wanted = triton_kernels.sample(logits, draws), reference_sampler.sample(logits, draws)
    assert torch.equal(got.tokens, wanted.tokens)
    assert torch.equal(got.top_ids, wanted.top_ids)
    torch.testing.assert_close(got.logprobs, wanted.logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.top_logprobs, wanted.top_logprobs, rtol=0, atol=1e-5)
    return got


@pytest.mark.parametrize(("scale", "dtype"), [(0.0, torch.float32), (0.3, torch.float16), (3.0, torch.float32)])
def test_draws_are_those_of_the_reference(dtype: torch.dtype, scale: float):
    """All filters over a vocabulary of more than one block, with many ties."""
    generator = torch.Generator().manual_seed(1)
    draws = batch(
        12,
        temperature=torch.rand(12, generator=generator) * 1.9 + 0.1,
        top_k=torch.tensor([0, 1, 5, 40, 3000, 9999] * 2, dtype=torch.int32),
        top_p=torch.tensor([1.0, 0.95, 0.5, 0.999] * 3),
        min_p=torch.tensor([0.0, 0.0, 0.1] * 4),
        num_logprobs=torch.tensor([-1, 0, 5, 2] * 3, dtype=torch.int32),
    )
    same(noise(12, 5003, scale, dtype), draws)


def test_noise_has_the_bits_of_the_reference():
    """Over equal logits the token is the uniform number cut to the vocabulary: 15 of its bits show."""
    size = 2**15
    keys = batch(
        6, rows=torch.zeros(6, dtype=torch.int64),
        seed=torch.tensor([-5, 2**40 - 1, -(2**62), 3, 3, 3]), prompt_number=torch.tensor([0, 1, 2**31, 3, 3, 3]),
        sample=torch.tensor([9, 2**31 + 7, 0, 4, 5, 4]), position=torch.tensor([0, 1, 2, 3, 3, 4]),
    )  # fmt: skip
    u = ops.uniform(keys.seed, keys.prompt_number, keys.sample, keys.position)
    assert torch.equal(triton_kernels.sample(torch.zeros(1, size), keys).tokens, (u * size).long())


def test_greedy_takes_the_first_of_the_best():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-0.0, 0.0, -1.0, 0.0], [float("-inf")] * 3 + [-9.0]])
    assert same(logits, batch(3, temperature=0.0)).tokens.tolist() == [1, 0, 3]


def test_lists_and_penalties_are_those_of_the_reference():
    logits = noise(6, 50, 3.0, torch.float32)
    seen_starts, seen_ids = lists([[0, 1, 2, 3, 4], [], [7], [1, 2], [0, 49], []])
    bias_starts, bias_ids = lists([[], [9], [7, 8], [], [3], []])
    banned_starts, banned_ids = lists([[5], [], [], [1, 2, 3], [], []])
    allowed_starts, allowed_ids = lists([[], [], [7, 8], [1, 2, 3, 4], [], []])
    changes = {
        "seen_starts": seen_starts, "seen_ids": seen_ids, "seen_counts": torch.arange(10, dtype=torch.int32) % 3,
        "bias_starts": bias_starts, "bias_ids": bias_ids, "bias_values": torch.tensor([30.0, -1.0, 2.0, 0.5]),
        "banned_starts": banned_starts, "banned_ids": banned_ids,
        "allowed_starts": allowed_starts, "allowed_ids": allowed_ids,
        "repetition": 1.3, "presence": 0.4, "frequency": 0.2, "num_logprobs": 1,
    }  # fmt: skip
    for temperature in (0.0, 0.7):
        got = same(logits, batch(6, temperature=temperature, **changes))
        assert got.tokens[1] == 9 and got.tokens[3] == 4


def test_a_change_of_one_row_reaches_only_draws_that_name_it():
    """Draws of one row, in an order that is not that of the rows."""
    logits = noise(3, 40, 1.0, torch.float32)
    starts, ids = lists([[], [int(logits[2].argmax())], []])
    got = same(logits, batch(3, rows=torch.tensor([2, 2, 0]), temperature=0.0, banned_starts=starts, banned_ids=ids))
    assert got.tokens[0] == logits[2].argmax() and got.tokens[1] != got.tokens[0]


def test_a_draw_without_choice_is_marked_and_harms_no_other():
    logits = noise(4, 64, dtype=torch.float32)
    logits[1] = float("nan")
    logits[3, 5] = float("nan")
    starts, ids = lists([[], [], [9], []])
    for temperature in (0.0, 1.0):
        changed = batch(
            4, temperature=temperature, allowed_starts=starts, allowed_ids=ids, banned_starts=starts, banned_ids=ids
        )
        assert same(logits, changed).tokens[1:].tolist() == [-1, -1, -1]


def test_ids_outside_the_vocabulary_are_refused():
    for wrong in (64, -1):
        starts, ids = lists([[wrong]])
        with pytest.raises(IndexError, match=r"0\.\.63"):
            triton_kernels.sample(noise(1, 64), batch(1, banned_starts=starts, banned_ids=ids))


def test_more_logprobs_than_tokens():
    got = same(torch.tensor([[0.5, 1.5, 1.0]]), batch(1, num_logprobs=5))
    assert got.top_ids.tolist() == [[1, 2, 0, -1, -1]]


def test_c2_draws_do_not_depend_on_each_other():
    logits = noise(6, 300, dtype=torch.float32)
    settings = {
        "temperature": torch.tensor([0.0, 1.0, 0.8] * 2), "top_p": torch.tensor([1.0, 0.9, 0.5] * 2),
        "top_k": torch.tensor([0, 0, 50] * 2, dtype=torch.int32), "sample": torch.arange(6),
        "num_logprobs": torch.tensor([0, 3, -1] * 2, dtype=torch.int32),
    }  # fmt: skip
    whole = triton_kernels.sample(logits, batch(6, **settings))
    for order in ([4], [5, 0, 3], [3, 3]):
        part = batch(len(order), rows=torch.tensor(order), **{name: value[order] for name, value in settings.items()})
        got = triton_kernels.sample(logits, part)
        assert torch.equal(got.tokens, whole.tokens[order])
        assert torch.equal(got.logprobs, whole.logprobs[order])


def test_no_draw_at_all():
    none = dataclasses.replace(
        batch(1), **{f.name: getattr(batch(1), f.name)[:0] for f in dataclasses.fields(batch(1))}
    )
    starts = {name: torch.zeros(1, dtype=torch.int32) for name in ("seen_starts", "bias_starts", "banned_starts")}
    got = triton_kernels.sample(noise(1, 8), dataclasses.replace(none, **starts))
    assert got.tokens.shape == (0,) and got.top_ids.shape == (0, 0)
