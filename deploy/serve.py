"""The `choral serve` command, and the cluster that a command starts and stops around its work.

Called by the CLI with parsed arguments; Ray is imported only when a cluster is really started.
"""

import argparse
import contextlib
import ctypes
import json
import logging
import shlex
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from cluster.config import ClusterConfig
from deploy.errors import CommandError
from deploy.options import cluster_config

if TYPE_CHECKING:
    from deploy.app import RunningCluster


def run_serve(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM, then drain. A second one passes through and stops at once.

    Raises OptionError before anything is started, CommandError when the cluster cannot start or dies.
    """
    with running_cluster(cluster_config(args)) as cluster:
        print(f"Ready: {cluster.url}\n\n{example(cluster.url, cluster.model_name)}\n", flush=True)
        try:
            cluster.wait(say)
        except KeyboardInterrupt:
            say("Draining: no new requests, running ones finish. Ctrl-C again stops at once.")
            cluster.drain()
            return 0
    raise CommandError("the cluster stopped on its own; its log says why")


@contextlib.contextmanager
def running_cluster(config: ClusterConfig) -> Iterator["RunningCluster"]:
    """A cluster that is ready to answer, stopped on the way out. Raises CommandError when it cannot start."""
    if config.device == "cuda" and config.address is None and not _gpus():
        raise CommandError("device is cuda, but this machine has no GPU that its NVIDIA driver offers")
    from deploy.app import StartError, start

    logging.basicConfig(format="%(message)s")
    for package in ("workers", "kernels"):
        logging.getLogger(package).setLevel(logging.INFO)  # converting a model and building kernels take a while
    try:
        cluster = start(config, say=say)
    except StartError as error:
        raise CommandError(str(error)) from error
    with cluster:
        yield cluster


def _gpus() -> int:
    """How many GPUs the driver offers this process. Asks the driver itself, because importing torch takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value


def interrupt_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def example(url: str, model: str) -> str:
    """A request to paste into a shell: one chat question, four samples."""
    message = {"role": "user", "content": "Name a colour and say why you like it."}
    body = {"model": model, "messages": [message], "n": 4, "max_tokens": 64}
    header = "-H 'Content-Type: application/json'"
    return f"curl -s {url}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}"


def say(line: str) -> None:
    """Progress for people; results alone go to stdout."""
    print(line, file=sys.stderr, flush=True)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
