"""Listens for HTTP in the router's own process, where one router serves a cluster that was started with it.

Serve's proxy would be one more process between client and router: the first token comes 8 ms later through it, and
every push of tokens costs more. Whoever deploys through Serve keeps the proxies, which find the router on any node.
"""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_S = 90
"""How long a connection may be idle; clients keep theirs for a minute or so."""
LINGER_S = 5
"""Longest wait for open connections at the end; what ran was answered or cancelled before."""
START_POLL_S = 0.01


@asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int) -> AsyncIterator[None]:
    """Serve `app`, whose lifespan is the caller's, at host:port. Raises OSError if the address is taken."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LINGER_S,
    )
    server = uvicorn.Server(config)
    with socket.create_server((host, port), family=_family(host), backlog=config.backlog) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(START_POLL_S)
        try:
            yield
        finally:
            server.should_exit = True
            await task


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
