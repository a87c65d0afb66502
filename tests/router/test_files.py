"""/v1/files as clients see it: the official client, the official schema, and what is refused."""

from typing import Any

import openai
import pytest

from tests.router.batch_site import Site, line, submit
from tests.router.wire import assert_official

EXPIRES: Any = {"anchor": "created_at", "seconds": 3600}


def upload(api: openai.OpenAI, content: bytes = b"{}\n", name: str = "in.jsonl", **fields: Any) -> Any:
    return api.files.create(file=(name, content), **{"purpose": "batch", **fields})


def test_a_file_is_uploaded_described_downloaded_and_deleted(site: Site) -> None:
    content = bytes(range(256)) * 8000
    with site.open() as api:
        file = upload(api, content, "fünf \u2028.jsonl", expires_after=EXPIRES)
        assert (file.bytes, file.filename, file.purpose) == (len(content), "fünf \u2028.jsonl", "batch")
        assert file.expires_at == file.created_at + 3600
        assert api.files.retrieve(file.id) == file
        assert api.files.content(file.id).read() == content
        deleted = api.files.delete(file.id)
        assert (deleted.id, deleted.deleted) == (file.id, True)
        for call in (api.files.retrieve, api.files.content, api.files.delete):
            with pytest.raises(openai.NotFoundError) as missing:
                call(file.id)
            assert missing.value.param == "file_id"
        assert api.files.list().data == []


def test_files_survive_a_restart(site: Site) -> None:
    with site.open() as api:
        file = upload(api)
    with site.open() as api:
        assert api.files.list().data == [file]
        assert api.files.content(file.id).read() == b"{}\n"


def test_the_name_is_the_last_part_of_what_the_client_calls_it(site: Site) -> None:
    with site.open() as api:
        assert upload(api, name="../../etc/passwd").filename == "passwd"
        file = upload(api, name="a b;c.jsonl")
        header = api.files.content(file.id).response.headers["content-disposition"]
    assert header == "attachment; filename*=utf-8''a%20b%3Bc.jsonl"


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_lists_come_in_pages_that_hold_every_file_once(site: Site, order: Any) -> None:
    with site.open() as api:
        made = [upload(api).id for _ in range(7)]
        listed = [file.id for file in api.files.list(limit=3, order=order)]
        assert listed == (made if order == "asc" else made[::-1])
        assert api.files.list(purpose="batch_output").data == []
        first = site.http.get("/v1/files", params={"limit": 3, "order": order}).json()
        assert (first["first_id"], first["last_id"], first["has_more"]) == (listed[0], listed[2], True)
        last = site.http.get("/v1/files", params={"after": listed[5], "order": order}).json()
        assert ([entry["id"] for entry in last["data"]], last["has_more"]) == (listed[6:], False)


def test_replies_are_official(site: Site) -> None:
    with site.open() as api:
        file = upload(api, expires_after=EXPIRES)
        assert_official("OpenAIFile", site.http.get(f"/v1/files/{file.id}").json())
        assert_official("ListFilesResponse", site.http.get("/v1/files").json())
        assert_official("DeleteFileResponse", site.http.delete(f"/v1/files/{file.id}").json())
        assert_official("ListFilesResponse", site.http.get("/v1/files").json())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"purpose": None}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after"),
        (
            {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "3600"},
            "expires_after[anchor]",
        ),
        (
            {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"},
            "expires_after[seconds]",
        ),
        ({"purpose": "batch", "colour": "red"}, "colour"),
        ({"purpose": ["batch", "batch"]}, "purpose"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(site: Site, fields: dict[str, Any], param: str) -> None:
    data = {name: value for name, value in fields.items() if value is not None}
    with site.open() as api:
        response = site.http.post("/v1/files", data=data, files={"file": ("a", b"x")})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert_official("ErrorResponse", response.json())
        assert api.files.list().data == []


@pytest.mark.parametrize(
    "request_fields",
    [
        {"data": {"purpose": "batch"}},
        {"data": {"purpose": "batch", "file": "text"}},
        {"json": {"purpose": "batch"}},
        {"content": b"--x\r\nbroken", "headers": {"content-type": "multipart/form-data; boundary=x"}},
    ],
)
def test_an_upload_without_a_file_is_a_400(site: Site, request_fields: dict[str, Any]) -> None:
    with site.open():
        response = site.http.post("/v1/files", **request_fields)
    assert response.status_code == 400
    assert_official("ErrorResponse", response.json())


def test_two_files_in_one_upload_are_refused(site: Site) -> None:
    with site.open():
        files = [("file", ("a", b"a")), ("file", ("b", b"b"))]
        response = site.http.post("/v1/files", data={"purpose": "batch"}, files=files)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


@pytest.mark.parametrize("size", [100_001, 300_000])
def test_a_file_over_the_limit_is_a_413(site: Site, size: int) -> None:
    site.limits = type(site.limits)(max_file_bytes=100_000, max_body_bytes=50_000)
    with site.open() as api:
        assert upload(api, b"x" * 100_000).bytes == 100_000
        with pytest.raises(openai.APIStatusError) as error:
            upload(api, b"x" * size)
        assert error.value.status_code == 413
        assert len(api.files.list().data) == 1


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "file-1"}, "after"),
        ({"purpos": "batch"}, "purpos"),
    ],
)
def test_a_bad_query_is_a_400_that_names_it(site: Site, query: dict[str, Any], param: str) -> None:
    with site.open():
        response = site.http.get("/v1/files", params=query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("file_id", ["x", "file-", "..", "file-" + "0" * 28])
def test_an_unknown_file_is_a_404(site: Site, file_id: str) -> None:
    with site.open():
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            response = site.http.request(method, f"/v1/files/{file_id.replace('..', '%2e%2e')}{path}")
            assert response.status_code in (404, 405)
            assert_official("ErrorResponse", response.json())


def test_a_file_that_a_batch_needs_cannot_be_deleted(site: Site) -> None:
    with site.open(running=False) as api:
        batch = submit(api, [line("a")])
        with pytest.raises(openai.ConflictError) as conflict:
            api.files.delete(batch.input_file_id)
        assert conflict.value.response.headers["x-should-retry"] == "false"
        assert api.files.retrieve(batch.input_file_id).bytes > 0
