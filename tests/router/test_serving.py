"""Clients that leave, in every phase and every way: the engine's work stops and the slots come back."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from router.app import create_app
from router.engine import GenerationError, NoHealthyGroupError
from router.limits import RouterLimits
from tests.router.conftest import wait_for
from tests.router.toy_engine import ToyEngine

BODY = {"prompt": "Hello", "n": 4, "max_tokens": 300, "ignore_eos": True}


def in_use(client: TestClient) -> int:
    lines = client.get("/metrics").text.splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith("choral_admission_children_in_use ")]
    return int(value)


def raw_request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hang_at", [None, 0, 3])
def test_closing_the_socket_stops_the_work(
    server_port: int, engine: ToyEngine, client: TestClient, stream: bool, hang_at: int | None
) -> None:
    engine.step_s, engine.hang_at = 0.005, hang_at
    with socket.create_connection(("127.0.0.1", server_port)) as connection:
        connection.sendall(raw_request({**BODY, "stream": stream}))
        if stream and hang_at != 0:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        wait_for(lambda: engine.running == 1)
        assert in_use(client) == 4
    wait_for(lambda: engine.running == 0 and in_use(client) == 0, seconds=2)


class Exchange:
    """One request at the ASGI level, whose client can be silent, gone, or impossible to write to."""

    def __init__(self, app: FastAPI, body: dict[str, Any]) -> None:
        self._app = app
        self._body = json.dumps(body).encode()
        self._asked = False
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.broken_after: int | None = None

    async def receive(self) -> dict[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.broken_after is not None and len(self.sent) >= self.broken_after:
            raise OSError("broken pipe")
        self.sent.append(message)

    async def run(self, spec: str = "2.4") -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec},
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        await self._app(scope, self.receive, self.send)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


Leaving = Callable[[Exchange, "asyncio.Task[None]"], Awaitable[None]]


async def cancelled(exchange: Exchange, task: "asyncio.Task[None]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def disconnected(exchange: Exchange, task: "asyncio.Task[None]") -> None:
    exchange.gone.set()
    await task


async def unwritable(exchange: Exchange, task: "asyncio.Task[None]") -> None:
    exchange.broken_after = len(exchange.sent)
    await task


PHASES = [(leave, stream, at) for leave in (cancelled, disconnected) for stream in (False, True) for at in (None, 0, 3)]


@pytest.mark.parametrize(("leave", "stream", "hang_at"), [*PHASES, (unwritable, True, None)])
def test_leaving_at_the_asgi_level_stops_the_work(
    app: FastAPI, engine: ToyEngine, client: TestClient, leave: Leaving, stream: bool, hang_at: int | None
) -> None:
    engine.step_s, engine.hang_at = 0.001, hang_at

    async def scenario() -> None:
        exchange = Exchange(app, {**BODY, "stream": stream})
        task = asyncio.create_task(exchange.run())
        await until(lambda: engine.running == 1)
        await leave(exchange, task)
        assert engine.running == 0
        assert not any(b"error" in message.get("body", b"") for message in exchange.sent)

    asyncio.run(scenario())
    assert in_use(client) == 0


def test_a_storm_of_cancellations_leaves_nothing(app: FastAPI, engine: ToyEngine, client: TestClient) -> None:
    engine.step_s = 0.001

    async def one(number: int) -> None:
        exchange = Exchange(app, {**BODY, "max_tokens": 3, "stream": number % 2 == 0})
        task = asyncio.create_task(exchange.run())
        await asyncio.sleep(0.0005 * (number % 23))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def storm() -> None:
        await asyncio.gather(*(one(number) for number in range(200)))

    asyncio.run(storm())
    assert engine.running == 0
    assert in_use(client) == 0
    assert client.post("/v1/completions", json={**BODY, "n": 64, "max_tokens": 1}).status_code == 200


ERRORS = [
    (NoHealthyGroupError("starting"), 503, "overloaded"),
    (GenerationError("the group was lost"), 500, "generation_failed"),
    (RuntimeError("a bug at /home/me"), 500, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), ERRORS)
def test_an_engine_that_refuses_is_a_status(
    client: TestClient, engine: ToyEngine, error: Exception, status: int, code: str, stream: bool
) -> None:
    engine.start_error = error
    response = client.post("/v1/completions", json={**BODY, "stream": stream}, headers={"x-request-id": "mine"})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.headers["x-request-id"] == "mine"
    assert ("retry-after" in response.headers) == (status == 503)
    assert (response.headers.get("x-should-retry") == "false") == (status == 500)
    assert "/home" not in response.text
    assert in_use(client) == 0


@pytest.mark.parametrize("knob", [{"lose": {2}}, {"fail": {2: 1}}])
def test_a_short_reply_is_an_error_never_a_short_list(
    client: TestClient, engine: ToyEngine, knob: dict[str, Any]
) -> None:
    vars(engine).update(knob)
    response = client.post("/v1/completions", json={**BODY, "max_tokens": 3})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "generation_failed"
    assert response.headers["x-should-retry"] == "false"
    if "fail" in knob:
        assert "choice 2" in response.json()["error"]["message"]


def test_families_beyond_the_free_slots_wait_outside(engine: ToyEngine, model_folder: Any) -> None:
    engine.hang_at = 0
    app = create_app(engine, RouterLimits(max_n=8, max_children=10))

    async def scenario() -> None:
        first = Exchange(app, {**BODY, "n": 8})
        task = asyncio.create_task(first.run())
        await until(lambda: engine.running == 1)
        second = Exchange(app, {**BODY, "n": 3})
        await second.run()
        assert second.sent[0]["status"] == 429
        assert int(dict(second.sent[0]["headers"])[b"retry-after"]) >= 1
        assert json.loads(second.sent[1]["body"])["error"]["type"] == "rate_limit_error"
        engine.hang_at = None
        third = Exchange(app, {**BODY, "n": 2, "max_tokens": 1})
        await third.run()
        assert third.sent[0]["status"] == 200
        await disconnected(first, task)
        again = Exchange(app, {**BODY, "n": 8, "max_tokens": 1})
        await again.run()
        assert again.sent[0]["status"] == 200

    asyncio.run(scenario())


def test_a_family_that_can_never_fit_is_a_bad_request(client: TestClient, engine: ToyEngine) -> None:
    response = client.post("/v1/completions", json={"prompt": ["a", "b"], "n": 51})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"
    assert engine.parents == []
