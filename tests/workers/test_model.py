"""The heart: logits and greedy tokens equal transformers' for every architecture, at every group size."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from kernels import ops
from tests.dense import CPU, Job, OneSequence, Result, run_job, run_jobs
from tests.ranks import run_ranks
from tests.tiny_models import MODELS
from workers.loader import load_model
from workers.tensor_parallel import Communicator

STEPS = 64
NAMES = list(MODELS)


def _job(folder: Path, *, exact: bool = True) -> Job:
    # Longer than the original context of the scaled RoPEs, and no multiple of the chunk or of a block.
    prompt = tuple(random.Random(folder.name).choices(range(323), k=101))
    return Job(folder=str(folder), dtype=torch.float32, exact=exact, prompt=prompt, chunk=37, steps=STEPS)


def _group_steps(name: str) -> int:
    """One model decodes as far as alone; a step of a group costs a thousand times its arithmetic in such models."""
    return STEPS if name == "qwen3" else 12


def _same_steps(whole: Result, result: Result) -> Result:
    """As much of `whole` as there is of `result`."""
    return Result(whole.logits[: len(result.logits)], whole.tokens[: len(result.tokens)])


@pytest.fixture(scope="session")
def alone(tiny_checkpoint):
    """Results of one rank, by model name."""
    return {name: run_job(Communicator(), _job(tiny_checkpoint(name))) for name in NAMES}


@pytest.fixture(scope="session", params=[2, 3])
def group(request, tiny_checkpoint, tmp_path_factory):
    """Results [rank] of a group of two and of three, by (model name, exact)."""
    keys = [(name, exact) for name in NAMES for exact in (True, False)]
    jobs = [
        dataclasses.replace(_job(tiny_checkpoint(name), exact=exact), steps=_group_steps(name)) for name, exact in keys
    ]
    ranks = run_ranks(run_jobs, request.param, jobs, folder=tmp_path_factory.mktemp("group"))
    return {key: [results[index] for results in ranks] for index, key in enumerate(keys)}


def _transformers(folder: Path, result: Result, prompt: tuple[int, ...]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([prompt + result.tokens[:-1]])).logits[0]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_transformers(name, alone, tiny_checkpoint):
    folder, result = tiny_checkpoint(name), alone[name]
    job = _job(folder)
    expected = _transformers(folder, result, job.prompt)
    assert expected.std() > 0.5
    torch.testing.assert_close(result.logits, expected, atol=1e-4, rtol=1e-4)
    assert result.tokens == tuple(expected[len(job.prompt) - 1 :].argmax(-1).tolist())


@pytest.mark.parametrize("name", NAMES)
def test_c2_an_exact_group_gives_the_bits_of_one_rank(name, alone, group):
    for result in group[name, True]:
        expected = _same_steps(alone[name], result)
        assert torch.equal(result.logits, expected.logits)
        assert result.tokens == expected.tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_row_parallel_group_gives_the_logits_of_one_rank(name, alone, group):
    for result in group[name, False]:
        expected = _same_steps(alone[name], result)
        torch.testing.assert_close(result.logits, expected.logits, atol=1e-3, rtol=1e-3)
        assert result.tokens == expected.tokens


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_of_a_row_parallel_group_sees_the_same_bits(name, group):
    first, *others = group[name, False]
    assert all(torch.equal(first.logits, other.logits) for other in others)


@pytest.fixture(scope="session")
def embedded_jobs(embedded_model) -> dict[torch.dtype, Job]:
    text = "Here is a list of the planets of the solar system, each with one sentence about it:\n\n1. Mercury"
    prompt = tuple(Tokenizer.from_file(str(embedded_model / "tokenizer.json")).encode(text).ids)
    return {
        dtype: Job(folder=str(embedded_model), dtype=dtype, exact=True, prompt=prompt, chunk=16, steps=12)
        for dtype in (torch.float32, torch.bfloat16)
    }


def test_the_embedded_model_gives_the_logits_of_transformers(embedded_model, embedded_jobs):
    job = embedded_jobs[torch.float32]
    result = run_job(Communicator(), job)
    expected = _transformers(embedded_model, result, job.prompt)
    torch.testing.assert_close(result.logits, expected, atol=1e-3, rtol=1e-3)
    assert result.tokens == tuple(expected[len(job.prompt) - 1 :].argmax(-1).tolist())


@pytest.mark.parametrize("size", [2, 3])
def test_c2_the_embedded_model_in_bfloat16_has_the_same_bits_at_every_group_size(size, embedded_jobs, tmp_path):
    job = embedded_jobs[torch.bfloat16]
    alone = run_job(Communicator(), job)
    assert len(set(alone.tokens)) > 3
    for (result,) in run_ranks(run_jobs, size, [job], folder=tmp_path):
        assert torch.equal(result.logits, alone.logits)
        assert result.tokens == alone.tokens


@pytest.mark.skipif("C++" not in ops.implementation("cpu"), reason="only the C++ kernels run all layers as one")
@pytest.mark.parametrize("name", NAMES)
def test_all_layers_as_one_operator_give_the_bits_of_the_layers_in_turn(name, tiny_checkpoint):
    job = _job(tiny_checkpoint(name))
    model = load_model(job.folder, dtype=job.dtype, device=CPU, comm=Communicator(), exact=True)
    assert model.stack is not None
    as_one = OneSequence(model, 128).feed(job.prompt)
    model.stack = None
    assert torch.equal(OneSequence(model, 128).feed(job.prompt), as_one)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [[], [0], [3, 7], list(range(10))])
def test_rows_that_are_left_out_change_no_bit_of_the_others(name, rows, tiny_checkpoint):
    job = _job(tiny_checkpoint(name))
    model = load_model(job.folder, dtype=job.dtype, device=CPU, comm=Communicator(), exact=True)
    wanted = torch.tensor(rows, dtype=torch.int64)
    all_rows, some_rows = (OneSequence(model, 128) for _ in range(2))
    whole = all_rows.feed(job.prompt)
    assert torch.equal(some_rows.feed(job.prompt, wanted), whole[wanted])
    assert torch.equal(some_rows.kv.k, all_rows.kv.k) and torch.equal(some_rows.kv.v, all_rows.kv.v)


def test_chunks_of_the_prompt_change_no_bit(tiny_checkpoint, alone):
    job = _job(tiny_checkpoint("qwen3"))
    whole = dataclasses.replace(job, chunk=len(job.prompt), steps=4)
    assert torch.equal(run_job(Communicator(), whole).logits, alone["qwen3"].logits[: len(job.prompt) + 4])
