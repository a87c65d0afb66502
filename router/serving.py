"""From a plan to the bytes of its reply: admission around everything, the engine's work, and clients that leave.

All of it runs inside the response's own call, so that slots and the engine's work end with it in every case. Holds
what the routes share. Called by `router.completions` and `router.chat`; knows neither's format.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from aggregation.parent_request import ParentRequest
from aggregation.results import ChoiceDelta, ParentResult, ParentUpdate, Usage
from router.admission import Admission
from router.engine import Engine
from router.errors import ApiError, Fault
from router.limits import RouterLimits
from router.plan import Plan
from router.streaming import ChunkWriter, child_failure, sse_bodies
from router.tokenizer import GenerationDefaults, Tokenizer

T = TypeVar("T")

_SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Format(Protocol):
    """How one route writes its replies."""

    def reply(self, plan: Plan, result: ParentResult) -> dict[str, Any]: ...

    def writer(self, plan: Plan) -> ChunkWriter: ...


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled and waited for when the client leaves or the caller is cancelled.

    Raises ClientDisconnect when the client left first.
    """
    tasks = task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def send_events(send: Send, bodies: AsyncIterator[bytes]) -> None:
    """Send a stream but for its closing message. Headers go out with the first body, so failures before it raise."""
    started = False
    async for body in bodies:
        try:
            if not started:
                await send({"type": "http.response.start", "status": 200, "headers": list(_SSE_HEADERS)})
                started = True
            await send({"type": "http.response.body", "body": body, "more_body": True})
        except OSError as error:
            raise ClientDisconnect from error


class WorkResponse(Response):
    """A response whose work runs while it is sent. `work` returns the reply, or None after it has streamed one."""

    def __init__(self, work: Callable[[Send], Coroutine[Any, Any, Response | None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = await until_disconnect(receive, self._work(send))
        except ClientDisconnect:
            return
        if reply is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await reply(scope, receive, send)


def proven(result: ParentResult, parent: ParentRequest) -> ParentResult:
    """The result, if it holds every choice exactly once, in order, finished. Raises ApiError otherwise."""
    for choice in result.choices:
        if choice.error is not None:
            raise child_failure(choice)
    finished = [choice.index for choice in result.choices if choice.finish_reason is not None]
    if finished != list(range(parent.num_children)) or len(result.choices) != len(finished):
        message = f"the engine finished {len(finished)} choices of {parent.num_children}"
        raise ApiError(Fault.GENERATION_FAILED, message)
    return result


def _nothing_generated(plan: Plan) -> ParentResult:
    """The result of a request for zero tokens."""
    parent = plan.parent
    choices = [ChoiceDelta(index, "", [], None, 0, "length") for index in range(parent.num_children)]
    return ParentResult(choices, Usage(sum(map(len, parent.prompts)), 0, 0))


async def _as_stream(result: ParentResult) -> AsyncIterator[ParentUpdate]:
    yield ParentUpdate(result.choices, result.usage)


@dataclass(frozen=True, slots=True)
class Serving:
    """What all routes of one app share."""

    engine: Engine
    limits: RouterLimits
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    admission: Admission

    @classmethod
    def load(cls, engine: Engine, limits: RouterLimits) -> "Serving":
        """Read the model folder. Raises ValueError when it lacks what the router needs."""
        folder = Path(engine.model.folder)
        defaults = GenerationDefaults.load(folder)
        return cls(engine, limits, Tokenizer(folder), defaults, Admission(limits.max_children))

    def respond(self, children: int, stream: bool, plan: Callable[[], Awaitable[Plan]], style: Format) -> Response:
        """The response to a parent of so many children. `plan` is made after admission, which may refuse it."""

        async def work(send: Send) -> Response | None:
            with self.admission.reserve(children):
                ready = await plan()
                if not stream:
                    return JSONResponse(style.reply(ready, proven(await self._complete(ready), ready.parent)))
                bodies = sse_bodies(self._updates(ready), style.writer(ready), self.limits.keep_alive_s)
                async with aclosing(bodies):
                    await send_events(send, bodies)
                return None

        return WorkResponse(work)

    def _updates(self, plan: Plan) -> AsyncIterator[ParentUpdate]:
        return self.engine.stream(plan.parent) if plan.generate else _as_stream(_nothing_generated(plan))

    async def _complete(self, plan: Plan) -> ParentResult:
        return await self.engine.complete(plan.parent) if plan.generate else _nothing_generated(plan)
