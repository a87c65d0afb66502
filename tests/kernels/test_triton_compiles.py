"""Every Triton kernel compiles for a Hopper GPU in bfloat16, which no interpreter can check, and fits its memory."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path: Path):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    program = Path(__file__).parents[1] / "triton_compiler.py"
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {
        "_partials", "_merge", "_rope_and_cache", "_copy_blocks", "_rms_norm", "_silu_mul", "_pick", "_report"
    }  # fmt: skip
    assert all(matrix == "wgmma" for name, _, _, matrix in lines if name == "_partials")
