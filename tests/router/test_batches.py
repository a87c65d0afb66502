"""/v1/batches as clients see it: the official client runs batches end to end, and what is refused says why."""

from typing import Any

import openai
import pytest

from router.batch.rows import RowReader, RowRules
from router.serving import Serving
from tests.router.batch_site import Site, ended, line, read, submit
from tests.router.conftest import wait_for
from tests.router.wire import assert_official

CHAT = {"method": "POST", "url": "/v1/chat/completions"}


def bodies(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    assert all(entry["response"]["status_code"] == 200 and entry["error"] is None for entry in entries.values())
    return {custom_id: entry["response"]["body"] for custom_id, entry in entries.items()}


def test_a_batch_end_to_end(site: Site) -> None:
    lines = [line(f"r{i}", n=3) for i in range(8)] + [line("hot", temperature=9), line("long", prompt="x" * 400)]
    with site.open() as api:
        made = submit(api, lines, metadata={"k": "v"})
        assert (made.status, made.model, made.object) == ("validating", "toy", "batch")
        assert made.expires_at == made.created_at + 86_400
        batch = ended(api, made)
        assert batch.status == "completed" and batch.request_counts is not None and batch.usage is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (10, 8, 2)
        assert batch.metadata == {"k": "v"} and batch.errors is None
        for moment in (batch.in_progress_at, batch.finalizing_at, batch.completed_at):
            assert moment is not None and moment >= batch.created_at
        replies, errors = bodies(read(api, batch.output_file_id)), read(api, batch.error_file_id)
        assert replies.keys() == {f"r{i}" for i in range(8)}
        assert {key: entry["response"]["body"]["error"]["param"] for key, entry in errors.items()} == {
            "hot": "temperature",
            "long": "prompt",
        }
        completion_tokens = sum(reply["usage"]["completion_tokens"] for reply in replies.values())
        assert batch.usage.output_tokens == completion_tokens
        assert batch.usage.input_tokens == sum(reply["usage"]["prompt_tokens"] for reply in replies.values())
        for file_id in (batch.output_file_id, batch.error_file_id):
            assert file_id is not None
            file = api.files.retrieve(file_id)
            assert (file.purpose, file.expires_at) == ("batch_output", None)


def test_replies_are_those_of_the_route_with_the_seed_they_tell(site: Site) -> None:
    """C2: a line without a seed gets one derived from the batch and its custom_id."""
    messages = [{"role": "user", "content": "Hello"}]
    fields = {"messages": messages, "n": 2, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    lines = [
        {"custom_id": "free", **CHAT, "body": fields},
        {"custom_id": "fixed", **CHAT, "body": {**fields, "seed": 7, "return_token_ids": True}},
    ]
    with site.open() as api:
        batch = ended(api, submit(api, lines, endpoint="/v1/chat/completions"))
        replies = bodies(read(api, batch.output_file_id))
        assert replies["fixed"]["seed"] == 7
        derived = RowReader(Serving.load(site.engine, site.limits), RowRules(key=batch.id))
        for entry in lines:
            reply = replies[entry["custom_id"]]
            assert_official("CreateChatCompletionResponse", reply)
            again = site.http.post(entry["url"], json={**entry["body"], "seed": reply["seed"]}).json()
            assert again["choices"] == reply["choices"]
            assert again["usage"]["total_tokens"] == reply["usage"]["total_tokens"]
        assert derived.seed("free") == replies["free"]["seed"]


def test_error_lines_hold_what_the_route_answers(site: Site) -> None:
    bad: list[dict[str, Any]] = [
        {"temperature": 9},
        {"model": "other"},
        {"prompt": "x" * 400},
        {"tools": [{}]},
        {"n": 51},
        {"prompt": []},
    ]
    lines = [line(str(i), **fields) for i, fields in enumerate(bad)]
    with site.open() as api:
        errors = read(api, ended(api, submit(api, lines)).error_file_id)
        for entry in lines:
            answer = site.http.post("/v1/completions", json=entry["body"])
            response = errors[entry["custom_id"]]["response"]
            assert (response["status_code"], response["body"]) == (answer.status_code, answer.json())


@pytest.mark.parametrize("fields", [{"stream": True}, {"echo": True}, {"request_id": "mine"}])
def test_what_a_batch_cannot_do_is_an_error_of_its_line(site: Site, fields: dict[str, Any]) -> None:
    with site.open() as api:
        batch = ended(api, submit(api, [line("a", **fields), line("b")]))
        (entry,) = read(api, batch.error_file_id).values()
        assert (entry["custom_id"], entry["response"]["body"]["error"]["param"]) == ("a", *fields)


@pytest.mark.parametrize(
    ("content", "code", "param", "at"),
    [
        (b"", "empty_file", "input_file_id", None),
        (b" \n\n", "empty_file", "input_file_id", None),
        (b"\n{oops}\n", "invalid_json_line", None, 2),
        (b"[]\n", "invalid_json_line", None, 1),
        (b"\xff\xfe\n", "invalid_json_line", None, 1),
        ([line("a"), line("b"), line("a")], "invalid_custom_id", "custom_id", 3),
        ([{k: v for k, v in line("a").items() if k != "custom_id"}], "invalid_custom_id", "custom_id", 1),
        ([{**line("a"), "custom_id": 5}], "invalid_custom_id", "custom_id", 1),
        ([{**line("a"), "custom_id": ""}], "invalid_custom_id", "custom_id", 1),
        ([{k: v for k, v in line("a").items() if k != "method"}], "invalid_method", "method", 1),
        ([{**line("a"), "method": "GET"}], "invalid_method", "method", 1),
        ([{**line("a"), "url": "/v1/chat/completions"}], "invalid_url", "url", 1),
        ([{**line("a"), "body": "text"}], "invalid_body", "body", 1),
        ([{**line("a"), "colour": 1}], "invalid_colour", "colour", 1),
        ([line(str(i)) for i in range(31)], "invalid_input_file_id", "input_file_id", 31),
    ],
)
def test_an_input_that_is_wrong_fails_the_batch_and_runs_nothing(
    site: Site, content: Any, code: str, param: str | None, at: int | None
) -> None:
    site.limits = type(site.limits)(max_batch_lines=30)
    with site.open() as api:
        batch = ended(api, submit(api, content))
        assert batch.status == "failed" and batch.failed_at is not None
        assert batch.errors is not None and batch.errors.data is not None
        (error,) = batch.errors.data
        assert (error.code, error.param, error.line) == (code, param, at)
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert_official("Batch", site.http.get(f"/v1/batches/{batch.id}").json())
        api.files.delete(batch.input_file_id)
    assert site.engine.parents == []


def test_every_wrong_line_is_named_up_to_a_hundred(site: Site) -> None:
    with site.open() as api:
        batch = ended(api, submit(api, b"{oops}\n" * 150))
        assert batch.errors is not None and batch.errors.data is not None
        assert [error.line for error in batch.errors.data] == list(range(1, 101))


def test_every_state_is_official(site: Site) -> None:
    site.engine.step_s = 0.01
    seen = set()
    with site.open() as api:
        batch = submit(api, [line(str(i)) for i in range(60)], metadata={})

        def done() -> bool:
            body = site.http.get(f"/v1/batches/{batch.id}").json()
            assert_official("Batch", body)
            counts = body["request_counts"]
            assert counts["completed"] + counts["failed"] <= counts["total"]
            assert ("output_file_id" in body) == (body["status"] == "completed")
            seen.add(body["status"])
            return body["status"] == "completed"

        wait_for(done, 20)
        assert {"in_progress", "completed"} <= seen
        assert_official("ListBatchesResponse", site.http.get("/v1/batches").json())


def test_lists_come_in_pages_newest_first(site: Site) -> None:
    with site.open(running=False) as api:
        file = submit(api, [line("a")])
        made = [file.id]
        for _ in range(4):
            fields: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
            made.append(api.batches.create(input_file_id=file.input_file_id, **fields).id)
        assert [batch.id for batch in api.batches.list(limit=2)] == made[::-1]
        page = site.http.get("/v1/batches", params={"limit": 2, "after": made[4]}).json()
        assert ([batch["id"] for batch in page["data"]], page["has_more"]) == ([made[3], made[2]], True)
        assert (page["first_id"], page["last_id"]) == (made[3], made[2])
    with Site(site.folder.parent / "other", site.engine).open() as api:
        assert api.batches.list().data == []


def test_a_cancelled_batch_keeps_what_is_finished_and_names_the_rest(site: Site) -> None:
    lines = [line("quick", max_tokens=1), *(line(f"slow{i}", ignore_eos=True, max_tokens=300) for i in range(4))]
    site.engine.step_s = 0.02
    with site.open() as api:
        batch = submit(api, lines)
        wait_for(lambda: api.batches.retrieve(batch.id).request_counts.completed == 1)  # type: ignore[union-attr]
        cancelling = api.batches.cancel(batch.id)
        assert cancelling.status == "cancelling" and cancelling.cancelling_at is not None
        assert_official("Batch", site.http.get(f"/v1/batches/{batch.id}").json())
        batch = ended(api, batch)
        assert batch.status == "cancelled" and batch.cancelled_at is not None
        assert bodies(read(api, batch.output_file_id)).keys() == {"quick"}
        errors = read(api, batch.error_file_id)
        assert errors.keys() == {f"slow{i}" for i in range(4)}
        assert {entry["error"]["code"] for entry in errors.values()} == {"batch_cancelled"}
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 4)
        wait_for(lambda: site.engine.running == 0)
        assert api.batches.cancel(batch.id) == batch, "asking again changes nothing"


def test_a_batch_that_has_ended_cannot_be_cancelled(site: Site) -> None:
    with site.open() as api:
        for content in ([line("a")], b"{}\n"):
            batch = ended(api, submit(api, content))
            with pytest.raises(openai.ConflictError) as conflict:
                api.batches.cancel(batch.id)
            assert batch.status in conflict.value.message
            assert api.batches.retrieve(batch.id) == batch


def test_outputs_expire_as_asked(site: Site) -> None:
    after: Any = {"anchor": "created_at", "seconds": 3600}
    with site.open() as api:
        batch = ended(api, submit(api, [line("a")], output_expires_after=after))
        assert batch.output_file_id is not None
        file = api.files.retrieve(batch.output_file_id)
        assert file.expires_at == file.created_at + 3600
        site.ahead = 3601
        with pytest.raises(openai.NotFoundError):
            api.files.content(batch.output_file_id)
        assert api.batches.retrieve(batch.id).output_file_id == batch.output_file_id


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input_file_id": "file-" + "0" * 28}, 404, "input_file_id"),
        ({"input_file_id": "x"}, 404, "input_file_id"),
        ({"input_file_id": 5}, 400, "input_file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": "/v1/nowhere"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, 400, "metadata"),
        ({"metadata": {"k": "x" * 513}}, 400, "metadata"),
        ({"metadata": {"k": 1}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400, "output_expires_after"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400, "output_expires_after"),
        ({"colour": "red"}, 400, "colour"),
    ],
)
def test_a_bad_field_is_refused_by_name(site: Site, fields: dict[str, Any], status: int, param: str) -> None:
    with site.open(running=False) as api:
        file = api.files.create(file=("in", b"{}\n"), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h", **fields}
        response = site.http.post("/v1/batches", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
        assert_official("ErrorResponse", response.json())
        assert api.batches.list().data == []


def test_an_output_is_no_input(site: Site) -> None:
    with site.open() as api:
        batch = ended(api, submit(api, [line("a")]))
        fields: Any = {"endpoint": "/v1/completions", "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError) as bad:
            api.batches.create(input_file_id=str(batch.output_file_id), **fields)
        assert bad.value.param == "input_file_id"


@pytest.mark.parametrize("batch_id", ["x", "batch_", "batch_" + "0" * 28, "file-" + "0" * 28])
def test_an_unknown_batch_is_a_404(site: Site, batch_id: str) -> None:
    with site.open():
        for method, path in (("GET", ""), ("POST", "/cancel")):
            response = site.http.request(method, f"/v1/batches/{batch_id}{path}")
            assert (response.status_code, response.json()["error"]["param"]) == (404, "batch_id")


@pytest.mark.parametrize(("query", "param"), [({"limit": 101}, "limit"), ({"after": "x"}, "after"), ({"a": 1}, "a")])
def test_a_bad_query_is_a_400_that_names_it(site: Site, query: dict[str, Any], param: str) -> None:
    with site.open():
        response = site.http.get("/v1/batches", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
