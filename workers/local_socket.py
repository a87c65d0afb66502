"""Messages between processes of one user on one host: pickles over a Unix socket that leaves no file behind.

A Ray call costs a millisecond of processor time on either side, a message here a tenth. Addresses are Linux's abstract
ones, and both sides refuse another user's process: messages are pickles. Used by `local_calls`.
"""

import asyncio
import os
import pickle
import secrets
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

_LENGTH = 4
"""Bytes before each message that hold its length."""
_CREDENTIALS = struct.Struct("3i")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def listen(serve: Callable[[*Streams], Coroutine[Any, Any, None]]) -> tuple[asyncio.Server, bytes]:
    """Call `serve` for every connection of this user; answers the address. Raises OSError where there is none."""

    async def checked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _own(writer):
                await serve(reader, writer)
        finally:
            writer.close()

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0choral-" + secrets.token_hex(16).encode())
    return await asyncio.start_unix_server(checked, sock=listener), listener.getsockname()


async def connect(address: bytes) -> Streams:
    """Raises OSError when nobody of this user listens there."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    if not _own(writer):
        writer.close()
        raise PermissionError("the address belongs to another user's process")
    return reader, writer


def send(writer: asyncio.StreamWriter, message: Any) -> None:
    """Queue a message; the transport sends it."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    writer.write(len(body).to_bytes(_LENGTH) + body)


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises OSError or EOFError when the other side is gone."""
    size = int.from_bytes(await reader.readexactly(_LENGTH))
    return pickle.loads(await reader.readexactly(size))


def _own(writer: asyncio.StreamWriter) -> bool:
    """Whether the process at the other end is this user's."""
    peer = writer.get_extra_info("socket")
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())
