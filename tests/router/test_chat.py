"""Replies and streams of POST /v1/chat/completions."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from router.app import create_app
from router.limits import RouterLimits
from tests.router.toy_engine import ToyEngine, write_model_folder
from tests.router.wire import assert_official, chunks

BODY: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_completion_tokens": 8,
    "seed": 7,
}
PROMPT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def post(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/chat/completions", json={**BODY, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return chunks(response.text)


def prompt_text(client: TestClient, engine: ToyEngine, **fields: Any) -> str:
    """The text of the prompt that a request makes."""
    post(client, **fields)
    ids = list(engine.parents[-1].prompts[0])
    return client.post("/detokenize", json={"tokens": ids}).json()["prompt"]


@pytest.mark.parametrize("n", [1, 2, 8])
def test_reply_holds_every_choice_once_in_order(client: TestClient, engine: ToyEngine, n: int) -> None:
    engine.reverse = True
    reply = post(client, n=n)
    assert [choice["index"] for choice in reply["choices"]] == list(range(n))
    (parent,) = engine.parents
    assert [choice["message"]["content"] for choice in reply["choices"]] == [engine.text(parent, i) for i in range(n)]


def test_reply_and_chunks_are_official(client: TestClient) -> None:
    options = {"include_usage": True}
    for fields in ({}, {"n": 3, "logprobs": True}, {"n": 2, "logprobs": True, "top_logprobs": 4}):
        assert_official("CreateChatCompletionResponse", post(client, **fields))
        for more in ({}, {"stream_options": options}, {"return_token_ids": True}):
            for event in stream(client, **fields, **more):
                assert_official("CreateChatCompletionStreamResponse", event)


def test_nulls_are_where_clients_read_them_and_nowhere_else(client: TestClient) -> None:
    reply = post(client)
    assert "system_fingerprint" not in reply
    assert reply["prompt_logprobs"] is None
    assert reply["prompt_token_ids"] is None
    (choice,) = reply["choices"]
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert choice["token_ids"] is None


def test_logprobs_with_and_without_the_most_probable(client: TestClient) -> None:
    (choice,) = post(client, logprobs=True)["choices"]
    assert choice["logprobs"]["refusal"] is None
    for entry in choice["logprobs"]["content"]:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert entry["top_logprobs"] == []
    (choice,) = post(client, logprobs=True, top_logprobs=3)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -1.0, -1.5, -9.0]


def test_roles_come_once_per_choice_in_order_before_any_text(client: TestClient, engine: ToyEngine) -> None:
    engine.reverse = True
    events = stream(client, n=4, return_token_ids=True)
    roles, rest = events[:4], events[4:]
    for index, event in enumerate(roles):
        (choice,) = event["choices"]
        assert (choice["index"], choice["sample"]) == (index, index)
        assert choice["delta"] == {"role": "assistant", "content": ""}
        assert choice["finish_reason"] is None
        assert event["seed"] == 7
    assert not any("role" in event["choices"][0]["delta"] for event in rest)
    assert ["prompt_token_ids" in event for event in events] == [True] + [False] * (len(events) - 1)
    assert not any("token_ids" in event["choices"][0] for event in roles)


def test_stream_is_the_reply_in_pieces(client: TestClient, engine: ToyEngine) -> None:
    engine.reverse = True
    reply = post(client, n=5)
    texts = dict.fromkeys(range(5), "")
    for event in stream(client, n=5):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {choice["index"]: choice["message"]["content"] for choice in reply["choices"]}


def test_a_finish_without_text_has_an_empty_delta(client: TestClient, engine: ToyEngine) -> None:
    engine.textless_finish = True
    finishes = [e["choices"][0] for e in stream(client, n=3) if e["choices"][0]["finish_reason"]]
    assert [choice["delta"] for choice in finishes] == [{}] * 3
    assert sorted(choice["index"] for choice in finishes) == [0, 1, 2]


def test_continuous_usage_is_zero_with_the_roles_then_rises(client: TestClient) -> None:
    events = stream(client, n=3, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for event in events[:3]] == [0, 0, 0]
    for index in range(3):
        mine = [e for e in events[:-1] if e["choices"][0]["index"] == index]
        counts = [event["usage"]["completion_tokens"] for event in mine]
        assert counts == list(range(len(counts)))
    assert events[-1]["choices"] == []
    total = events[-1]["usage"]
    assert total["total_tokens"] == total["prompt_tokens"] + total["completion_tokens"]


def test_max_completion_tokens_wins_and_the_default_fills_the_context(client: TestClient, engine: ToyEngine) -> None:
    post(client, max_tokens=3, max_completion_tokens=5)
    post(client, max_tokens=3, max_completion_tokens=None)
    post(client, max_completion_tokens=None)
    whole = engine.max_model_len - len(engine.parents[0].prompts[0])
    assert [parent.params.max_tokens for parent in engine.parents] == [5, 3, whole]


def test_messages_go_through_the_template(client: TestClient, engine: ToyEngine) -> None:
    assert prompt_text(client, engine) == PROMPT
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert prompt_text(client, engine, messages=[{"role": "user", "content": parts}]) == PROMPT.replace(
        "Hello", "Hel\nlo"
    )
    odd = [{"role": "critic", "content": "Hello"}]
    assert prompt_text(client, engine, messages=odd) == PROMPT.replace("user", "critic")
    assert prompt_text(client, engine, add_generation_prompt=False) == PROMPT.partition("<|im_start|>assistant")[0]


def test_special_tokens_of_the_template_are_single_ids(client: TestClient, engine: ToyEngine) -> None:
    post(client)
    assert engine.parents[0].prompts[0].count(256) == 2
    assert engine.parents[0].prompts[0].count(257) == 1


def test_the_final_message_can_be_continued(client: TestClient, engine: ToyEngine) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I think "}]
    text = prompt_text(client, engine, messages=messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nI think ")


def test_a_model_without_template_says_so(tmp_path: Path) -> None:
    engine = ToyEngine(write_model_folder(tmp_path, template=None))
    client = TestClient(create_app(engine, RouterLimits()))
    response = client.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_a_template_that_refuses_is_a_bad_request(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    client = TestClient(create_app(ToyEngine(write_model_folder(tmp_path, template)), RouterLimits()))
    response = client.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "messages"
