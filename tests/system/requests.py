"""Requests of the system tests, and their answers as comparable bits."""

import json
from collections.abc import Iterator
from typing import Any

import httpx

QUESTION = [{"role": "user", "content": "Name a fruit and say why people like it."}]
PROMPT = "Once upon a time, in a village by the sea, there lived"

Choice = tuple[str, tuple[str, ...], tuple[float, ...], str]
"""Text, tokens, log-probabilities, finish reason."""


def complete(url: str, path: str = "completions", **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/v1/{path}", json=with_defaults(path, body), timeout=300)
    assert reply.status_code == 200, reply.text
    result: dict[str, Any] = reply.json()
    return result


def with_defaults(path: str, body: dict[str, Any]) -> dict[str, Any]:
    question = {"messages": QUESTION} if path == "chat/completions" else {"prompt": PROMPT}
    return {**question, "max_tokens": 16, "seed": 11, "temperature": 1.0, **body}


def stream(url: str, path: str = "completions", **body: Any) -> Iterator[dict[str, Any]]:
    """The events of a stream; the end marker must come, and last."""
    request = {**with_defaults(path, body), "stream": True}
    with httpx.stream("POST", f"{url}/v1/{path}", json=request, timeout=300) as reply:
        assert reply.status_code == 200, reply.read()
        ended = False
        for line in reply.iter_lines():
            if line.startswith("data: "):
                assert not ended, "an event after [DONE]"
                ended = line == "data: [DONE]"
                if not ended:
                    yield json.loads(line[6:])
        assert ended


def choices(reply: dict[str, Any]) -> list[Choice]:
    """The choices of a completions reply with logprobs, in order."""
    assert [c["index"] for c in reply["choices"]] == list(range(len(reply["choices"])))
    return [
        (c["text"], tuple(c["logprobs"]["tokens"]), tuple(c["logprobs"]["token_logprobs"]), c["finish_reason"])
        for c in reply["choices"]
    ]


def streamed_choices(url: str, n: int, num_choices: int | None = None, **body: Any) -> list[Choice]:
    """The same from a stream: deltas joined by index, one finish each and nothing after it."""
    count = num_choices or n
    texts, tokens, logprobs = [""] * count, [()] * count, [()] * count
    finishes: list[str | None] = [None] * count
    for event in stream(url, n=n, **body):
        for c in event["choices"]:
            index = c["index"]
            assert finishes[index] is None, "a chunk after the finish"
            texts[index] += c["text"]
            if c["logprobs"]:
                tokens[index] += tuple(c["logprobs"]["tokens"])
                logprobs[index] += tuple(c["logprobs"]["token_logprobs"])
            finishes[index] = c["finish_reason"]
    assert None not in finishes
    return list(zip(texts, tokens, logprobs, finishes, strict=True))
