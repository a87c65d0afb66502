"""Runs a function as the ranks of a real group: one process each, joined by gloo.

Run as a script it is one rank.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.tensor_parallel import Communicator, init_communicator, open_store

ROOT = Path(__file__).parents[1]


def run_ranks(
    function: Callable[..., Any], size: int, *arguments: Any, folder: Path, timeout_s: float = 60
) -> list[Any]:
    """`function(communicator, *arguments)` on every rank of a group; what each returned, in rank order.

    The function is found by name in its module. `timeout_s` is that of the collectives.
    """
    store = open_store("127.0.0.1", 0, is_host=True, timeout_s=timeout_s)
    (folder / "call").write_bytes(pickle.dumps((function, arguments, size, store.port, timeout_s)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ranks", str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, cwd=ROOT) for rank in range(size)]
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * size
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(size)]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    function, arguments, size, port, timeout_s = pickle.loads((folder / "call").read_bytes())
    store = open_store("127.0.0.1", port, is_host=False, timeout_s=timeout_s)
    comm: Communicator = init_communicator(rank, size, store, backend="gloo", timeout_s=timeout_s)
    (folder / f"result{rank}").write_bytes(pickle.dumps(function(comm, *arguments)))
    comm.close()


if __name__ == "__main__":
    main()
