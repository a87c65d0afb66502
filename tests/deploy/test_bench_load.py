import itertools
import json
import statistics

import pytest

from deploy.bench_load import WARM_UP, Grid, Workload

AXES = {
    "prompt_len": [5],
    "n": [2],
    "parents": [3],
    "max_tokens": [4],
    "top_p": [1.0],
    "logprobs": [None],
    "temperature": [1.0],
    "prefix": ["cold"],
}


def workload(seed=1, extra=None, **axes):
    return Workload(rows=Grid(**{**AXES, **axes}).rows(), repeat=2, seed=seed, vocab_size=10**6, extra=extra or {})


def all_prompts(load, number, repetitions=(WARM_UP, 0, 1)):
    return [tuple(load.prompt(number, repetition, parent)) for repetition in repetitions for parent in range(3)]


def test_every_combination_is_a_row_and_the_first_axis_changes_slowest():
    rows = Grid(**{**AXES, "prompt_len": [5, 6], "n": [1, 8], "logprobs": [None, 5], "prefix": ["cold", "warm"]}).rows()
    assert [(row.prompt_len, row.n, row.logprobs, row.prefix) for row in rows] == [
        (length, n, logprobs, prefix)
        for length in (5, 6)
        for n in (1, 8)
        for logprobs in (None, 5)
        for prefix in ("cold", "warm")
    ]
    assert {(row.parents, row.rate, row.requests) for row in rows} == {(3, None, 3)}


def test_a_rate_takes_the_place_of_parents_and_needs_requests():
    rows = Grid(**AXES, rate=[0.5, 2.0], requests=7).rows()
    assert [(row.parents, row.rate, row.requests) for row in rows] == [(None, 0.5, 7), (None, 2.0, 7)]
    with pytest.raises(ValueError, match="requests"):
        Grid(**AXES, rate=[1.0]).rows()


def test_cold_prompts_are_all_different_and_come_from_the_seed():
    load = workload(n=[1, 2])
    prompts = all_prompts(load, 0) + all_prompts(load, 1)
    assert len(set(prompts)) == len(prompts) == 18
    assert prompts == all_prompts(workload(n=[1, 2]), 0) + all_prompts(workload(n=[1, 2]), 1)
    assert not set(prompts) & set(all_prompts(workload(seed=2), 0))
    assert {len(prompt) for prompt in prompts} == {5}


def test_warm_prompts_are_the_one_of_the_warm_up():
    load = workload(prefix=["cold", "warm"])
    assert len(set(all_prompts(load, 1))) == 1
    assert not set(all_prompts(load, 1)) & set(all_prompts(load, 0))


def test_prompts_stay_within_the_vocabulary():
    small = Workload(rows=Grid(**{**AXES, "prompt_len": [500]}).rows(), repeat=1, seed=0, vocab_size=3)
    assert set(small.prompt(0, 0, 0)) == {0, 1, 2}


def test_arrivals_are_seeded_differ_by_repetition_and_have_the_rate():
    load = workload(rate=[4.0], requests=4000)
    first, second = load.arrivals(0, 0), load.arrivals(0, 1)
    assert first == workload(rate=[4.0], requests=4000).arrivals(0, 0)
    assert first != second
    assert first == sorted(first)
    gaps = [b - a for a, b in itertools.pairwise(first)]
    # Of 4000 exponential gaps both mean and deviation are within 10 % of 1/4: six standard errors.
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)
    assert workload().arrivals(0, 0) is None


def test_bodies_hold_the_row_and_one_prompt_each():
    load = workload(logprobs=[5], top_p=[0.95], extra={"top_k": 0})
    bodies = [json.loads(body) for body in load.bodies(0, 1, "tiny")]
    assert [body.pop("prompt") for body in bodies] == [load.prompt(0, 1, parent) for parent in range(3)]
    assert bodies == 3 * [
        {
            "model": "tiny", "n": 2, "max_tokens": 4, "temperature": 1.0, "top_p": 0.95, "logprobs": 5, "top_k": 0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True,
        }
    ]  # fmt: skip
    assert len(load.bodies(0, WARM_UP, "tiny")) == 1
    with pytest.raises(ValueError, match="sets n"):
        workload(extra={"n": 3}).bodies(0, 0, "tiny")


def test_eos_and_logprobs_are_left_out_when_not_asked_for():
    load = Workload(rows=Grid(**AXES).rows(), repeat=1, seed=0, vocab_size=9, ignore_eos=False)
    assert not json.loads(load.bodies(0, 0, "tiny")[0]).keys() & {"ignore_eos", "logprobs"}
