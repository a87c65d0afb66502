"""Runs a test once per implementation of the kernels, and offers the batches several test modules need."""

from collections.abc import Iterator

import pytest
import torch

from kernels import implementation, ops


@pytest.fixture(autouse=True)
def quiet_inference() -> Iterator[None]:
    """Inference mode, and one thread unless the test sets more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of the implementation that `kernels.ops` uses in this test."""
    if request.param == "reference":
        monkeypatch.setenv("CHORAL_KERNELS", "reference")
    else:
        monkeypatch.delenv("CHORAL_KERNELS", raising=False)
    implementation._built.cache_clear()
    if request.param == "native" and implementation.cpu_kernels(torch.device("cpu")) is None:
        pytest.skip(ops.implementation("cpu"))
    yield request.param
    implementation._built.cache_clear()
