"""What serves CUDA tensors: Triton kernels where they run, else the reference with the reason in the log line."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kernels import implementation, ops

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CHORAL_KERNELS", raising=False)
    implementation._compiled.cache_clear()
    yield
    implementation._compiled.cache_clear()


def test_without_triton_the_reference_runs_and_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "kernels.triton", None)
    assert implementation.triton_kernels(CUDA) is None
    assert ops.implementation("cuda").startswith("torch reference (no Triton kernels: ")


def test_kernels_that_do_not_run_are_not_used(monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> None:
        raise RuntimeError("no driver\nand a long story")

    monkeypatch.setitem(sys.modules, "kernels.triton", SimpleNamespace(rms_norm=fails))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    assert implementation.triton_kernels(CUDA) is None
    assert ops.implementation("cuda") == "torch reference (no Triton kernels: no driver)"


def test_kernels_that_run_serve_cuda_and_nothing_else(monkeypatch: pytest.MonkeyPatch):
    kernels = SimpleNamespace(rms_norm=lambda *_: None)
    monkeypatch.setitem(sys.modules, "kernels.triton", kernels)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="1.2"))
    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Chip")
    assert implementation.triton_kernels(CUDA) is kernels
    assert implementation.triton_kernels(torch.device("cpu")) is None
    assert ops.implementation("cuda") == "Triton 1.2 kernels (Chip)"


def test_the_reference_can_be_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CHORAL_KERNELS", "reference")
    assert ops.implementation("cuda") == "torch reference (CHORAL_KERNELS=reference)"
    assert implementation.triton_kernels(CUDA) is None
