"""Listens for HTTP in the router's own process, where one router serves a cluster that was started with it.

Serve's proxy would be one more process between client and router: the first token comes 8 ms later through it, and
every push of tokens costs more. Whoever deploys through Serve keeps the proxies, which find the router on any node.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 90
"""How long a connection may be idle; clients keep theirs for a minute or so."""
LINGER_S = 5
"""Longest wait for open connections at the end; what ran was answered or cancelled before."""
START_POLL_S = 0.01


def listener(host: str, port: int, *, reserved: bool = False) -> socket.socket:
    """A socket that listens; clients that come before it is served wait. Raises OSError naming the address.

    With `reserved` the address may be one that this user has reserved.
    """
    try:
        return socket.create_server((host, port), family=_family(host), reuse_port=reserved)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror or error}") from error


def reserve(host: str, port: int) -> socket.socket:
    """Keeps an address, or a free port for 0, for a listener of another process, as long as this socket is open.

    Otherwise Ray, whose processes take dozens of ports, could take it before the router has started. Raises OSError
    naming the address if it is taken.
    """
    with listener(host, port) as probe:
        port = probe.getsockname()[1]
    reserved = socket.socket(_family(host))
    if reserved.family is socket.AF_INET6:
        reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        reserved.bind((host, port))
    except OSError:
        # What is left of the connections of another server; those of a listener of ours would not be in the way.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((host, port))
    return reserved


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@asynccontextmanager
async def serving_on(listening: socket.socket, app: ASGIApp) -> AsyncIterator[Callable[[], None]]:
    """Serve `app`, whose lifespan is the caller's, and close the socket at the end.

    The block gets a function that refuses new connections from then on.
    """
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LINGER_S,
    )
    server = uvicorn.Server(config)
    with listening:
        task = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError("the HTTP server did not start")
            await asyncio.sleep(START_POLL_S)

        def refuse() -> None:
            for open_server in server.servers:
                open_server.close()

        try:
            yield refuse
        finally:
            server.should_exit = True
            await task
