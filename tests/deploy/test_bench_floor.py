import itertools

import pytest
import torch
from safetensors import safe_open

from deploy.bench_floor import FloorError, StepTime, linears, measure_floor, step_floor
from workers.loader import load_model
from workers.tensor_parallel import Communicator


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased"])
def test_the_floor_multiplies_by_every_weight_of_the_model_once(name, tiny_checkpoint):
    folder = tiny_checkpoint(name)
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"), comm=Communicator(), exact=True)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        sizes = {key: file.get_tensor(key).numel() for key in list(file.keys()) if file.get_tensor(key).dim() == 2}
    untied = "lm_head.weight" in sizes
    expected = sum(size for key, size in sizes.items() if not (untied and "embed_tokens" in key))
    assert sum(linear.in_features * linear.out_features for linear in linears(model)) == expected


def test_steps_and_products_are_timed_apart_and_the_median_taken(tiny_checkpoint):
    # A step takes 3 and then 5, and so on: the last steps outweigh the first.
    durations = itertools.chain.from_iterable(((3, 1, 7, 9),) * 8 + ((5, 2, 4, 10),) * 200)
    moments = itertools.accumulate(itertools.chain.from_iterable((0, duration) for duration in durations))
    found = step_floor(tiny_checkpoint("llama"), (3,), prompt_len=20, steps=16, clock=lambda: float(next(moments)))
    assert found == [StepTime(3, 5.0, 2.0, 4.0, 10.0)]
    assert (found[0].ratio, found[0].products_cost, found[0].chunks_cost) == (2.5, 0.5, 0.5)


def test_it_runs_in_a_process_of_its_own(tiny_checkpoint):
    found = measure_floor(tiny_checkpoint("llama"))
    assert [at.n for at in found] == [8, 32]
    assert all(min(at.step_s, at.products_s, at.library_s, at.long_chunks_s) > 0 for at in found)


def test_what_goes_wrong_there_is_told(tmp_path):
    with pytest.raises(FloorError, match=r"config\.json"):
        measure_floor(tmp_path)
