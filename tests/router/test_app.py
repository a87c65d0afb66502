"""Routes beside generation, and what holds for all of them: ids, error shape, limits, layers."""

import json
import subprocess
import sys
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from router.middleware import ProxyNamesRequests
from tests.router.toy_engine import ToyEngine
from tests.router.wire import assert_official

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}


def test_importing_the_app_imports_no_tensors_and_no_ray() -> None:
    code = "import sys, router.app; print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_models_are_listed_and_found(client: TestClient, engine: ToyEngine) -> None:
    listed = client.get("/v1/models").json()
    assert_official("ListModelsResponse", listed)
    (entry,) = listed["data"]
    assert (entry["id"], entry["max_model_len"], entry["exact"]) == ("toy", engine.max_model_len, True)
    assert client.get("/v1/models/toy").json() == entry
    missing = client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_health_follows_the_engine(client: TestClient, engine: ToyEngine) -> None:
    for up, status in ((True, 200), (False, 503)):
        engine.up = up
        response = client.get("/health")
        assert (response.status_code, response.content) == (status, b"")


def test_metrics_and_version(client: TestClient) -> None:
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    assert "choral_toy 1\n" in response.text
    assert "choral_admission_children_in_use 0\n" in response.text
    assert client.get("/version").json().keys() == {"version"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/v1/completions/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
def test_unknown_paths_and_methods_answer_in_the_official_shape(
    client: TestClient, method: str, path: str, status: int
) -> None:
    response = client.request(method, path)
    assert response.status_code == status
    assert_official("ErrorResponse", response.json())


@pytest.mark.parametrize("content", ["{", "", "[]", '"x"', "null", '{"prompt": "a" "b"}', "\xff", "[" * 100_00])
def test_a_malformed_body_is_a_400(client: TestClient, content: str) -> None:
    data = content.encode("latin-1")
    response = client.post("/v1/completions", content=data, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_wrong_content_type_is_a_400_saying_so(client: TestClient, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = client.post("/v1/completions", content=json.dumps(BODY).encode(), headers=headers)
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
def test_json_content_types_are_taken(client: TestClient, kind: str) -> None:
    response = client.post("/v1/completions", content=json.dumps(BODY).encode(), headers={"content-type": kind})
    assert response.status_code == 200


def test_a_large_body_is_a_413_whether_declared_or_not(client: TestClient, engine: ToyEngine) -> None:
    data = json.dumps({**BODY, "user": "x" * 50_000}).encode()
    headers = {"content-type": "application/json"}
    pieces = (data[i : i + 1000] for i in range(0, len(data), 1000))
    for content in (data, pieces):
        response = client.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 413
        assert_official("ErrorResponse", response.json())
    assert engine.parents == []


def test_lone_surrogates_are_bad_requests(client: TestClient) -> None:
    for content in (
        '{"prompt": "\\ud800"}',
        '{"prompt": "x", "model": "\\ud800"}',
        '{"prompt": "x", "stop": "\\ud800"}',
        '{"prompt": "x", "logit_bias": {"\\ud800": 1}}',
    ):
        response = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
    chat = '{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}]}'
    response = client.post("/v1/chat/completions", content=chat, headers={"content-type": "application/json"})
    assert response.status_code == 200, "this template does not read names"


def test_the_request_id_of_the_client_is_used_and_returned(client: TestClient, engine: ToyEngine) -> None:
    by_header = client.post("/v1/completions", json=BODY, headers={"x-request-id": "a"})
    by_body = client.post("/v1/completions", json={**BODY, "request_id": "b"}, headers={"x-request-id": "a"})
    drawn = client.post("/v1/completions", json=BODY)
    for response, named, header in ((by_header, "a", "a"), (by_body, "b", "a")):
        assert response.json()["id"] == f"cmpl-{named}"
        assert response.headers.get_list("x-request-id") == [header]
    assert drawn.json()["id"] == f"cmpl-{drawn.headers['x-request-id']}"
    chat = {"messages": [{"role": "user", "content": "x"}], "request_id": "c"}
    assert client.post("/v1/chat/completions", json=chat).json()["id"] == "chatcmpl-c"
    assert client.get("/nowhere", headers={"x-request-id": "a"}).headers.get_list("x-request-id") == ["a"]
    for bad, param in (({"headers": {"x-request-id": "two words"}}, "X-Request-Id"), ({}, "request_id")):
        body = BODY if bad else {**BODY, "request_id": "two words"}
        response = client.post("/v1/completions", json=body, **bad)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_behind_a_proxy_that_names_requests_the_app_adds_no_second_name(app: FastAPI, engine: ToyEngine) -> None:
    client = TestClient(ProxyNamesRequests(app), raise_server_exceptions=False)
    engine.start_error = RuntimeError("a bug")
    for path, status in (("/v1/completions", 500), ("/nowhere", 404)):
        response = client.post(path, json=BODY)
        assert (response.status_code, "x-request-id" in response.headers) == (status, False)


def test_one_public_id_twice_is_two_parents(client: TestClient, engine: ToyEngine) -> None:
    for _ in range(2):
        assert client.post("/v1/completions", json={**BODY, "request_id": "a"}).status_code == 200
    assert len({parent.parent_id for parent in engine.parents}) == 2


def test_counts_are_bounded(client: TestClient, engine: ToyEngine) -> None:
    response = client.post("/v1/completions", json={**BODY, "prompt": ["x"] * 51})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert engine.parents == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x" * 400, "max_tokens": None}, "prompt"),
        ({"prompt": "x" * 399, "max_tokens": 2}, "max_tokens"),
        ({"prompt": ["x", "y" * 399], "max_tokens": 2}, "max_tokens"),
    ],
)
def test_what_exceeds_the_context_is_said_with_its_code(client: TestClient, fields: dict[str, Any], param: str) -> None:
    response = client.post("/v1/completions", json=fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    chat = {"messages": [{"role": "user", "content": "x" * 400}]}
    assert client.post("/v1/chat/completions", json=chat).json()["error"]["code"] == "context_length_exceeded"


def test_tokenize_and_detokenize_are_inverse(client: TestClient, engine: ToyEngine) -> None:
    reply = client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) == 6
    assert reply["max_model_len"] == engine.max_model_len
    assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "héllo"}
    assert client.post("/tokenize", json={"prompt": "a"}).json()["token_strs"] is None


def test_tokenize_of_a_chat_is_the_prompt_it_makes(client: TestClient, engine: ToyEngine) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    client.post("/v1/chat/completions", json=chat)
    assert client.post("/tokenize", json=chat).json()["tokens"] == list(engine.parents[0].prompts[0])


@pytest.mark.parametrize("body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}])
def test_tokenize_wants_one_input(client: TestClient, body: dict[str, Any]) -> None:
    assert client.post("/tokenize", json=body).status_code == 400


def test_detokenize_refuses_ids_outside_the_vocabulary(client: TestClient) -> None:
    assert client.post("/detokenize", json={"tokens": [300]}).json()["error"]["param"] == "tokens"


def test_the_schema_declares_errors_and_no_422(app: FastAPI) -> None:
    for path, methods in app.openapi()["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            if path.startswith("/v1/"):
                assert {"400", "404", "429", "503"} <= operation["responses"].keys()
