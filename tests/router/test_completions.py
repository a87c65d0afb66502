"""Replies and streams of POST /v1/completions."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.router.toy_engine import ToyEngine
from tests.router.wire import assert_official, chunks

BODY: dict[str, Any] = {"model": "toy", "prompt": "Hello", "max_tokens": 8, "seed": 7}


def post(client: TestClient, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    response = client.post("/v1/completions", json={**BODY, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return chunks(response.text)


def joined(events: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("n", [1, 2, 8])
@pytest.mark.parametrize("reverse", [False, True])
def test_reply_holds_every_choice_once_in_order(client: TestClient, engine: ToyEngine, n: int, reverse: bool) -> None:
    engine.reverse = reverse
    reply = post(client, n=n)
    assert [choice["index"] for choice in reply["choices"]] == list(range(n))
    (parent,) = engine.parents
    assert [choice["text"] for choice in reply["choices"]] == [engine.text(parent, i) for i in range(n)]


def test_reply_is_official_with_and_without_logprobs(client: TestClient) -> None:
    for fields in ({}, {"n": 3}, {"logprobs": 0}, {"n": 2, "logprobs": 5}, {"return_token_ids": True}):
        assert_official("CreateCompletionResponse", post(client, **fields))


def test_nulls_are_where_clients_read_them_and_nowhere_else(client: TestClient) -> None:
    reply = post(client)
    assert "system_fingerprint" not in reply
    (choice,) = reply["choices"]
    for key in ("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids"):
        assert choice[key] is None
    assert "completion_tokens_details" not in reply["usage"]


def test_prompts_times_n_choices_are_numbered_prompt_first(client: TestClient, engine: ToyEngine) -> None:
    reply = post(client, prompt=["a", "bc", "def"], n=3)
    assert [choice["index"] for choice in reply["choices"]] == list(range(9))
    assert [choice["sample"] for choice in reply["choices"]] == [0, 1, 2] * 3
    (parent,) = engine.parents
    assert [len(prompt) for prompt in parent.prompts] == [1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 6


def test_text_and_its_ids_are_the_same_prompt(client: TestClient, engine: ToyEngine) -> None:
    post(client, prompt=["abc", "d"])
    ids = [list(prompt) for prompt in engine.parents[0].prompts]
    post(client, prompt=ids)
    post(client, prompt=ids[0])
    assert engine.parents[1].prompts == engine.parents[0].prompts
    assert engine.parents[2].prompts == engine.parents[0].prompts[:1]


def test_samples_replay_single_children(client: TestClient) -> None:
    whole = post(client, n=8)["choices"]
    some = post(client, samples=[6, 2])["choices"]
    assert [choice["sample"] for choice in some] == [6, 2]
    assert [choice["index"] for choice in some] == [0, 1]
    assert [choice["text"] for choice in some] == [whole[6]["text"], whole[2]["text"]]


def test_seed_is_drawn_and_returned_and_replays(client: TestClient) -> None:
    first = post(client, seed=None, n=4)
    assert 0 <= first["seed"] < 2**63
    again = post(client, seed=first["seed"], n=4)
    assert [choice["text"] for choice in again["choices"]] == [choice["text"] for choice in first["choices"]]
    assert len({post(client, seed=seed)["seed"] for seed in (None, None, -1, -1)}) == 4
    assert post(client, seed=-(2**63))["seed"] == -(2**63)


def test_logprobs_lists_are_parallel_and_offsets_point_at_tokens(client: TestClient) -> None:
    (choice,) = post(client, logprobs=2, ignore_eos=True)["choices"]
    body = choice["logprobs"]
    assert {len(values) for values in body.values()} == {8}
    for token, offset in zip(body["tokens"], body["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    for token, logprob, top in zip(body["tokens"], body["token_logprobs"], body["top_logprobs"], strict=True):
        assert top[token] == logprob
        assert len(top) == 3


def test_streamed_logprobs_are_the_reply_cut_in_pieces(client: TestClient) -> None:
    reply = post(client, n=3, logprobs=2)
    events = stream(client, n=3, logprobs=2)
    for choice in reply["choices"]:
        parts = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["index"] == choice["index"]]
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part[key]] == values


def test_stop_reason_and_finish_reason(client: TestClient) -> None:
    (choice,) = post(client, max_tokens=2, ignore_eos=True)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["stop_reason"] == "END"


def test_echo_begins_every_choice_with_its_prompt(client: TestClient, engine: ToyEngine) -> None:
    prompts = ["Say: ", "Dis : "]
    reply = post(client, prompt=prompts, n=2, echo=True)
    events = stream(client, prompt=prompts, n=2, echo=True)
    parent = engine.parents[0]
    expected = [prompts[i // 2] + engine.text(parent, i) for i in range(4)]
    assert [choice["text"] for choice in reply["choices"]] == expected
    assert joined(events) == dict(enumerate(expected))


def test_echo_of_token_ids_is_their_text(client: TestClient, engine: ToyEngine) -> None:
    post(client, prompt="héy")
    reply = post(client, prompt=list(engine.parents[0].prompts[0]), echo=True)
    assert reply["choices"][0]["text"].startswith("héy")


@pytest.mark.parametrize("n", [1, 3])
def test_echo_of_zero_tokens_spends_nothing(client: TestClient, engine: ToyEngine, n: int) -> None:
    reply = post(client, n=n, max_tokens=0, echo=True)
    assert [choice["text"] for choice in reply["choices"]] == ["Hello"] * n
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * n
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (5, 0)
    assert joined(stream(client, n=n, max_tokens=0, echo=True)) == dict.fromkeys(range(n), "Hello")
    assert engine.parents == []


def test_token_ids_are_returned_on_request(client: TestClient, engine: ToyEngine) -> None:
    reply = post(client, n=2, return_token_ids=True)
    parent = engine.parents[0]
    for choice in reply["choices"]:
        assert choice["token_ids"] == engine.tokens(parent, choice["index"])
        assert choice["prompt_token_ids"] == list(parent.prompts[0])
    events = stream(client, n=2, return_token_ids=True)
    for index in range(2):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [token for choice in mine for token in choice["token_ids"]] == engine.tokens(parent, index)
        assert mine[0]["prompt_token_ids"] == list(parent.prompts[0])
        assert not any("prompt_token_ids" in choice for choice in mine[1:])


def test_stream_is_the_reply_in_pieces(client: TestClient, engine: ToyEngine) -> None:
    engine.reverse = True
    reply = post(client, n=5)
    events = stream(client, n=5)
    assert joined(events) == {choice["index"]: choice["text"] for choice in reply["choices"]}
    assert {(e["id"], e["created"], e["model"], e["object"]) for e in events} == {
        (events[0]["id"], events[0]["created"], "toy", "text_completion")
    }
    firsts = [next(e for e in events if e["choices"][0]["index"] == index) for index in range(5)]
    assert [event["seed"] for event in firsts] == [7] * 5


def test_every_completion_chunk_counts_more_than_zero_tokens_and_rising(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = stream(client, prompt=["ab", "c"], n=2, stream_options=options)
    counts: dict[int, list[int]] = {}
    for event in events:
        counts.setdefault(event["choices"][0]["index"], []).append(event["usage"]["completion_tokens"])
        assert event["usage"]["prompt_tokens"] == (2 if event["choices"][0]["index"] < 2 else 1)
    for values in counts.values():
        assert values == list(range(1, len(values) + 1))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(values[-1] for values in counts.values())
    assert last["usage"]["prompt_tokens"] == 3


def test_truncation_keeps_the_asked_side(client: TestClient, engine: ToyEngine) -> None:
    for side, kept in (({}, "def"), ({"truncation_side": "left"}, "def"), ({"truncation_side": "right"}, "abc")):
        post(client, prompt="abcdef", truncate_prompt_tokens=3, **side)
        post(client, prompt=kept)
        assert engine.parents[-2].prompts == engine.parents[-1].prompts
    post(client, prompt="x" * 1000, truncate_prompt_tokens=-1, max_tokens=30)
    assert len(engine.parents[-1].prompts[0]) == engine.max_model_len - 30
    assert post(client, prompt="abcdef", truncate_prompt_tokens=3, echo=True)["choices"][0]["text"].startswith("def")


def test_default_length_is_sixteen_clamped_to_the_context(client: TestClient, engine: ToyEngine) -> None:
    post(client, max_tokens=None)
    post(client, prompt="x" * 395, max_tokens=None)
    assert [parent.params.max_tokens for parent in engine.parents] == [16, 5]


def test_usage_counts_prompts_once_and_all_children(client: TestClient, engine: ToyEngine) -> None:
    reply = post(client, n=4)
    generated = sum(engine.length(engine.parents[0], i) for i in range(4))
    assert reply["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": generated,
        "total_tokens": 5 + generated,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_replies_are_json_without_special_numbers(client: TestClient) -> None:
    json.dumps(post(client, n=2, logprobs=3), allow_nan=False)
