"""What every HTTP exchange gets, whatever its route: a request id, and a bound on its body.

Plain ASGI, so that streams pass untouched. Installed by `router.app`.
"""

import re
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""Public ids: visible ASCII, so that they can go into a header."""


class RequestId:
    """Sets `state.request_id` to the client's X-Request-Id, or a new one, and returns it as a header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if REQUEST_ID.fullmatch(given) else uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = state["request_id"]
            await send(message)

        return await self._app(scope, receive, named)


class ProxyNamesRequests:
    """For an app behind Serve, whose proxy names every request and reply itself: drops the app's second header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, unnamed)


class BodyLimit:
    """Answers 413 to a body over `max_bytes`, as soon as its declared or its real length shows it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        declared = Headers(scope=scope).get("content-length", "0")
        seen = 0
        too_long = len(declared) > 15 or (declared.isdecimal() and int(declared) > self._max_bytes)

        async def bounded() -> Message:
            nonlocal seen
            message = {} if too_long else await receive()
            seen += len(message.get("body", b""))
            if too_long or seen > self._max_bytes:
                raise HTTPException(413, f"the body is larger than {self._max_bytes} bytes")
            return message

        return await self._app(scope, bounded, send)
