"""A process that runs the batches of a folder over the toy engine until all have ended; to be killed by a test.

`python -m tests.router.batch_process FOLDER MODEL_FOLDER STEP_S`
"""

import asyncio
import sys
from pathlib import Path

from router.batch_executor import BatchExecutor
from router.batch_store import BatchStore
from router.file_store import FileStore
from router.limits import RouterLimits
from router.serving import Serving
from tests.router.batch_site import FAST
from tests.router.toy_engine import ToyEngine


async def run(folder: Path, engine: ToyEngine) -> None:
    batches = BatchStore(folder / "batches")
    files = FileStore(folder / "files", 1 << 20)
    executor = BatchExecutor(Serving.load(engine, RouterLimits(batch_children=5)), files, batches, timing=FAST)
    executor.start()
    print("started", flush=True)
    while batches.unfinished():
        await asyncio.sleep(0.02)
    await executor.stop()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), ToyEngine(Path(sys.argv[2]), step_s=float(sys.argv[3]))))
