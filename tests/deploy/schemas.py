"""What a schema does not know, for schemas that let unknown keys pass."""

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel


def unknown_keys(model: type[BaseModel], document: dict[str, Any], path: str = "") -> list[str]:
    """The keys of `document` that are no field of the pydantic `model`, at any depth, with the way to them."""
    found = []
    for key, value in document.items():
        if (field := model.model_fields.get(key)) is None:
            found.append(f"{path}{key}")
            continue
        for inner in _models(field.annotation):
            for part in value if isinstance(value, list) else [value]:
                found += unknown_keys(inner, part, f"{path}{key}.") if isinstance(part, dict) else []
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
