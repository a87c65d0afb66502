"""A small client of the HTTP API: asks one question, reads the stream, keeps what each child has so far.

Speaks the public protocol only; knows neither Ray nor how anything is shown. `choral sample` puts a view on
top. Closing the stream cancels the family on the server.
"""

import contextlib
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from deploy.errors import CommandError

CONNECT_TIMEOUT_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class SampleError(CommandError):
    """The server refused, failed or went away; the message is for people."""


class TokenProb(NamedTuple):
    token: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]


@dataclass(slots=True)
class Child:
    """One choice as far as it has come."""

    index: int
    sample: int
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenProb] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask. `sampling` holds the sampling fields given, under their API names."""

    prompt: str
    samples: tuple[int, ...]
    replay: bool = False
    """Whether the sample numbers were chosen; otherwise they are 0..n-1 and only n is sent."""
    chat: bool = True
    max_tokens: int
    logprobs: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body of a streamed request."""
        body: dict[str, Any] = {"model": model, "stream": True, **self.sampling}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"samples": list(self.samples)} if self.replay else {"n": len(self.samples)}
        if not self.chat:
            extra = {} if self.logprobs is None else {"logprobs": self.logprobs}
            return body | {"prompt": self.prompt, "max_tokens": self.max_tokens} | extra
        extra = {} if self.logprobs is None else {"logprobs": True, "top_logprobs": self.logprobs}
        messages = [{"role": "user", "content": self.prompt}]
        return body | {"messages": messages, "max_completion_tokens": self.max_tokens} | extra


@dataclass(slots=True)
class Family:
    """The children of one question, in index order, and what the reply said about all of them."""

    children: list[Child]
    id: str | None = None
    model: str | None = None
    seed: int | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, question: Question) -> "Family":
        return cls([Child(index, sample) for index, sample in enumerate(question.samples)])

    @property
    def tokens(self) -> int:
        return sum(child.tokens for child in self.children)

    @property
    def unfinished(self) -> list[Child]:
        return [child for child in self.children if child.finish_reason is None]

    def absorb(self, chunk: dict[str, Any]) -> list[Child]:
        """Take in one chunk of the stream; returns the children it changed."""
        self.id, self.model = chunk.get("id", self.id), chunk.get("model", self.model)
        self.seed = chunk.get("seed", self.seed)
        usage = chunk.get("usage") or {}
        if not chunk["choices"]:
            self.usage = usage or self.usage
        return [self._grow(choice, usage) for choice in chunk["choices"]]

    def _grow(self, choice: dict[str, Any], usage: dict[str, Any]) -> Child:
        index: int = choice["index"]
        child = self.children[index]
        child.sample = choice.get("sample", child.sample)
        child.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        child.tokens = usage.get("completion_tokens", child.tokens)
        child.logprobs += _logprobs(choice.get("logprobs") or {})
        child.finish_reason = choice.get("finish_reason") or child.finish_reason
        child.stop_reason = choice.get("stop_reason", child.stop_reason)
        return child


def served_model(client: httpx.Client) -> str:
    """The name of the first model the server lists. Raises SampleError."""
    with _connection_errors(client):
        response = client.get("/v1/models")
    if response.status_code != 200:
        raise SampleError(_refusal(response))
    return str(response.json()["data"][0]["id"])


def connect(url: str) -> httpx.Client:
    """A client of the server at `url`. It waits for tokens without limit, and uses no proxy for this host."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SampleError(f"{url}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SampleError(f"{url} is not an http:// or https:// address")
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    return httpx.Client(base_url=url, timeout=timeout, trust_env=parsed.host not in LOOPBACK)


def stream(client: httpx.Client, question: Question, model: str, family: Family) -> Generator[list[Child]]:
    """Ask, and yield the changed children after every chunk; closing the iterator cancels the family.

    Raises SampleError when the server refuses, reports an error, or ends the stream before all have finished.
    """
    with (
        _connection_errors(client),
        client.stream("POST", question.path, json=question.body(model)) as response,
    ):
        if response.status_code != 200:
            response.read()
            raise SampleError(_refusal(response))
        for data in _events(response.iter_bytes()):
            if data == "[DONE]":
                break
            yield _absorb(family, data)
        else:
            raise SampleError("the stream broke off before its end")
    if family.unfinished:
        missing = ", ".join(str(child.index) for child in family.unfinished)
        raise SampleError(f"the stream ended without a finish for choice {missing}")


def _events(pieces: Iterator[bytes]) -> Iterator[str]:
    """The data of server-sent events. Splits at line feeds alone: text may hold any other line separator."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode()


def _absorb(family: Family, data: str) -> list[Child]:
    try:
        chunk: dict[str, Any] = json.loads(data)
        if (error := chunk.get("error")) is None:
            return family.absorb(chunk)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise SampleError(f"the stream holds something that is no chunk: {data[:200]}") from error
    raise SampleError(_said(error))


def _said(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return f"the server reported an error: {message}"


def _refusal(response: httpx.Response) -> str:
    try:
        error = response.json()["error"]
        return f"the server answered {response.status_code}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} to {response.request.url}"


@contextlib.contextmanager
def _connection_errors(client: httpx.Client) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise SampleError(f"no server answers at {client.base_url} ({error})") from error
    except httpx.HTTPError as error:
        raise SampleError(f"the connection to {client.base_url} failed: {error}") from error


def _logprobs(data: dict[str, Any]) -> list[TokenProb]:
    """Log-probabilities of either route: chat lists one object per token, completions parallel lists."""
    if (content := data.get("content")) is not None:
        return [
            TokenProb(at["token"], at["logprob"], tuple((t["token"], t["logprob"]) for t in at["top_logprobs"]))
            for at in content
        ]
    tokens = data.get("tokens") or []
    tops = data.get("top_logprobs") or [None] * len(tokens)
    return [
        TokenProb(token, logprob, tuple((top or {}).items()))
        for token, logprob, top in zip(tokens, data.get("token_logprobs") or [], tops, strict=True)
    ]
