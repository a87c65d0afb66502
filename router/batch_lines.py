"""The lines of a batch: its input, what is wrong with it, and the lines of its two output files.

An input is taken as a whole or not at all, so that a batch either runs or says what to mend; what only its route can
tell of a line becomes that line's error. Plain functions over files and samples; called by `router.batch_executor`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.batch import replies
from router.batch.rows import RowReader
from router.batch_store import Ending, InputError
from router.errors import ApiError, Fault
from router.limits import RouterLimits

MAX_LISTED = 100
"""Lines at fault that a failed batch names."""
_NOT_RUN: Mapping[Ending, dict[str, str]] = {
    "cancelled": {"code": "batch_cancelled", "message": "the batch was cancelled before this request had run"},
    "expired": {"code": "batch_expired", "message": "the batch expired before this request had run"},
}


def read(path: Path) -> Iterator[bytes]:
    """The lines that are not blank."""
    with path.open("rb") as stream:
        yield from (line for line in stream if not line.isspace())


def check(path: Path, reader: RowReader, limits: RouterLimits) -> tuple[int, list[InputError]]:
    """How many requests the input has, and what keeps it from being run: nothing at all, or the first MAX_LISTED."""
    errors: list[InputError] = []
    total = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            total += 1
            if (error := _fault(total, line, reader, limits)) is not None:
                errors.append(_error(error, number))
            if len(errors) >= MAX_LISTED or total > limits.max_batch_lines:
                break
    if total == 0:
        errors.append(InputError(code="empty_file", message="the file has no requests", param="input_file_id"))
    return total, errors


def gone() -> InputError:
    """The one fault of an input that was deleted."""
    return InputError(code="file_not_found", message="the input file does not exist any more", param="input_file_id")


def _fault(total: int, line: bytes, reader: RowReader, limits: RouterLimits) -> ApiError | None:
    if total > limits.max_batch_lines:
        return ApiError(Fault.INVALID, f"the file has more than {limits.max_batch_lines} requests", "input_file_id")
    if len(line) > limits.max_body_bytes:
        return ApiError(Fault.INVALID, f"the line is longer than {limits.max_body_bytes} bytes")
    _, fields = reader.identify(total, line)
    if isinstance(fields, ApiError):
        return fields
    if not isinstance(fields.get("custom_id"), str):
        return ApiError(Fault.INVALID, "custom_id must be a text that is not empty", "custom_id")
    for name in ("method", "url", "body"):
        if name not in fields:
            return ApiError(Fault.INVALID, f"{name} is missing", name)
    try:
        reader.request(fields)
    except ApiError as error:
        return error
    return None


def _error(error: ApiError, line: int) -> InputError:
    code = "invalid_json_line" if error.param is None else f"invalid_{error.param}"
    return InputError(code=code, message=error.message, param=error.param, line=line)


@dataclass(slots=True)
class Tally:
    """What went into the files of a batch."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    output_tokens: int = 0

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage of a batch. What was cached is not told: it would change from run to run."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


def answers(samples: Iterable[replies.Record], batch_id: str, tally: Tally) -> Iterator[bytes]:
    """The output file: requests all of whose samples are there."""
    for line in replies.lines(samples, batch_id):
        if not replies.failed(line):
            usage = line["response"]["body"]["usage"]
            tally.completed += 1
            tally.input_tokens += usage["prompt_tokens"]
            tally.output_tokens += usage["completion_tokens"]
            yield _json(line)


def failures(
    samples: Iterable[replies.Record], inputs: Iterable[bytes], batch_id: str, ending: Ending, tally: Tally
) -> Iterator[bytes]:
    """The error file: requests that failed, and those that were not run to their end."""
    seen = set()
    for line in replies.lines(samples, batch_id):
        seen.add(line["custom_id"])
        if replies.failed(line):
            tally.failed += 1
            yield _json(line)
    for number, raw in enumerate(inputs):
        custom_id = json.loads(raw)["custom_id"]
        if custom_id not in seen:
            tally.failed += 1
            name = replies.line_id(batch_id, number)
            yield _json({"id": name, "custom_id": custom_id, "response": None, "error": _NOT_RUN[ending]})


def _json(line: Mapping[str, Any]) -> bytes:
    """ASCII only, so that no client splits a line at a Unicode line separator."""
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"
