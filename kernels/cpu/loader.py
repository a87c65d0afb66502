"""Builds the C++ operators on first use and loads them.

The library lies in $CHORAL_HOME/kernels (default ~/.cache/choral/kernels) under a name made from the sources, the
torch version and the processor, so a change of any of these builds anew. A file lock lets several processes start at
once. Called by `kernels.implementation` only, which falls back to the reference on `BuildError`.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_log = logging.getLogger(__name__)

_FLAGS = ["-O3", "-march=native", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-Wno-psabi"]


class BuildError(Exception):
    """The C++ operators cannot be built or loaded here; the message says why."""


def load() -> Any:
    """The namespace with the operators, built before if need be. Raises BuildError."""
    try:
        torch.ops.load_library(str(_library()))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise BuildError(str(error)) from error
    return torch.ops.choral


def _library() -> Path:
    folder = Path(os.environ.get("CHORAL_HOME", Path.home() / ".cache" / "choral")) / "kernels"
    sources = sorted(p for p in Path(__file__).parent.iterdir() if p.suffix in (".cpp", ".h"))
    target = folder / f"choral_kernels_{_fingerprint(sources)}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not target.exists():
                _build([str(p) for p in sources if p.suffix == ".cpp"], target)
    return target


def _fingerprint(sources: list[Path]) -> str:
    parts = [torch.__version__, sys.version, platform.machine(), _processor(), *_FLAGS]
    parts += [p.read_text() for p in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Model and instruction sets: what -march=native looks at."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(sources: list[str], target: Path) -> None:
    """Compile into a scratch folder, then move the library to its place in one step."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler found: {compiler}")
    from torch.utils import cpp_extension

    _log.info("building the C++ kernels for this processor, once, in %s; this takes about half a minute", target.parent)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch, _own_tools_on_path():
        try:
            cpp_extension.load(
                "choral_kernels",
                sources,
                extra_cflags=_FLAGS,
                extra_ldflags=["-fopenmp"],
                build_directory=scratch,
                is_python_module=False,
            )
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            raise BuildError(_cause(error)) from error
        (Path(scratch) / "choral_kernels.so").replace(target)
    _log.info("built the C++ kernels in %.0f s", time.monotonic() - started)


def _cause(error: Exception) -> str:
    """The one line of a build failure that says most."""
    lines = str(error).splitlines()
    return next((line for line in lines if "error:" in line), lines[0])


@contextmanager
def _own_tools_on_path() -> Iterator[None]:
    """Let the build find the ninja of this Python environment."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before
