"""The router's own HTTP server: it answers while its block runs, frees its address after it, and passes leaving on."""

import asyncio
import socket
from contextlib import suppress

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.http_server import listening

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_it_answers_inside_its_block_only_and_frees_the_address() -> None:
    port = free_port()

    async def run() -> None:
        for _ in range(2):
            async with listening(hello, HOST, port), httpx.AsyncClient() as client:
                assert (await client.get(f"http://{HOST}:{port}/")).text == "hello"
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient() as client:
                    await client.get(f"http://{HOST}:{port}/")

    asyncio.run(run())


def test_an_address_that_is_taken_is_an_error() -> None:
    async def run() -> None:
        with socket.create_server((HOST, 0)) as other, pytest.raises(OSError, match="in use"):
            async with listening(hello, HOST, other.getsockname()[1]):
                pass

    asyncio.run(run())


def test_the_app_hears_of_a_client_that_leaves() -> None:
    port = free_port()
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def run() -> None:
        async with listening(app, HOST, port), httpx.AsyncClient() as client:
            with suppress(httpx.ReadTimeout):
                async with client.stream("GET", f"http://{HOST}:{port}/") as reply:
                    await anext(reply.aiter_bytes())
            await asyncio.wait_for(left.wait(), 5)

    asyncio.run(run())
