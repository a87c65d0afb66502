"""The toy engine, an HTTP client on an app around it, and the same app behind a real server."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from router.app import create_app
from router.limits import RouterLimits
from tests.router.toy_engine import ToyEngine, write_model_folder

if TYPE_CHECKING:
    from tests.router.batch_site import Site


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def shared_engine(model_folder: Path) -> ToyEngine:
    return ToyEngine(model_folder)


@pytest.fixture
def engine(shared_engine: ToyEngine) -> ToyEngine:
    """The engine behind `app`, all knobs back at their defaults."""
    vars(shared_engine).update(vars(ToyEngine(shared_engine.folder)))
    return shared_engine


@pytest.fixture(scope="session")
def app(shared_engine: ToyEngine) -> FastAPI:
    limits = RouterLimits(max_n=64, max_children=100, max_prompts=50, max_body_bytes=50_000, keep_alive_s=0.05)
    return create_app(shared_engine, limits)


@pytest.fixture
def client(app: FastAPI, engine: ToyEngine) -> TestClient:
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture(scope="session")
def server_port(app: FastAPI) -> Iterator[int]:
    """The port of a real server that runs the app in a thread; take `engine` too, to have it reset."""
    with _running(app) as port:
        yield port


class _running:
    def __init__(self, app: FastAPI) -> None:
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> int:
        self._thread.start()
        wait_for(lambda: self._server.started)
        port: int = self._socket.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Return as soon as `condition` holds; fail when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@pytest.fixture
def site(tmp_path: Path, engine: ToyEngine) -> "Site":
    """Files and batches of one test."""
    from tests.router.batch_site import Site

    return Site(tmp_path / "files", engine)
