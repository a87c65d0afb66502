"""What HTTP exchanges get whatever they are about: a request id, a bound on the body, a check of the body's type.

Plain ASGI, so that streams pass untouched, and a dependency for routes that read JSON. Installed by `router.app`.
"""

import re
from collections.abc import Mapping
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import ApiError, Fault

REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""Public ids: visible ASCII, so that they can go into a header."""


def json_only(request: Request) -> None:
    """Refuse a body that does not say it is JSON, before it is looked at."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(Fault.INVALID, "the content type must be application/json")


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
    """Answers 413 to a body over `max_bytes`, as soon as its declared or its real length shows it.

    Paths in `larger` have bounds of their own.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, larger: Mapping[str, int]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._larger = larger

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        most = self._larger.get(scope["path"], self._max_bytes)
        declared = Headers(scope=scope).get("content-length", "0")
        seen = 0
        too_long = len(declared) > 15 or (declared.isdecimal() and int(declared) > most)

        async def bounded() -> Message:
            nonlocal seen
            message = {} if too_long else await receive()
            seen += len(message.get("body", b""))
            if too_long or seen > most:
                raise HTTPException(413, f"the body is larger than {most} bytes")
            return message

        return await self._app(scope, bounded, send)
