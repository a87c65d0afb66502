"""No known field is ignored: unsupported ones are refused by name, their neutral values are not."""

import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from router.fields import UNSUPPORTED
from router.protocol import ChatCompletionRequest, CompletionRequest
from tests.router.wire import document

ROUTES: dict[str, tuple[type[CompletionRequest] | type[ChatCompletionRequest], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "Hello"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hello"}]}),
}
LOUD: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "use_beam_search": True,
    "modalities": ["text", "audio"],
    "priority": 5,
    "length_penalty": True,
    "echo": True,
    "prompt_logprobs": 0,
}
CASES = [(route, field) for route, (model, _) in ROUTES.items() for field in UNSUPPORTED.keys() - model.model_fields]


@pytest.mark.parametrize(("route", "field"), sorted(CASES))
def test_an_unsupported_field_is_refused_by_name(client: TestClient, route: str, field: str) -> None:
    response = client.post(route, json={**ROUTES[route][1], field: LOUD.get(field, "something")})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(("route", "field"), sorted(CASES))
def test_its_neutral_values_are_accepted(client: TestClient, route: str, field: str) -> None:
    for neutral in UNSUPPORTED[field]:
        response = client.post(route, json={**ROUTES[route][1], field: neutral})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_field_is_accepted_and_named_in_the_debug_log(
    client: TestClient, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "router.fields")
    assert client.post(route, json={**ROUTES[route][1], "surprise": 1}).status_code == 200
    assert "surprise" in caplog.text


def _properties(schemas: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    if "$ref" in schema:
        return _properties(schemas, schemas[schema["$ref"].rsplit("/", 1)[1]])
    found = set(schema.get("properties", ()))
    return found.union(*(_properties(schemas, part) for part in schema.get("allOf", ())))


@pytest.mark.parametrize(
    ("route", "name"),
    [("/v1/completions", "CreateCompletionRequest"), ("/v1/chat/completions", "CreateChatCompletionRequest")],
)
def test_every_field_of_the_official_document_is_known(route: str, name: str) -> None:
    schemas = document()["components"]["schemas"]
    assert _properties(schemas, schemas[name]) - ROUTES[route][0].model_fields.keys() <= UNSUPPORTED.keys()
