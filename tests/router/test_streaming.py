"""The rules of a stream with several choices, read off the wire of both routes and off the writer itself."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from aggregation.parent_request import ParentRequest
from aggregation.results import ChoiceDelta, ParentUpdate, Usage
from router.completions import CompletionWriter
from router.errors import ApiError
from router.plan import Plan
from router.streaming import DONE, ChunkWriter, sse_bodies
from tests.router.toy_engine import ToyEngine
from tests.router.wire import chunks, data_events
from workers.sampling_params import SamplingParams

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}
both_routes = pytest.mark.parametrize("route", ROUTES)


def text_of(client: TestClient, route: str, **fields: Any) -> str:
    body = {**ROUTES[route], "stream": True, "max_tokens": 8, "seed": 3, **fields}
    response = client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.text


@both_routes
@pytest.mark.parametrize("reverse", [False, True])
def test_one_choice_per_chunk_and_one_finish_per_index_with_nothing_after(
    client: TestClient, engine: ToyEngine, route: str, reverse: bool
) -> None:
    engine.reverse = reverse
    finished: set[int] = set()
    for event in chunks(text_of(client, route, n=6)):
        (choice,) = event["choices"]
        assert choice["index"] not in finished
        if choice["finish_reason"] is not None:
            finished.add(choice["index"])
            assert choice["stop_reason"] == "END"
    assert finished == set(range(6))


@both_routes
def test_no_chunk_is_empty_but_the_roles(client: TestClient, route: str) -> None:
    for event in chunks(text_of(client, route, n=4)):
        (choice,) = event["choices"]
        text = choice.get("text") or choice.get("delta", {}).get("content")
        assert text or choice["finish_reason"] or "role" in choice["delta"]


@both_routes
def test_usage_appears_only_as_asked(client: TestClient, route: str) -> None:
    for options in (None, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        assert not any("usage" in event for event in chunks(text_of(client, route, stream_options=options)))
    *events, last = chunks(text_of(client, route, n=2, stream_options={"include_usage": True}))
    assert [event["usage"] for event in events] == [None] * len(events)
    assert last["choices"] == []
    reply = client.post(route, json={**ROUTES[route], "max_tokens": 8, "seed": 3, "n": 2}).json()
    assert last["usage"] == reply["usage"]


@both_routes
def test_a_failed_child_ends_the_stream_with_an_error_event(client: TestClient, engine: ToyEngine, route: str) -> None:
    engine.fail = {1: 2}
    *events, error, done = data_events(text_of(client, route, n=3, ignore_eos=True))
    assert done == "[DONE]"
    body = json.loads(error)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert "choice 1" in body["message"]
    assert "the sandbox broke" in body["message"]
    counts = [sum(json.loads(e)["choices"][0]["index"] == index for e in events) for index in range(3)]
    roles = route.endswith("chat/completions")
    assert counts == [3 + roles, 2 + roles, 3 + roles]
    assert engine.running == 0


@both_routes
def test_a_failure_before_the_first_token_is_a_status(client: TestClient, engine: ToyEngine, route: str) -> None:
    engine.fail = {0: 0}
    response = client.post(route, json={**ROUTES[route], "stream": True})
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert "choice 0" in response.json()["error"]["message"]


@both_routes
@pytest.mark.parametrize("knob", ["lose", "repeat"])
def test_an_incomplete_stream_never_looks_complete(
    client: TestClient, engine: ToyEngine, route: str, knob: str
) -> None:
    setattr(engine, knob, {1})
    *_, error, done = data_events(text_of(client, route, n=3))
    assert done == "[DONE]"
    assert "1" in json.loads(error)["error"]["message"]


@both_routes
def test_an_idle_stream_sends_comments(client: TestClient, engine: ToyEngine, route: str) -> None:
    engine.step_s = 0.12
    text = text_of(client, route, max_tokens=3, ignore_eos=True)
    assert text.count(": keep-alive\n\n") >= 2
    assert text.startswith("data: ")
    assert len(chunks(text)) == 3 + route.endswith("chat/completions")


def plan(n: int, **fields: Any) -> Plan:
    parent = ParentRequest(
        parent_id="p", prompts=((1, 2),), samples=tuple(range(n)), params=SamplingParams(max_tokens=9, seed=1)
    )
    values: dict[str, Any] = {
        "reply_id": "cmpl-1",
        "created": 1,
        "model": "toy",
        "include_usage": False,
        "continuous_usage": False,
        "return_token_ids": True,
    }
    return Plan(parent=parent, **{**values, **fields})


def delta(index: int, text: str, tokens: list[int], finish: str | None = None) -> ChoiceDelta:
    return ChoiceDelta(index, text, tokens, None, len(tokens), finish)


def choices(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(event)["choices"][0] for event in data_events(body.decode())]


def test_tokens_without_text_travel_with_the_next_text() -> None:
    writer = CompletionWriter(plan(1))
    assert writer.events(ParentUpdate([delta(0, "", [5])])) == b""
    assert writer.events(ParentUpdate([delta(0, "", [6])])) == b""
    (choice,) = choices(writer.events(ParentUpdate([delta(0, "é", [7])])))
    assert (choice["text"], choice["token_ids"]) == ("é", [5, 6, 7])
    assert writer.events(ParentUpdate([delta(0, "", [8])])) == b""
    (choice,) = choices(writer.events(ParentUpdate([delta(0, "", [], "length")])))
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("", [8], "length")
    assert writer.end() == DONE


def test_the_writer_refuses_an_end_without_every_finish_or_the_usage() -> None:
    writer = CompletionWriter(plan(3, include_usage=True))
    writer.events(ParentUpdate([delta(0, "a", [1], "stop"), delta(2, "b", [2])]))
    with pytest.raises(ApiError, match="choices 1, 2 did not finish"):
        writer.end()
    writer.events(ParentUpdate([delta(1, "a", [1], "stop"), delta(2, "b", [2], "stop")]))
    with pytest.raises(ApiError, match="usage"):
        writer.end()
    writer.events(ParentUpdate([], Usage(2, 4, 0)))
    assert writer.end().endswith(DONE)


@pytest.mark.parametrize("index", [-1, 3])
def test_the_writer_refuses_a_choice_out_of_range(index: int) -> None:
    writer = CompletionWriter(plan(3))
    writer.events(ParentUpdate([delta(index, "a", [1])]))
    assert writer.failure is not None


def test_events_are_ascii_and_survive_any_text() -> None:
    text = '"\\\n\r\u2028\u0085\x00😀</script>'
    body = CompletionWriter(plan(1)).events(ParentUpdate([delta(0, text, [1])]))
    assert body.isascii()
    assert choices(body)[0]["text"] == text


async def failing(error: Exception, updates: list[ParentUpdate]) -> AsyncIterator[ParentUpdate]:
    for update in updates:
        yield update
    raise error


async def collected(writer: ChunkWriter, source: AsyncIterator[ParentUpdate]) -> list[bytes]:
    return [body async for body in sse_bodies(source, writer, 1.0)]


def test_a_bug_half_way_is_an_event_without_its_text_and_earlier_it_is_raised() -> None:
    update = ParentUpdate([delta(0, "a", [1])])
    bodies = asyncio.run(collected(CompletionWriter(plan(1)), failing(KeyError("/secret"), [update])))
    assert len(bodies) == 2
    assert b"internal error" in bodies[1]
    assert b"secret" not in bodies[1]
    assert bodies[1].endswith(DONE)
    with pytest.raises(KeyError):
        asyncio.run(collected(CompletionWriter(plan(1)), failing(KeyError("early"), [])))


def test_an_update_of_32_choices_costs_under_a_millisecond() -> None:
    writer = CompletionWriter(plan(32))
    deltas = [delta(index, " word", [index]) for index in range(32)]
    best = 1.0
    for _ in range(50):
        start = time.perf_counter()
        body = writer.events(ParentUpdate(deltas))
        best = min(best, time.perf_counter() - start)
    assert len(choices(body)) == 32
    assert best < 0.001
