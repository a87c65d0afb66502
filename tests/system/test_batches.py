"""A batch on a real cluster that is killed in the middle: the next server over the same folder ends it."""

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.system.conftest import serve

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

ENDED = ("completed", "failed", "expired", "cancelled")
LINES: list[dict[str, Any]] = [
    {
        "custom_id": f"r{i}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": f"Number {i} is", "n": 1 + i % 4, "max_tokens": 8 + i % 9, "logprobs": 1},
    }
    for i in range(30)
]


def submit(api: openai.OpenAI) -> Batch:
    content = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    file = api.files.create(file=("in.jsonl", content), purpose="batch")
    return api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def wait(api: openai.OpenAI, batch: Batch, completed: int) -> Batch:
    """The batch once so many lines are done or it has ended."""
    deadline = time.monotonic() + 120
    while True:
        batch = api.batches.retrieve(batch.id)
        if batch.status in ENDED or (batch.request_counts and batch.request_counts.completed >= completed):
            return batch
        assert time.monotonic() < deadline, f"the batch is still {batch.status}"
        time.sleep(0.1)


def test_c2_a_batch_goes_on_after_the_whole_app_was_killed(embedded_model: Path, tmp_path: Path) -> None:
    """Every line is there once, and each reply is what the route answers with its seed."""
    options = ("--files-dir", str(tmp_path / "files"), "--batch-children", "4", "--no-dashboard")
    with serve(*options) as first:
        batch = submit(first.client)
        batch = wait(first.client, batch, 5)
        assert batch.status == "in_progress"
        first.kill()
    with serve(*options) as second:
        api = second.client
        again = api.batches.retrieve(batch.id)
        assert again.request_counts is not None and again.request_counts.completed < len(LINES)
        batch = wait(api, batch, len(LINES) + 1)
        assert batch.status == "completed" and batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (len(LINES), 0)
        entries = [json.loads(text) for text in api.files.content(str(batch.output_file_id)).text.splitlines()]
        assert sorted(entry["custom_id"] for entry in entries) == sorted(line["custom_id"] for line in LINES)
        replies = {entry["custom_id"]: entry["response"]["body"] for entry in entries}
        for line in LINES:
            reply = replies[line["custom_id"]]
            body = {**line["body"], "seed": reply["seed"]}
            assert httpx.post(f"{second.url}{line['url']}", json=body, timeout=60).json()["choices"] == reply["choices"]
        second.wait_until_idle(5)


def test_an_interrupt_stops_a_batch_at_once(embedded_model: Path, tmp_path: Path) -> None:
    """Draining does not wait for the batch, which stays unfinished on disk. Before that, what else Serve may change:
    each reply has one id, and files over the limit of other bodies come back as they were."""
    options = ("--files-dir", str(tmp_path / "files"), "--batch-children", "2", "--no-dashboard")
    with serve(*options) as server:
        large = bytes(range(256)) * (40 * 4096)
        file = server.client.files.create(file=("large", large), purpose="batch")
        assert server.client.files.content(file.id).read() == large
        batch = wait(server.client, submit(server.client), 2)
        assert batch.status == "in_progress"
        for path, status in (("/v1/models", 200), (f"/v1/batches/{batch.id}", 200), ("/v1/nowhere", 404)):
            reply = httpx.get(server.url + path, headers={"x-request-id": "mine"}, timeout=30)
            assert (reply.status_code, reply.headers.get_list("x-request-id")) == (status, ["mine"])
    (saved,) = (tmp_path / "files" / "batches").glob("batch_*/batch.json")
    assert json.loads(saved.read_text())["status"] == "in_progress"
