"""The router's own HTTP server: it answers while its block runs, frees its address after it, and passes leaving on."""

import asyncio
import socket

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from router.http_server import listener, reserve, serving_on

HOST = "127.0.0.1"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_it_answers_inside_its_block_only_and_frees_the_address() -> None:
    async def run() -> None:
        port = 0
        for _ in range(2):
            listening = listener(HOST, port)
            port = listening.getsockname()[1]
            async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client:
                early = asyncio.create_task(client.get("/"))
                async with serving_on(listening, hello):
                    assert (await early).text == (await client.get("/")).text == "hello"
            with pytest.raises(httpx.ConnectError):
                async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client:
                    await client.get("/")

    asyncio.run(run())


def test_an_address_that_is_taken_is_named() -> None:
    with listener(HOST, 0) as other:
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on {HOST}:{port}"):
            listener(HOST, port)


def test_a_reserved_address_is_kept_for_one_who_knows() -> None:
    with reserve(HOST, 0) as reserved:
        port = reserved.getsockname()[1]
        for take in (listener, reserve):
            with pytest.raises(OSError, match=f"cannot listen on {HOST}:{port}"):
                take(HOST, port)
        for _ in range(2):
            with listener(HOST, port, reserved=True) as listening:
                assert listening.getsockname()[1] == port
                with pytest.raises(OSError, match="cannot listen"):
                    listener(HOST, port)
                with socket.create_connection((HOST, port)):
                    assert listening.accept()


def test_ipv6_addresses_are_understood() -> None:
    with listener("::1", 0) as six:
        assert six.getsockname()[0] == "::1"


def test_the_app_hears_of_a_client_that_leaves() -> None:
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async def run() -> None:
        listening = listener(HOST, 0)
        url = f"http://{HOST}:{listening.getsockname()[1]}/"
        async with serving_on(listening, app), httpx.AsyncClient() as client:
            async with client.stream("GET", url) as reply:
                await anext(reply.aiter_bytes())
            await asyncio.wait_for(left.wait(), 5)

    asyncio.run(run())


def test_a_reply_that_is_being_sent_at_the_end_is_finished() -> None:
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"be", "more_body": True})
        await go.wait()
        await send({"type": "http.response.body", "body": b"gun"})

    async def run() -> None:
        listening = listener(HOST, 0)
        url = f"http://{HOST}:{listening.getsockname()[1]}/"
        async with httpx.AsyncClient() as client:
            async with serving_on(listening, app):
                reply = asyncio.create_task(client.get(url))
                await asyncio.sleep(0.1)
                asyncio.get_running_loop().call_later(0.2, go.set)
            assert (await reply).text == "begun"

    asyncio.run(run())
