"""Products shared by threads: all of it is computed, whoever does it and whoever else calls."""

import threading

import pytest
import torch

from kernels import ops

ROUNDS = 100


@pytest.fixture(autouse=True, params=[1, 2, 3, 8])
def threads(request: pytest.FixtureRequest):
    torch.set_num_threads(request.param)


def test_many_jobs_in_a_row_are_all_done():
    weight = torch.randn(960, 64)
    product, x = ops.PackedLinear(weight, None), torch.randn(3, 64)
    expected = product(x)
    assert all(torch.equal(product(x), expected) for _ in range(ROUNDS))


def test_callers_on_several_threads_do_not_disturb_each_other():
    inputs = [torch.randn(rows, 64) for rows in (1, 5, 40)]
    product = ops.PackedLinear(torch.randn(960, 64), None)
    expected = [product(x) for x in inputs]
    wrong: list[int] = []

    def call(index: int) -> None:
        for _ in range(ROUNDS):
            if not torch.equal(product(inputs[index]), expected[index]):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
