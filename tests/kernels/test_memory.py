"""Memory of what stays: zeroed, apart from each other, on huge pages where the system grants them, given back."""

import gc
from pathlib import Path

import pytest
import torch

from kernels.implementation import cpu_kernels

native = cpu_kernels(torch.device("cpu"))
pytestmark = pytest.mark.skipif(native is None, reason="no C++ kernels")

MEBI = 2**20


def resident(field: str) -> int:
    """Bytes of this process of one kind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def test_tensors_are_zero_and_do_not_overlap():
    sizes = [(0, 3), (1,), (3, 5), (7, 1000), (2 * MEBI,), (5, MEBI), (16 * MEBI + 1,), (9, MEBI)]
    tensors = [native.lasting_zeros(size, dtype=torch.bfloat16) for size in sizes]
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True), start=1):
        assert tensor.shape == size and tensor.dtype == torch.bfloat16 and not tensor.any()
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, start=1))


def test_memory_is_given_back_with_its_last_tensor():
    before = resident("Rss")
    tensors = [native.lasting_zeros((MEBI,), dtype=torch.float32) for _ in range(64)]
    tensors.append(native.lasting_zeros((64 * MEBI,), dtype=torch.float32))
    assert resident("Rss") - before >= 512 * MEBI
    kept = tensors[0]
    del tensors
    gc.collect()
    assert resident("Rss") - before < 128 * MEBI
    assert not kept.any()


def test_it_lies_on_huge_pages():
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        pytest.skip("the system has no huge pages to give")
    before = resident("AnonHugePages")
    tensors = [native.lasting_zeros((MEBI,), dtype=torch.float32) for _ in range(32)]
    assert resident("AnonHugePages") - before >= 64 * MEBI
    del tensors
