"""Types and ranges of every field, on both routes: 400 naming the field, or through to the engine."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.router.toy_engine import VOCAB, ToyEngine

ROUTES = {
    "/v1/completions": {"prompt": "Hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}
BIG = 2**63

COMMON_BAD: dict[str, list[Any]] = {
    "model": [3, ""],
    "n": [0, -1, 65, 10**30, 1.5, "2", True, [1]],
    "max_tokens": [-1, 10**30, 1.5, "5", 1000],
    "temperature": [-0.01, 2.01, "1", True, 1e400, float("nan")],
    "top_p": [0, -0.1, 1.01, "1"],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1],
    "logit_bias": [[1], {"5": 101}, {"5": -101}, {"5": "x"}, {"5": True}, {"x": 1}, {"05": 1}, {"-1": 1}, {"٣": 1}],
    "stop": ["", [""], ["a", ""], 3, ["a", 3], ["a"] * 5],
    "seed": [BIG, -BIG - 1, 1.5, "1"],
    "stream": ["true", 1],
    "stream_options": [{}, {"include_usage": True}, {"include_usage": 1}, "x"],
    "user": [3],
    "metadata": ["x"],
    "store": ["yes"],
    "service_tier": [1],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 1e400],
    "min_tokens": [-1, 9],
    "stop_token_ids": [[-1], [VOCAB], ["x"], 3],
    "allowed_token_ids": [[], [VOCAB], [-1]],
    "ignore_eos": [1, "true"],
    "include_stop_str_in_output": ["x"],
    "skip_special_tokens": [0],
    "spaces_between_special_tokens": [0],
    "add_special_tokens": [0],
    "truncate_prompt_tokens": [-2, "x"],
    "truncation_side": ["top"],
    "return_token_ids": [1],
    "samples": [[], [-1], [1, 1], [2**31], "0", [0.5], list(range(65))],
    "request_id": ["", "white space", "é", "x" * 129, 5],
    "best_of": [0, 2, "x"],
}
OWN_BAD: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {
        "prompt": [None, 5, [], "", [""], ["a", ""], [[]], [[1], []], ["a", 1], [1, "a"], [-1], [VOCAB], [[VOCAB]], {}],
        "logprobs": [-1, 21, True, "5"],
        "echo": [1],
        "max_tokens": [0],
    },
    "/v1/chat/completions": {
        "messages": [
            None,
            [],
            "Hello",
            [{"role": "user"}],
            [{"content": "x"}],
            [{"role": "user", "content": None}],
            [{"role": "user", "content": []}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        ],
        "logprobs": [1, "true"],
        "top_logprobs": [-1, 21, 5],
        "max_tokens": [0],
        "max_completion_tokens": [0, -1, 1000],
        "add_generation_prompt": [1],
        "continue_final_message": ["x"],
        "chat_template_kwargs": ["x", {"messages": []}],
    },
}
CASES = [(route, field, value) for route in ROUTES for field, values in COMMON_BAD.items() for value in values]
CASES += [(r, field, value) for r, fields in OWN_BAD.items() for field, values in fields.items() for value in values]


@pytest.mark.parametrize(("route", "field", "value"), CASES)
def test_a_bad_value_is_a_400_naming_its_field(
    client: TestClient, engine: ToyEngine, route: str, field: str, value: Any
) -> None:
    body = {**ROUTES[route], "max_tokens": 8, field: value}
    response = client.post(route, content=_json(body), headers={"content-type": "application/json"})
    if field == "model" and isinstance(value, str):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
    else:
        assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 2000
    assert engine.parents == []


def _json(value: Any) -> str:
    """JSON with the special numbers that Python, unlike JSON, can write."""
    import json

    return json.dumps(value)


GOOD: dict[str, list[Any]] = {
    "model": [None, "toy"],
    "n": [None, 1, 64],
    "max_tokens": [None, 1, 300],
    "temperature": [None, 0, 2, 0.5],
    "top_p": [None, 1, 1e-9],
    "presence_penalty": [None, -2, 2],
    "frequency_penalty": [None, -2, 2],
    "logit_bias": [None, {}, {"0": 100, "299": -100}],
    "stop": [None, [], "a", ["a", "b", "c", "d"]],
    "seed": [None, -1, 0, BIG - 1, -BIG],
    "stream": [None, False],
    "stream_options": [None],
    "user": [None, "me"],
    "metadata": [None, {"a": "b"}],
    "store": [None, True],
    "service_tier": [None, "auto"],
    "top_k": [None, -1, 0, 50],
    "min_p": [None, 0, 1],
    "repetition_penalty": [None, 0.1, 2],
    "min_tokens": [None, 0, 8],
    "stop_token_ids": [None, [], [0, 299]],
    "allowed_token_ids": [None, [0, 299]],
    "ignore_eos": [None, True],
    "truncate_prompt_tokens": [None, -1, 3],
    "samples": [None, [0], [5, 3, 2**31 - 1]],
    "request_id": [None, "abc"],
    "best_of": [None, 1],
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in GOOD.items() for value in values])
def test_a_good_value_is_taken(client: TestClient, engine: ToyEngine, route: str, field: str, value: Any) -> None:
    response = client.post(route, json={**ROUTES[route], "max_tokens": 8, field: value})
    assert response.status_code == 200, response.text
    assert len(engine.parents) == 1


@pytest.mark.parametrize("route", ROUTES)
def test_every_value_reaches_the_engine(client: TestClient, engine: ToyEngine, route: str) -> None:
    body = {
        "n": 2,
        "max_tokens": 9,
        "seed": 5,
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.75,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "min_tokens": 2,
        "stop_token_ids": [4, 5],
        "ignore_eos": True,
        "logit_bias": {"3": 1.5},
        "allowed_token_ids": [3, 4],
        "stop": ["x", "yz"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    assert client.post(route, json={**ROUTES[route], **body}).status_code == 200
    (parent,) = engine.parents
    for name in set(body) - {"n", "stop", "logit_bias"}:
        holder = parent.text if hasattr(parent.text, name) else parent.params
        value = getattr(holder, name)
        assert (list(value) if isinstance(value, tuple) else value) == body[name]
    assert parent.text.stop == ("x", "yz")
    assert parent.params.logit_bias == ((3, 1.5),)
    assert parent.samples == (0, 1)


@pytest.mark.parametrize("route", ROUTES)
def test_bad_bias_keys_are_all_named(client: TestClient, route: str) -> None:
    bad = [str(VOCAB + i) for i in range(40)]
    response = client.post(route, json={**ROUTES[route], "logit_bias": {**dict.fromkeys(bad, 1), "3": 1}})
    message = response.json()["error"]["message"]
    assert all(key in message for key in bad)


@pytest.mark.parametrize("route", ROUTES)
def test_samples_and_n_must_agree(client: TestClient, route: str) -> None:
    for n, status in ((None, 200), (2, 200), (1, 400), (3, 400)):
        response = client.post(route, json={**ROUTES[route], "samples": [4, 9], "n": n})
        assert response.status_code == status
    assert response.json()["error"]["param"] == "n"


def test_best_of_equal_to_n_asks_for_nothing(client: TestClient) -> None:
    for fields, status in (({"n": 3, "best_of": 3}, 200), ({"n": 3, "best_of": 4}, 400), ({"best_of": 1}, 200)):
        assert client.post("/v1/completions", json={"prompt": "x", **fields}).status_code == status


def test_one_long_list_makes_one_short_error(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": [1] * 5000 + ["x"] * 1000})
    assert response.status_code == 400
    assert len(response.content) < 1000


def test_greedy_with_several_choices_is_allowed(client: TestClient, engine: ToyEngine) -> None:
    assert client.post("/v1/completions", json={"prompt": "x", "n": 3, "temperature": 0}).status_code == 200
    assert engine.parents[0].params.greedy
