"""The engine alone in this process, as a group has it: what the speed of the whole system is held against."""

import os
import sys
import time
from collections.abc import Sequence

from cluster.placement import RANK_ENVIRONMENT
from workers import checkpoint
from workers.config import EngineConfig
from workers.engine import Engine
from workers.model_runner import ModelRunner
from workers.outputs import FamilyRequest
from workers.tensor_parallel import Communicator


def run_like_a_rank(module: str) -> None:
    """Begin the program again with a rank's environment, which its libraries read when they are loaded."""
    if RANK_ENVIRONMENT.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | RANK_ENVIRONMENT)


class EngineAlone:
    """Nothing looks at what it makes."""

    def __init__(self) -> None:
        self._config = EngineConfig(model_folder=str(checkpoint.resolve(None)))
        self._runner = ModelRunner(self._config, Communicator())

    def speed(self, families: Sequence[FamilyRequest]) -> float:
        """Tokens per second with all families queued at once."""
        started = time.monotonic()
        engine = Engine(self._config, self._runner)
        engine.submit(families)
        while engine.has_work:
            engine.step()
        return engine.scheduler.counters.generation_tokens / (time.monotonic() - started)
