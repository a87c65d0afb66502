"""What a batch writes: one record per sample, success or error, and its form in Parquet and JSON.

`row` and `index` name a sample: the row's number in the input and the choice index in the row. Made by `runner`, kept
by `store`, put together into OpenAI's replies by `replies`. Knows nothing of files or engines.
"""

import json
import math
from dataclasses import dataclass, fields, replace
from typing import Any

import pyarrow as pa

from aggregation.results import ChoiceDelta, ParentResult, Usage
from router.batch.rows import Row
from router.errors import ApiError

ERROR = pa.struct([(name, pa.string()) for name in ("type", "code", "param", "message")] + [("status", pa.int32())])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("sample", pa.int64()),
        ("seed", pa.int64()),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("cumulative_logprob", pa.float64()),
        ("finish_reason", pa.string()),
        ("model_fingerprint", pa.string()),
        ("error", ERROR),
        ("row", pa.int64()),
        ("index", pa.int32()),
        ("row_samples", pa.int32()),
        ("reply", pa.string()),
    ]
)
"""Of every shard. `row_samples` says how many samples the row will have, `reply` is what `replies` needs, or null."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of the output. The fields are the columns of `SCHEMA`."""

    id: str
    row: int
    index: int = 0
    row_samples: int = 1
    sample: int | None = None
    seed: int | None = None
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    model_fingerprint: str
    error: dict[str, Any] | None = None
    reply: str | None = None

    def record(self) -> dict[str, Any]:
        """The line as plain data."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = tuple(SCHEMA.names)
assert set(COLUMNS) == {field.name for field in fields(Sample)}


def success(row: Row, choice: ChoiceDelta, fingerprint: str) -> Sample:
    """A finished choice, whose index is that of the row. Its log-probabilities are those of the drawn tokens."""
    logprobs = choice.drawn_logprobs
    if choice.logprobs is not None:
        logprobs = [position.drawn.logprob for position in choice.logprobs]
    return Sample(
        id=row.id,
        row=row.number,
        index=choice.index,
        row_samples=row.parent.num_children,
        sample=row.parent.sample_number(choice.index),
        seed=row.parent.params.seed,
        text=choice.text,
        token_ids=choice.token_ids,
        logprobs=logprobs,
        cumulative_logprob=None if logprobs is None else math.fsum(logprobs),
        finish_reason=choice.finish_reason,
        model_fingerprint=fingerprint,
        reply=_reply(row, choice) if row.style is not None else None,
    )


def _reply(row: Row, choice: ChoiceDelta) -> str:
    """The reply as it would be if this were its only choice."""
    assert row.style is not None
    usage = Usage(sum(map(len, row.parent.prompts)), choice.completion_tokens, 0)
    body = row.style.reply(row.plan, ParentResult([choice], usage))
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))


def refused(number: int, row_id: str, error: ApiError, fingerprint: str) -> Sample:
    """A row that cannot be sampled at all: its one record."""
    return Sample(
        id=row_id, row=number, finish_reason="error", model_fingerprint=fingerprint, error=error_fields(error)
    )


def failed(row: Row, index: int, error: ApiError, fingerprint: str) -> Sample:
    """A sample that was given up."""
    return replace(
        refused(row.number, row.id, error, fingerprint),
        index=index,
        row_samples=row.parent.num_children,
        sample=row.parent.sample_number(index),
        seed=row.parent.params.seed,
    )


def error_fields(error: ApiError) -> dict[str, Any]:
    """The column of an error: OpenAI's four fields and the status they would come with."""
    fields: dict[str, Any] = error.body()["error"]
    return {**fields, "code": fields["code"] or fields["type"], "status": error.fault.value.status}
