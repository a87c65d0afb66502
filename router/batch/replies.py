"""OpenAI's batch output out of the samples of a store: one line per row, all its choices in one reply.

Called when a batch has ended, with the records of a store whose rows kept their `reply`. Holds only the rows of
which some samples have not been seen yet.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]


def lines(samples: Iterable[Record], batch_id: str) -> Iterator[dict[str, Any]]:
    """The lines of the output, in the order in which their last sample was written."""
    rows: defaultdict[int, list[Record]] = defaultdict(list)
    for sample in samples:
        family = rows[sample["row"]]
        family.append(sample)
        if len(family) == sample["row_samples"]:
            yield _line(sorted(rows.pop(sample["row"]), key=lambda s: int(s["index"])), batch_id)


def failed(line: Mapping[str, Any]) -> bool:
    """Whether a line belongs into the file of errors."""
    return bool(line["response"]["status_code"] != 200)


def line_id(batch_id: str, row: int) -> str:
    """What names the line of a row."""
    return f"batch_req_{batch_id}_{row}"


def _line(family: list[Record], batch_id: str) -> dict[str, Any]:
    first = family[0]
    errors = [sample["error"] for sample in family if sample["error"] is not None]
    status, body = (errors[0]["status"], _error(errors[0])) if errors else (200, _reply(family))
    name = line_id(batch_id, first["row"])
    response = {"status_code": status, "request_id": name, "body": body}
    return {"id": name, "custom_id": first["id"], "response": response, "error": None}


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    """As the routes answer: a record always has a code, a reply may have none."""
    code = None if error["code"] == error["type"] else error["code"]
    return {"error": {**{name: error[name] for name in ("message", "type", "param")}, "code": code}}


def _reply(family: list[Record]) -> dict[str, Any]:
    """One-choice replies differ in their choice and their completion tokens alone."""
    parts = [json.loads(sample["reply"]) for sample in family]
    whole: dict[str, Any] = parts[0]
    usage = whole["usage"]
    completion = sum(part["usage"]["completion_tokens"] for part in parts)
    usage |= {"completion_tokens": completion, "total_tokens": usage["prompt_tokens"] + completion}
    return {**whole, "choices": [choice for part in parts for choice in part["choices"]]}
