"""The Triton kernels on the CPU, through Triton's interpreter.

Triton decides while it is imported whether to interpret, so this must be its first import in a process. Modules of
tests call `load` at their top, where pytest collects them, and lie in `tests/kernels`, which comes before the tests
that import models of transformers and with them Triton. Nothing else here uses it on a machine without a GPU.
"""

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from unittest import mock

import pytest
import torch


def load() -> ModuleType:
    """The package `kernels.triton`, interpreted; skips the calling module where that cannot be."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed", allow_module_level=True)
    if torch.cuda.is_available():
        pytest.skip("here the Triton kernels run on the GPU: see tests/gpu", allow_module_level=True)
    if "triton" in sys.modules and "kernels.triton" not in sys.modules:
        raise RuntimeError("Triton was imported before its interpreter could be chosen: put tests/kernels first")
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return importlib.import_module("kernels.triton")
