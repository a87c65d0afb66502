"""Reading replies as a careful client would: parsing events, and validating against the official document."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

DOCUMENT = Path(__file__).parents[2].parent / "shared" / "schemas" / "openai-openapi.json"


def data_events(body: str) -> list[str]:
    """The payloads of all events of a stream, checked for the framing rules."""
    assert body.endswith("\n\n")
    events = [event for event in body[:-2].split("\n\n") if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event[len("data: ") :] for event in events]


def chunks(body: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ended well."""
    *events, last = data_events(body)
    assert last == "[DONE]"
    parsed = [json.loads(event) for event in events]
    assert not any("error" in chunk for chunk in parsed), parsed[-1]
    return parsed


def _null_repaired(node: Any) -> Any:
    """The document says 3.1 but marks nulls the 3.0 way; as "this or null" a 2020-12 validator understands it."""
    if isinstance(node, list):
        return [_null_repaired(item) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {key: _null_repaired(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if node.get("nullable") is True else rest


@cache
def document() -> dict[str, Any]:
    if not DOCUMENT.is_file():
        pytest.skip("the official API document is not beside the repository (../shared/schemas)")
    return json.loads(DOCUMENT.read_text())


@cache
def _validator(name: str) -> Draft202012Validator:
    components = _null_repaired(document()["components"])
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": components})


def assert_official(name: str, value: Any) -> None:
    """`value` is valid under the official schema called `name`. Skips the test without the document."""
    errors = [f"{error.json_path}: {error.message[:200]}" for error in _validator(name).iter_errors(value)]
    assert errors == []
