"""A folder of files and batches, an app over it that can be started again and again, and a clock of its own."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch
from starlette.testclient import TestClient

from router.app import create_app
from router.batch.runner import RunOptions
from router.batch_executor import BatchExecutor, Timing
from router.limits import RouterLimits
from tests.router.conftest import wait_for
from tests.router.toy_engine import ToyEngine

FAST = Timing(poll_s=0.01, retry_s=0.05, sweep_s=0.0, run=RunOptions(backoff_s=0.001, flush_s=0.01, patience_s=5))
ENDED = ("completed", "failed", "expired", "cancelled")


class Site:
    """`ahead` is how far its clock is before the real one."""

    def __init__(self, folder: Path, engine: ToyEngine, **limits: int) -> None:
        self.folder = folder
        self.engine = engine
        self.limits = RouterLimits(**{"max_n": 50, "max_children": 100, **limits})
        self.ahead = 0.0
        self.http: TestClient
        self.executor: BatchExecutor

    def now(self) -> float:
        return time.time() + self.ahead

    @contextmanager
    def open(self, *, running: bool = True) -> Iterator[openai.OpenAI]:
        """The official client on an app over the folder; not `running`: one whose batches stay as they are."""
        app = create_app(self.engine, self.limits, self.folder, now=self.now, timing=FAST)
        self.executor = app.state.batches
        client = TestClient(app, raise_server_exceptions=False)
        with openai.OpenAI(api_key="x", base_url="http://site/v1", http_client=client, max_retries=0) as api:
            self.http = client
            if running:
                with client:
                    yield api
            else:
                yield api


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    body = {"prompt": f"prompt of {custom_id}", "max_tokens": 5, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(lines: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in lines)


def submit(api: openai.OpenAI, lines: Sequence[Any] | bytes, **fields: Any) -> Batch:
    """A new batch of these lines."""
    content = lines if isinstance(lines, bytes) else jsonl(lines)
    file = api.files.create(file=("input.jsonl", content), purpose="batch")
    fields = {"endpoint": "/v1/completions", "completion_window": "24h", **fields}
    return api.batches.create(input_file_id=file.id, **fields)


def ended(api: openai.OpenAI, batch: Batch, seconds: float = 20.0) -> Batch:
    """The batch once it has ended."""

    def done() -> bool:
        nonlocal batch
        batch = api.batches.retrieve(batch.id)
        return batch.status in ENDED

    wait_for(done, seconds)
    return batch


def read(api: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a file by custom_id, each of which must be there once."""
    if file_id is None:
        return {}
    entries = [json.loads(text) for text in api.files.content(file_id).text.splitlines()]
    assert len({entry["custom_id"] for entry in entries}) == len({entry["id"] for entry in entries}) == len(entries)
    return {entry["custom_id"]: entry for entry in entries}
