"""Which implementation of the kernels serves a device: C++ on CPU where it can be built, else the reference.

The only place that looks at CHORAL_KERNELS (`reference` forces the reference). Everything else in this
package asks `cpu_kernels`; the server logs `implementation`.
"""

import os
from functools import cache
from typing import Any

import torch

from kernels.cpu import loader


@cache
def _built() -> tuple[Any, str]:
    """The C++ operators and a line about them, or None and the reason."""
    choice = os.environ.get("CHORAL_KERNELS", "")
    if choice not in ("", "reference"):
        raise ValueError(f"CHORAL_KERNELS must be 'reference' or unset, not {choice!r}")
    if choice == "reference":
        return None, "torch reference (CHORAL_KERNELS=reference)"
    try:
        operators = loader.load()
    except loader.BuildError as error:
        return None, f"torch reference (no C++ kernels: {error})"
    return operators, f"cpu C++ kernels ({operators.instruction_set()})"


def cpu_kernels(device: torch.device) -> Any:
    """The namespace of C++ operators for tensors on `device`, None where the reference must do."""
    return _built()[0] if device.type == "cpu" else None


def implementation(device: torch.device | str) -> str:
    """One line for the log: what computes the kernels on `device`, and why if it is not the fast way."""
    kind = torch.device(device).type
    return _built()[1] if kind == "cpu" else f"torch reference ({kind})"
