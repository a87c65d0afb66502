"""Fixtures every test may use: tiny random checkpoints of each architecture, and the embedded model's folder."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Before anything imports torch or transformers, here and in the processes tests start.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Test helpers are imported as `tests.<name>`, whatever directory pytest is started from.
sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the random checkpoint called so in `tests.tiny_models`, written by transformers once."""
    from tests import tiny_models

    root = tmp_path_factory.mktemp("checkpoints")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            tiny_models.write(name, root / name)
        return root / name

    return folder


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The folder of the embedded model; fetched and converted on the first use of a machine."""
    from workers import checkpoint

    return checkpoint.resolve(None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the Triton kernels on the CPU: Triton looks at the environment also when an interpreted kernel is called."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
