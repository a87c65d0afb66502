"""One streamed request under the clock: every choice has a clock of its own, however the chunks interleave.

Speaks the completions protocol that OpenAI-compatible servers share. Most chunks are not parsed: when each key a clock
needs stands in them exactly once, that is enough. Called by the bench's runner; knows no grid and no statistics.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from deploy.client import CONNECT_TIMEOUT_S, LOOPBACK

Clock = Callable[[], float]
"""Seconds from any origin."""

_KEYS = (b'"index":', b'"text":', b'"finish_reason":')
_NOT_NULL = re.compile(rb'"(?:logprobs|usage|error)":\s*(?!null|\s)')
_INDEX = re.compile(rb'"index":\s*(\d+)')
_TEXT = re.compile(rb'"text":\s*"(.)')
_UNFINISHED = re.compile(rb'"finish_reason":\s*(null|")')
_SHOWN = 300
"""Characters of a server's answer that an error repeats."""


class RequestError(Exception):
    """A request failed; the message says how."""


class Piece(NamedTuple):
    """What one chunk says about one choice."""

    choice: int
    """Its index."""
    text: bool
    """Whether it brings text. A token that has no whole character yet comes with none."""
    finished: bool


@dataclass(slots=True)
class ChoiceClock:
    """When one choice was heard of, in seconds on the client's clock."""

    first_s: float | None = None
    """First text, or the finish of a choice without any."""
    last_s: float | None = None
    """Latest text."""
    end_s: float | None = None
    """Finish."""
    gaps: list[float] = field(default_factory=list)
    """Between chunks with text, in order."""

    def hear(self, at: float, *, text: bool, finished: bool) -> None:
        """Raises RequestError when the choice was finished already."""
        if self.end_s is not None:
            raise RequestError("a choice was continued after its finish")
        if self.first_s is None and (text or finished):
            self.first_s = at
        if text:
            self.gaps += [] if self.last_s is None else [at - self.last_s]
            self.last_s = at
        if finished:
            self.end_s = at


@dataclass(slots=True)
class ParentTiming:
    """One request: when it was sent, its clocks, and how it ended. Times as in ChoiceClock."""

    start_s: float
    choices: list[ChoiceClock]
    usage_tokens: int | None = None
    """Completion tokens as the server reports them."""
    tokens: int | None = None
    """Completion tokens over all choices; None until the request has succeeded."""
    error: str | None = None

    @property
    def first_s(self) -> float:
        """When the first choice began."""
        return min(_known(choice.first_s) for choice in self.choices)

    @property
    def all_first_s(self) -> float:
        """When the last choice began."""
        return max(_known(choice.first_s) for choice in self.choices)

    @property
    def end_s(self) -> float:
        """When the last choice finished."""
        return max(_known(choice.end_s) for choice in self.choices)

    def absorb(self, data: bytes, at: float) -> None:
        """Take in the data of one event, read at `at`. Raises RequestError."""
        piece = fast_piece(data)
        for index, text, finished in (piece,) if piece else self._parsed(data):
            if not 0 <= index < len(self.choices):
                raise RequestError(f"the server sent choice {index} of {len(self.choices)}")
            self.choices[index].hear(at, text=text, finished=finished)

    def _parsed(self, data: bytes) -> list[Piece]:
        chunk = parse(data)
        if (usage := chunk.get("usage")) is not None:
            self.usage_tokens = usage.get("completion_tokens")
        return pieces(chunk)

    def finish(self, expected: int | None) -> None:
        """Check that everything came. `expected` is the number of completion tokens, None where the server decides.

        Raises RequestError.
        """
        if missing := [index for index, choice in enumerate(self.choices) if choice.end_s is None]:
            raise RequestError(f"the stream ended without a finish for choice {', '.join(map(str, missing))}")
        if expected is None and self.usage_tokens is None:
            raise RequestError("the server reports no usage, and without ignore_eos nothing else counts tokens")
        if expected is not None and self.usage_tokens not in (None, expected):
            raise RequestError(f"the server reports {self.usage_tokens} completion tokens instead of {expected}")
        self.tokens = self.usage_tokens if expected is None else expected


def _known(moment: float | None) -> float:
    if moment is None:
        raise ValueError("the request did not succeed")
    return moment


def fast_piece(data: bytes) -> Piece | None:
    """The one choice of a plain chunk, without parsing; None where only parsing can tell.

    Inside a JSON string every quote is escaped, so a key with its colon cannot be part of a text. Log-probabilities
    may have any token as a key: such chunks are parsed.
    """
    if any(data.count(key) != 1 for key in _KEYS) or _NOT_NULL.search(data) is not None:
        return None
    index, text, finish = _INDEX.search(data), _TEXT.search(data), _UNFINISHED.search(data)
    if index is None or text is None or finish is None:
        return None
    return Piece(int(index[1]), text[1] != b'"', finish[1] != b"null")


def parse(data: bytes) -> dict[str, Any]:
    """The chunk of an event. Raises RequestError when it is none, or the server reports an error in it."""
    try:
        chunk: dict[str, Any] = json.loads(data)
        error = chunk.get("error")
    except (ValueError, AttributeError) as cause:
        raise RequestError(f"the stream holds something that is no chunk: {_shown(data)}") from cause
    if error is not None:
        raise RequestError(f"the server reported an error: {_message(error)}")
    return chunk


def pieces(chunk: dict[str, Any]) -> list[Piece]:
    """What a parsed chunk says about each of its choices. Raises RequestError."""
    try:
        return [
            Piece(int(choice["index"]), bool(choice.get("text")), choice.get("finish_reason") is not None)
            for choice in chunk["choices"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        raise RequestError(f"the stream holds something that is no chunk: {str(chunk)[:_SHOWN]}") from cause


class EventReader:
    """Cuts a byte stream into the data of its server-sent events, at line feeds alone."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events whose line has become complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def connect(url: str, timeout_s: float) -> httpx.AsyncClient:
    """A client that opens a connection for every request, as many as there are, and waits `timeout_s` for a byte."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        trust_env=httpx.URL(url).host not in LOOPBACK,
    )


async def ask(client: httpx.AsyncClient, body: bytes, n: int, expected: int | None, clock: Clock) -> ParentTiming:
    """Send one request for `n` choices and listen to its end; a failure is told in the result.

    `expected` is the number of completion tokens if it is known beforehand.
    """
    timing = ParentTiming(clock(), [ChoiceClock() for _ in range(n)])
    try:
        await _listen(client, body, timing, clock)
        timing.finish(expected)
    except RequestError as error:
        timing.error = str(error)
    except httpx.HTTPError as error:
        timing.error = f"the connection to {client.base_url} failed: {str(error) or type(error).__name__}"
    return timing


async def _listen(client: httpx.AsyncClient, body: bytes, timing: ParentTiming, clock: Clock) -> None:
    reader = EventReader()
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
        if response.status_code != 200:
            raise RequestError(_refusal(response.status_code, await response.aread()))
        async for data in response.aiter_bytes():
            at = clock()
            for event in reader.feed(data):
                if event == b"[DONE]":
                    return
                timing.absorb(event, at)
    raise RequestError("the stream broke off before its end")


def _refusal(status: int, content: bytes) -> str:
    try:
        said = _message(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        said = _shown(content)
    return f"the server answered {status}: {said}"


def _message(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:_SHOWN]


def _shown(data: bytes) -> str:
    return data[:_SHOWN].decode(errors="replace")
