"""Replies put together from samples equal those of the HTTP routes, and bad rows have the routes' errors."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from router.app import create_app
from router.batch import replies
from router.batch.store import SampleStore
from router.limits import RouterLimits
from tests.router.batch.conftest import Lab

CHAT = [{"role": "user", "content": "hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hi", "n": 3, "logprobs": 2}),
    ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "hi", "n": 2, "samples": [7, 1]}),
    ("/v1/chat/completions", {"messages": CHAT, "n": 3, "logprobs": True, "top_logprobs": 1}),
    ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}),
]


@pytest.fixture
def lab(lab: Lab) -> Lab:
    lab.rules = type(lab.rules)(key="k", replies=True, created=1_700_000_123)
    lab.capacity = 4
    return lab


def lines(lab: Lab) -> dict[str, dict[str, Any]]:
    store = SampleStore(str(lab.folder), "jsonl")
    return {line["custom_id"]: line for line in replies.lines(store.records(), "b")}


def test_replies_are_those_of_the_routes(lab: Lab):
    lab.run(
        {"custom_id": str(i), "method": "POST", "url": url, "body": {"seed": i, **body}}
        for i, (url, body) in enumerate(BODIES)
    )
    made = lines(lab)
    assert len(made) == len(BODIES)
    client = TestClient(create_app(lab.engine, RouterLimits()))
    for i, (url, body) in enumerate(BODIES):
        expected = client.post(url, json={"seed": i, **body}).json()
        got = made[str(i)]["response"]["body"]
        assert made[str(i)]["response"]["status_code"] == 200 and made[str(i)]["error"] is None
        assert not replies.failed(made[str(i)])
        got["usage"]["prompt_tokens_details"] = expected["usage"]["prompt_tokens_details"]
        assert got == {**expected, "id": got["id"], "created": 1_700_000_123}


def test_a_bad_row_has_the_error_of_the_route(lab: Lab):
    body = {"prompt": "hi", "temperature": 3}
    lab.run([{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": body}])
    line = lines(lab)["bad"]
    expected = TestClient(create_app(lab.engine, RouterLimits())).post("/v1/completions", json=body)
    assert replies.failed(line) and line["response"]["status_code"] == expected.status_code == 400
    error = line["response"]["body"]["error"]
    assert error["param"] == "temperature" and error["message"] == expected.json()["error"]["message"]


def test_a_family_with_a_failed_sample_is_an_error(lab: Lab):
    lab.engine.fail = {0: 2}
    lab.options = type(lab.options)(backoff_s=0.001, attempts=1, attempts_alone=1)
    lab.run([{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "n": 3}}])
    line = lines(lab)["a"]
    assert line["response"]["status_code"] == 500 and "the sandbox broke" in json.dumps(line)
