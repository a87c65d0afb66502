"""Which implementation of the kernels serves a device: C++ on CPU, Triton on CUDA, else the reference.

The only place that looks at CHORAL_KERNELS (`reference` forces the reference). Everything else in this
package asks `cpu_kernels` or `triton_kernels`; the server logs `implementation`.
"""

import importlib
import os
from functools import cache
from typing import Any

import torch

from kernels.cpu import loader


def _forced() -> bool:
    """Whether the environment asks for the reference."""
    choice = os.environ.get("CHORAL_KERNELS", "")
    if choice not in ("", "reference"):
        raise ValueError(f"CHORAL_KERNELS must be 'reference' or unset, not {choice!r}")
    return choice == "reference"


@cache
def _built() -> tuple[Any, str]:
    """The C++ operators and a line about them, or None and the reason."""
    if _forced():
        return None, "torch reference (CHORAL_KERNELS=reference)"
    try:
        operators = loader.load()
    except loader.BuildError as error:
        return None, f"torch reference (no C++ kernels: {error})"
    return operators, f"cpu C++ kernels ({operators.instruction_set()})"


@cache
def _compiled() -> tuple[Any, str]:
    """The Triton kernels and a line about them, or None and the reason. One small kernel is run to know."""
    if _forced():
        return None, "torch reference (CHORAL_KERNELS=reference)"
    try:
        kernels = importlib.import_module("kernels.triton")
        kernels.rms_norm(torch.ones(1, 16, device="cuda"), torch.ones(16, device="cuda"), 1.0)
    except Exception as error:  # whatever a missing driver, compiler or package raises, the reference can serve
        cause = (str(error) or repr(error)).splitlines()[0]
        return None, f"torch reference (no Triton kernels: {cause})"
    version = importlib.import_module("triton").__version__
    return kernels, f"Triton {version} kernels ({torch.cuda.get_device_name()})"


def cpu_kernels(device: torch.device) -> Any:
    """The namespace of C++ operators for tensors on `device`, None where another implementation must do."""
    return _built()[0] if device.type == "cpu" else None


def triton_kernels(device: torch.device) -> Any:
    """The package of Triton kernels for tensors on `device`, None where another implementation must do."""
    return _compiled()[0] if device.type == "cuda" else None


def implementation(device: torch.device | str) -> str:
    """One line for the log: what computes the kernels on `device`, and why if it is not the fast way."""
    kind = torch.device(device).type
    if kind == "cpu":
        return _built()[1]
    return _compiled()[1] if kind == "cuda" else f"torch reference ({kind})"
