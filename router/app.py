"""The HTTP application: its routes, and what each hands to whom.

`create_app` takes the cluster as a Protocol, so the app runs the same in a Serve replica and in a test. Formats live
in `router.completions` and `router.chat`, failures in `router.errors`.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from router import chat, completions
from router.engine import Engine, ModelInfo
from router.errors import ApiError, ErrorBody, Fault, install_handlers
from router.limits import RouterLimits
from router.middleware import REQUEST_ID, BodyLimit, RequestId
from router.plan import check_model, check_token_ids
from router.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from router.serving import Serving

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 404, 413, 429, 500, 503, "default")
}
_STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def _version() -> str:
    try:
        return version("choral")
    except PackageNotFoundError:
        return "unknown"


def _json_only(request: Request) -> None:
    """Refuse a body that does not say it is JSON, before it is looked at."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(Fault.INVALID, "the content type must be application/json")


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
    routes = APIRouter(responses=_ERRORS | _STREAMED, dependencies=[Depends(_json_only)])

    @routes.post("/v1/completions")
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        return completions.respond(serving, body, _public_id(request, body))

    @routes.post("/v1/chat/completions")
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        return chat.respond(serving, body, _public_id(request, body))

    return routes


def _token_routes(serving: Serving) -> APIRouter:
    routes = APIRouter(responses=_ERRORS, dependencies=[Depends(_json_only)])
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
    routes = APIRouter(responses=_ERRORS)

    @routes.get("/v1/models")
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model_entry(engine.model)]})

    @routes.get("/v1/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> JSONResponse:
        check_model(model_id, engine.model)
        return JSONResponse(_model_entry(engine.model))

    return routes


def _operator_routes(serving: Serving) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", response_class=Response, responses={503: {"description": "No group of workers can serve"}})
    async def health() -> Response:
        return Response(status_code=200 if await serving.engine.healthy() else 503)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        text = await serving.engine.metrics() + serving.admission.metrics()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @routes.get("/version")
    async def show_version() -> JSONResponse:
        return JSONResponse({"version": _version()})

    return routes


def create_app(engine: Engine, limits: RouterLimits) -> FastAPI:
    """The application in front of `engine`. Raises ValueError when the model folder lacks a tokenizer."""
    serving = Serving.load(engine, limits)
    app = FastAPI(title="Choral", version=_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    install_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    app.add_middleware(RequestId)
    for routes in (_generation_routes(serving), _token_routes(serving), _model_routes(engine)):
        app.include_router(routes)
    app.include_router(_operator_routes(serving))
    return app
