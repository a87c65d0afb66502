"""The routes of /v1/batches: create, list, retrieve, cancel.

A batch made here is only written down; `router.batch_executor`, in this process or in that of another router, finds it
and runs it. Called by `router.app`.
"""

import time
from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from router.batch.rows import URLS
from router.batch_store import Batch, BatchStore
from router.engine import ModelInfo
from router.errors import CONFLICT_RESPONSES, ApiError, Fault, listing
from router.file_store import FileStore
from router.files import Seconds, list_body
from router.middleware import json_only
from router.protocol import Text

WINDOW_S = 86_400
Key = Annotated[Text, Field(min_length=1, max_length=64)]
Value = Annotated[Text, Field(max_length=512)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ExpiresAfter(_Strict):
    """How long files are kept."""

    anchor: Literal["created_at"]
    seconds: Seconds


class CreateBatchRequest(_Strict):
    """Body of POST /v1/batches."""

    input_file_id: Text
    endpoint: Text
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Value], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(BaseModel):
    """What a list of batches may be asked for."""

    model_config = ConfigDict(extra="forbid")

    limit: Annotated[int, Field(ge=1, le=100)] = 20
    after: str | None = None


def batch_routes(
    model: ModelInfo,
    files: FileStore,
    batches: BatchStore,
    wake: Callable[[], None],
    now: Callable[[], float] = time.time,
) -> APIRouter:
    """`wake` is called when there is something new to do."""
    routes = APIRouter(responses=CONFLICT_RESPONSES)

    @routes.post("/v1/batches", dependencies=[Depends(json_only)])
    def create_batch(body: CreateBatchRequest) -> JSONResponse:
        _check_input(body, files)
        created = int(now())
        batch = Batch(
            id=batches.new_id(),
            endpoint=body.endpoint,
            model=model.name,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=created,
            expires_at=created + WINDOW_S,
            metadata=body.metadata,
            fingerprint=model.fingerprint,
            output_expires_s=body.output_expires_after.seconds if body.output_expires_after else None,
        )
        batches.add(batch)
        wake()
        return JSONResponse(batch.public())

    @routes.get("/v1/batches")
    def list_batches(query: Annotated[BatchQuery, Query()]) -> JSONResponse:
        found, more = batches.page(after=query.after, limit=query.limit)
        return JSONResponse(list_body([batch.public() for batch in found], more))

    @routes.get("/v1/batches/{batch_id}")
    def retrieve_batch(batch_id: str) -> JSONResponse:
        return JSONResponse(batches.get(batch_id).public())

    @routes.post("/v1/batches/{batch_id}/cancel")
    def cancel_batch(batch_id: str) -> JSONResponse:
        batch = batches.ask_cancel(batch_id)
        wake()
        return JSONResponse(batch.public())

    return routes


def _check_input(body: CreateBatchRequest, files: FileStore) -> None:
    """Raises ApiError: 404 for a file that is not there, 400 for one that is no input, or for another endpoint."""
    if body.endpoint not in URLS:
        message = f"endpoint must be one of {listing(list(URLS))}"
        raise ApiError(Fault.UNSUPPORTED, message, "endpoint")
    try:
        stored = files.get(body.input_file_id)
    except ApiError as error:
        raise ApiError(error.fault, error.message, "input_file_id") from None
    if stored.purpose != "batch":
        raise ApiError(Fault.INVALID, f"the file's purpose is {stored.purpose}, not batch", "input_file_id")
