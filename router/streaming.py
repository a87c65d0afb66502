"""Server-sent events of one parent: chunk order, completeness, usage, keep-alive, and errors that come half way.

A `ChunkWriter` turns the engine's updates into events and proves that every choice finished exactly once; its
subclasses in `router.completions` and `router.chat` write the JSON of one choice. This is the hot path of streaming:
the fixed parts of a chunk are made once, and all chunks of an update leave in one body message.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from json.encoder import encode_basestring_ascii
from typing import Any

from aggregation.results import ChoiceDelta, ParentUpdate, Usage
from router.errors import ApiError, Fault, clip, describe, listing
from router.plan import Plan

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

quoted = encode_basestring_ascii
"""A string as JSON. ASCII only, so that no client splits an event at a Unicode line separator."""


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object. Prompt tokens count once per prompt, completion tokens over all children."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def reply_body(plan: Plan, kind: str, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """What a whole reply of either route has around its choices."""
    return {
        "id": plan.reply_id,
        "object": kind,
        "created": plan.created,
        "model": plan.model,
        "choices": choices,
        "usage": usage_body(usage),
        "seed": plan.parent.params.seed,
    }


def child_failure(delta: ChoiceDelta) -> ApiError:
    """The error of a parent one of whose children failed; it names the child."""
    message = f"choice {delta.index} failed: {clip(delta.error or 'no reason given')}"
    return ApiError(Fault.GENERATION_FAILED, message)


class ChunkWriter(ABC):
    """The events of one parent. Feed it every update in order, then ask for the end.

    `failure` is set when a child failed or the engine broke the rules of a stream; the events returned by then are
    still good, and nothing more may be asked of the writer.
    """

    def __init__(self, plan: Plan, kind: str) -> None:
        self.plan = plan
        self.failure: ApiError | None = None
        fixed = {"id": plan.reply_id, "object": kind, "created": plan.created, "model": plan.model}
        self._head = f'data: {compact(fixed)[:-1]},"choices":['
        self._opened = False
        self._finished = [False] * plan.parent.num_children
        self._held: dict[int, ChoiceDelta] = {}
        self._usage: Usage | None = None

    @abstractmethod
    def opening(self) -> list[str]:
        """Events that go out with the first text, before it."""

    @abstractmethod
    def chunk(self, delta: ChoiceDelta) -> str:
        """The event of one choice's delta."""

    def events(self, update: ParentUpdate) -> bytes:
        """All chunks of an update, one choice in each; empty when it brings nothing to show."""
        chunks = [self.chunk(ready) for delta in update.deltas if (ready := self._accept(delta)) is not None]
        if chunks and not self._opened:
            self._opened = True
            chunks = self.opening() + chunks
        self._usage = update.usage or self._usage
        return "".join(chunks).encode()

    def end(self) -> bytes:
        """The last events. Raises ApiError unless every choice has finished."""
        if missing := [index for index, done in enumerate(self._finished) if not done]:
            raise ApiError(Fault.GENERATION_FAILED, f"choices {listing(missing)} did not finish")
        if not self.plan.include_usage:
            return DONE
        if self._usage is None:
            raise ApiError(Fault.GENERATION_FAILED, "the engine did not report usage")
        return f'{self._head}],"usage":{compact(usage_body(self._usage))}}}\n\n'.encode() + DONE

    def event(self, choice: str, delta_index: int, completion_tokens: int, extra: str = "") -> str:
        """One event around the JSON of one choice; `extra` adds top-level keys."""
        return f"{self._head}{choice}]{self._usage_key(delta_index, completion_tokens)}{extra}}}\n\n"

    def finish_keys(self, delta: ChoiceDelta) -> str:
        """The keys every kind of choice ends with."""
        if delta.finish_reason is None:
            keys = '"finish_reason":null'
        else:
            keys = f'"finish_reason":{quoted(delta.finish_reason)},"stop_reason":{compact(delta.stop_reason)}'
        return f'{keys},"token_ids":{compact(delta.token_ids)}' if self.plan.return_token_ids else keys

    def _usage_key(self, index: int, completion_tokens: int) -> str:
        if not self.plan.include_usage:
            return ""
        if not self.plan.continuous_usage:
            return ',"usage":null'
        prompt = self.plan.prompt_tokens(index)
        total = prompt + completion_tokens
        return f',"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion_tokens},"total_tokens":{total}}}'

    def _accept(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """The delta with what was held back for it; None when it has no text to travel with yet, or is at fault."""
        if delta.error is not None:
            self.failure = self.failure or child_failure(delta)
            return None
        if not 0 <= delta.index < len(self._finished) or self._finished[delta.index]:
            message = f"choice {delta.index} was continued after its end"
            self.failure = self.failure or ApiError(Fault.GENERATION_FAILED, message)
            return None
        if (held := self._held.pop(delta.index, None)) is not None:
            held.extend(delta)
            delta = held
        if not delta.text and delta.finish_reason is None:
            self._held[delta.index] = delta
            return None
        self._finished[delta.index] = delta.finish_reason is not None
        return delta


async def _updates_or_idle(
    updates: AsyncIterator[ParentUpdate], idle_s: float
) -> AsyncGenerator[ParentUpdate | None, None]:
    """The updates, and None whenever none came for `idle_s` seconds. However it is left, `updates` is closed."""

    async def step() -> ParentUpdate | None:
        return await anext(updates, None)

    pending: asyncio.Task[ParentUpdate | None] | None = None
    try:
        while True:
            pending = asyncio.create_task(step())
            while not pending.done():
                await asyncio.wait((pending,), timeout=idle_s)
                if not pending.done():
                    yield None
            if (update := pending.result()) is None:
                return
            yield update
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.wait((pending,))
        if (aclose := getattr(updates, "aclose", None)) is not None:
            await aclose()


async def sse_bodies(
    updates: AsyncIterator[ParentUpdate], writer: ChunkWriter, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """Body messages of a stream, the first with the first text, the last with [DONE].

    A failure before the first body is raised, so that it can still become a status. A later one becomes an error
    event, after the engine was told to drop the parent.
    """
    started = False
    try:
        async with aclosing(_updates_or_idle(updates, keep_alive_s)) as source:
            async for update in source:
                if body := writer.events(update) if update else KEEP_ALIVE if started else b"":
                    started = True
                    yield body
                if writer.failure is not None:
                    raise writer.failure
        yield writer.end()
    except Exception as error:
        if not started:
            raise
        yield describe(error).event() + DONE
