"""The HTTP application: its routes, and what each hands to whom.

`create_app` takes the cluster as a Protocol, so the app runs the same in a Serve replica and in a test. Formats live
in `router.completions` and `router.chat`, failures in `router.errors`.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from router import chat, completions
from router.batch_executor import BatchExecutor, Timing
from router.batch_store import BatchStore
from router.batches import batch_routes
from router.engine import Engine, ModelInfo
from router.errors import ERROR_RESPONSES, ApiError, Fault, install_handlers
from router.file_store import FileStore
from router.files import file_routes
from router.limits import RouterLimits
from router.middleware import REQUEST_ID, BodyLimit, RequestId, json_only
from router.plan import check_model, check_token_ids
from router.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from router.serving import Serving

FORM_BYTES = 64 * 1024
"""What an upload may have around its file."""
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def _version() -> str:
    try:
        return version("choral")
    except PackageNotFoundError:
        return "unknown"


def _public_id(request: Request, body: GenerationRequest) -> str:
    """What names the reply: the body's request_id, else the client's X-Request-Id, else the id drawn for it."""
    header = request.headers.get("x-request-id")
    given, param = (body.request_id, "request_id") if body.request_id is not None else (header, "X-Request-Id")
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise ApiError(Fault.INVALID, f"{param} must be 1 to 128 visible ASCII characters", param)
    return given or str(request.state.request_id)


def _model_entry(model: ModelInfo) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "choral",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "exact": model.exact,
    }


def _generation_routes(serving: Serving) -> APIRouter:
    routes = APIRouter(responses=ERROR_RESPONSES | _STREAMED, dependencies=[Depends(json_only)])

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return completions.respond(serving, body, _public_id(request, body))

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return chat.respond(serving, body, _public_id(request, body))

    return routes


def _token_routes(serving: Serving) -> APIRouter:
    routes = APIRouter(responses=ERROR_RESPONSES, dependencies=[Depends(json_only)])
    model, tokenizer = serving.engine.model, serving.tokenizer

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> JSONResponse:
        check_model(body.model, model)
        text = tokenizer.chat_text(body) if body.prompt is None else body.prompt
        special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        (tokens,) = await tokenizer.encode([text], special)
        strings = tokenizer.token_strings(tokens) if body.return_token_strs else None
        size = {"count": len(tokens), "max_model_len": model.max_model_len}
        return JSONResponse({**size, "tokens": tokens, "token_strs": strings})

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        check_model(body.model, model)
        check_token_ids(body.tokens, model, "tokens")
        return JSONResponse({"prompt": tokenizer.decode(body.tokens)})

    return routes


def _model_routes(engine: Engine) -> APIRouter:
    routes = APIRouter(responses=ERROR_RESPONSES)

    @routes.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model_entry(engine.model)]})

    @routes.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> JSONResponse:
        check_model(model_id, engine.model)
        return JSONResponse(_model_entry(engine.model))

    return routes


def _operator_routes(serving: Serving, pages: Sequence[Callable[[], str]]) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", response_class=Response, responses={503: {"description": "No group of workers can serve"}})
    async def health() -> Response:
        return Response(status_code=200 if await serving.engine.healthy() else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        text = await serving.engine.metrics() + "".join(page() for page in pages)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @routes.get("/version")
    async def show_version() -> JSONResponse:
        return JSONResponse({"version": _version()})

    return routes


def _add_batches(app: FastAPI, serving: Serving, folder: Path, now: Callable[[], float], timing: Timing) -> None:
    """Routes of files and batches, and in `app.state.batches` what runs them as long as the app lives."""
    files = FileStore(folder / "files", serving.limits.max_file_bytes, now)
    batches = BatchStore(folder / "batches", now)
    executor = BatchExecutor(serving, files, batches, now=now, timing=timing)
    app.include_router(file_routes(files, batches.uses))
    app.include_router(batch_routes(serving.engine.model, files, batches, executor.wake, now))
    app.state.batches = executor

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        executor.start()
        yield
        await executor.stop()

    app.router.lifespan_context = running


def create_app(
    engine: Engine,
    limits: RouterLimits,
    folder: Path | None = None,
    *,
    now: Callable[[], float] = time.time,
    timing: Timing | None = None,
) -> FastAPI:
    """The application in front of `engine`. Files and batches are kept under `folder`; without one there are none.

    Raises ValueError when the model folder lacks a tokenizer, OSError when `folder` cannot be written to.
    """
    serving = Serving.load(engine, limits)
    app = FastAPI(title="Choral", version=_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    install_handlers(app)
    larger = {"/v1/files": limits.max_file_bytes + FORM_BYTES}
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes, larger=larger)
    app.add_middleware(RequestId)
    for routes in (_generation_routes(serving), _token_routes(serving), _model_routes(engine)):
        app.include_router(routes)
    extra_metrics = [serving.admission.metrics]
    if folder is not None:
        _add_batches(app, serving, folder, now, timing or Timing())
        extra_metrics.append(app.state.batches.metrics)
    app.include_router(_operator_routes(serving, extra_metrics))
    return app
