"""A server outlives its parts: what ran on one that is killed ends with an error, and the next request is answered."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.system.conftest import Server, serve
from tests.system.requests import choices, complete, stream

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REQUEST = {"n": 2, "logprobs": 0, "seed": 5}
BACK_S = 60


@pytest.fixture(scope="module")
def mortal(embedded_model: Path) -> Iterator[Server]:
    """A server of this module's own."""
    with serve("--tp", "2") as server:
        yield server


def kill(server: Server, title: str) -> None:
    parts = psutil.Process(server.process.pid).children(recursive=True)
    (victim,) = [part.pid for part in parts if " ".join(part.cmdline()).startswith(title)]
    os.kill(victim, signal.SIGKILL)


def answer(server: Server) -> list:
    """The answer of a server that may be away for a while."""
    deadline = time.monotonic() + BACK_S
    while True:
        with suppress(httpx.TransportError, AssertionError):
            return choices(complete(server.url, **REQUEST))
        assert time.monotonic() < deadline and server.process.poll() is None
        time.sleep(0.2)


@pytest.mark.parametrize(
    "title",
    [
        "ray::AggregatorActor",
        "ray::ServeReplica:choral:router",
        "ray::RankWorker",
        "ray::ServeReplica:choral:groups",
    ],
)
def test_a_server_goes_on_without_a_part_of_it(mortal: Server, title: str):
    before = answer(mortal)
    events = stream(mortal.url, n=2, max_tokens=2000, ignore_eos=True)
    next(events)
    kill(mortal, title)
    with suppress(httpx.TransportError):
        assert "error" in list(events)[-1]
    assert answer(mortal) == before
    mortal.wait_until_idle()
