"""Messages between processes of one user: whole, in order, and not to anybody else."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from workers import local_socket
from workers.local_socket import Streams, connect, listen, receive, send


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            send(writer, await receive(reader))
            await writer.drain()
    except EOFError:
        pass


@asynccontextmanager
async def connection() -> AsyncIterator[Streams]:
    server, address = await listen(echo)
    reader, writer = await connect(address)
    yield reader, writer
    writer.close()
    server.close()
    await server.wait_closed()


def test_messages_of_any_size_come_whole_and_in_order() -> None:
    messages = [b"", "text", {"a": [1, 2]}, bytes(5_000_000), None]

    async def run() -> list[object]:
        async with connection() as (reader, writer):
            for message in messages:
                send(writer, message)
            return [await receive(reader) for _ in messages]

    assert asyncio.run(run()) == messages


def test_an_address_nobody_listens_at_says_so() -> None:
    async def run() -> None:
        server, address = await listen(echo)
        server.close()
        await server.wait_closed()
        with pytest.raises(OSError):
            await connect(address)

    asyncio.run(run())


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server, address = await listen(echo)
        own = local_socket.os.getuid()
        monkeypatch.setattr(local_socket.os, "getuid", lambda: own + 1)
        with pytest.raises(PermissionError):
            await connect(address)
        server.close()

    asyncio.run(run())


def test_a_server_hangs_up_on_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server, address = await listen(echo)
        monkeypatch.setattr(local_socket, "_own", lambda writer: False)
        reader, writer = await asyncio.open_unix_connection(address)
        send(writer, "hello")
        with pytest.raises((EOFError, ConnectionError)):
            await receive(reader)
        writer.close()
        server.close()

    asyncio.run(run())
