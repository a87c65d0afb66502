"""The routes of /v1/files: upload, list, describe, download, delete.

Only files for batches are taken, since nothing here could use others. The disk is `router.file_store`'s business; all
routes that touch it are plain functions, which run beside the event loop. Called by `router.app`.
"""

import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any, BinaryIO, Literal

from fastapi import APIRouter, File, Form, Query, Request, UploadFile
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, JSONResponse, Response

from router.errors import CONFLICT_RESPONSES, ApiError, Fault, clip
from router.file_store import FileStore, StoredFile

MIN_EXPIRES_S = 3600
MAX_EXPIRES_S = 2_592_000
Seconds = Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]
_FIELDS = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
_PIECE = 1 << 20


class FileQuery(BaseModel):
    """What a list of files may be asked for."""

    model_config = ConfigDict(extra="forbid")

    purpose: str | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def list_body(entries: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """One page of a list. An empty one has no ids, which the official schema wants as texts all the same."""
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else ("", "")
    return {"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": has_more}


def file_routes(files: FileStore, in_use: Callable[[str], bool]) -> APIRouter:
    """`in_use` says whether a batch that has not ended needs a file."""
    routes = APIRouter(responses=CONFLICT_RESPONSES)

    @routes.post("/v1/files")
    async def create_file(
        request: Request,
        file: Annotated[UploadFile, File()],
        purpose: Annotated[str, Form()],
        anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
        seconds: Annotated[Seconds | None, Form(alias="expires_after[seconds]")] = None,
    ) -> JSONResponse:
        _check_form([name for name, _ in (await request.form()).multi_items()], purpose, anchor, seconds)
        stored = await run_in_threadpool(files.upload, _pieces(file.file), _name(file), seconds)
        return JSONResponse(stored.public())

    @routes.get("/v1/files")
    def list_files(query: Annotated[FileQuery, Query()]) -> JSONResponse:
        newest_first = query.order == "desc"
        found, more = files.page(purpose=query.purpose, after=query.after, limit=query.limit, newest_first=newest_first)
        return JSONResponse(list_body([entry.public() for entry in found], more))

    @routes.get("/v1/files/{file_id}")
    def retrieve_file(file_id: str) -> JSONResponse:
        return JSONResponse(files.get(file_id).public())

    @routes.get("/v1/files/{file_id}/content", response_class=Response)
    def download_file(file_id: str) -> FileResponse:
        return _download(files, files.get(file_id))

    @routes.delete("/v1/files/{file_id}")
    def delete_file(file_id: str) -> JSONResponse:
        if in_use(files.get(file_id).id):
            raise ApiError(Fault.CONFLICT, "a batch that has not ended uses this file", "file_id")
        files.delete(file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    return routes


def _check_form(names: list[str], purpose: str, anchor: str | None, seconds: int | None) -> None:
    """What the form's types do not say. Raises ApiError naming the field."""
    for name in names:
        if name not in _FIELDS:
            raise ApiError(Fault.INVALID, f"unknown field {clip(name)!r}", clip(name))
        if names.count(name) > 1:
            raise ApiError(Fault.INVALID, f"{name} is there more than once", name)
    if purpose != "batch":
        raise ApiError(Fault.UNSUPPORTED, "purpose must be batch: this server has no other use for files", "purpose")
    if (anchor is None) != (seconds is None):
        raise ApiError(Fault.INVALID, "expires_after needs both anchor and seconds", "expires_after")


def _name(file: UploadFile) -> str:
    """The last part of the name the client gave."""
    return clip(os.path.basename(file.filename or "") or "upload")


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    while piece := source.read(_PIECE):
        yield piece


def _download(files: FileStore, stored: StoredFile) -> FileResponse:
    path = files.content(stored.id)
    return FileResponse(path, media_type="application/octet-stream", filename=stored.filename)
