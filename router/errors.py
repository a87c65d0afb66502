"""Every way a request can fail, in one table, and its way onto the wire in OpenAI's error shape.

All other router modules raise `ApiError`; this one alone knows statuses, codes and headers. What an error echoes of
the request is cut short here. Used by the app's exception handlers and by streams that fail half way.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from router.engine import GenerationError, NoHealthyGroupError

MAX_ERRORS = 10
MAX_CHARS = 200

_log = logging.getLogger(__name__)
_NO_RETRY = {"x-should-retry": "false"}
_RETRY_AFTER = {"retry-after": "1"}


class Answer(NamedTuple):
    """What a fault becomes on the wire."""

    status: int
    type: str
    code: str | None
    headers: Mapping[str, str]


class Fault(Enum):
    """The table: from case to status, type, code and headers."""

    INVALID = Answer(400, "invalid_request_error", None, {})
    UNSUPPORTED = Answer(400, "invalid_request_error", "unsupported_parameter", {})
    CONTEXT_LENGTH = Answer(400, "invalid_request_error", "context_length_exceeded", {})
    FAMILY_TOO_LARGE = Answer(400, "invalid_request_error", "too_many_children", {})
    MODEL_NOT_FOUND = Answer(404, "invalid_request_error", "model_not_found", {})
    NOT_FOUND = Answer(404, "invalid_request_error", "not_found", {})
    METHOD_NOT_ALLOWED = Answer(405, "invalid_request_error", "method_not_allowed", {})
    CONFLICT = Answer(409, "invalid_request_error", "conflict", _NO_RETRY)
    BODY_TOO_LARGE = Answer(413, "invalid_request_error", "body_too_large", {})
    BUSY = Answer(429, "rate_limit_error", "rate_limit_exceeded", _RETRY_AFTER)
    INTERNAL = Answer(500, "server_error", "internal_error", _NO_RETRY)
    GENERATION_FAILED = Answer(500, "server_error", "generation_failed", _NO_RETRY)
    NO_GROUP = Answer(503, "server_error", "overloaded", _RETRY_AFTER)


_BY_STATUS = {
    400: Fault.INVALID,
    404: Fault.NOT_FOUND,
    405: Fault.METHOD_NOT_ALLOWED,
    413: Fault.BODY_TOO_LARGE,
    503: Fault.NO_GROUP,
}


class ErrorFields(BaseModel):
    """OpenAI's error object; all four keys are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every reply that is not a success."""

    error: ErrorFields


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 404, 413, 429, 500, 503, "default")
}
"""For the description of every route under /v1."""
CONFLICT_RESPONSES = ERROR_RESPONSES | {409: {"model": ErrorBody}}


class ApiError(Exception):
    """A request that cannot be answered; `param` names the field at fault."""

    def __init__(self, fault: Fault, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.fault = fault
        self.message = message
        self.param = param

    def body(self) -> dict[str, Any]:
        answer = self.fault.value
        message = clip(self.message, MAX_ERRORS * MAX_CHARS)
        return {"error": {"message": message, "type": answer.type, "param": self.param, "code": answer.code}}

    def event(self) -> bytes:
        """The error as a server-sent event."""
        return f"data: {json.dumps(self.body())}\n\n".encode()


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """`text` cut to `limit` characters, in a form that always encodes as UTF-8."""
    clean = text.encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def listing(values: Sequence[object], most: int = MAX_ERRORS) -> str:
    """The first few values for an error message, each cut short, and how many more there are."""
    shown = ", ".join(clip(str(value), 40) for value in values[:most])
    rest = len(values) - most
    return f"{shown} and {rest} more" if rest > 0 else shown


def _describe_validation(error: RequestValidationError) -> ApiError:
    details = error.errors()
    first = details[0]
    if first["type"] == "json_invalid":
        return ApiError(Fault.INVALID, f"the body is not valid JSON: {first.get('ctx', {}).get('error', '')}")
    lines = []
    for detail in details[:MAX_ERRORS]:
        path = ".".join(str(part) for part in detail["loc"][1:]) or "body"
        lines.append(clip(f"{path}: {detail['msg']}"))
    param = str(first["loc"][1]) if len(first["loc"]) > 1 else None
    return ApiError(Fault.INVALID, "; ".join(lines), param)


def describe(error: Exception) -> ApiError:
    """Any exception as the error a client may see. An unknown one is a bug: it is logged and its text kept back."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _describe_validation(error)
        case NoHealthyGroupError():
            return ApiError(Fault.NO_GROUP, clip(str(error)) or "no group of workers can serve now")
        case GenerationError():
            return ApiError(Fault.GENERATION_FAILED, clip(str(error)) or "the generation failed")
        case HTTPException():
            return ApiError(_BY_STATUS.get(error.status_code, Fault.INTERNAL), clip(str(error.detail)))
    _log.error("unhandled error", exc_info=error)
    return ApiError(Fault.INTERNAL, "internal error")


def error_response(request: Request, error: Exception) -> JSONResponse:
    """The reply to a request that failed before its first byte was sent."""
    known = describe(error)
    headers = dict(known.fault.value.headers)
    if isinstance(error, HTTPException) and error.headers:
        headers.update(error.headers)
    if request_id := getattr(request.state, "request_id", None):
        headers["x-request-id"] = request_id
    return JSONResponse(known.body(), known.fault.value.status, headers)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    return error_response(request, error)


def install_handlers(app: FastAPI) -> None:
    """Make every failure of `app` answer in OpenAI's shape, unknown paths and bugs too."""
    known = (ApiError, RequestValidationError, NoHealthyGroupError, GenerationError, HTTPException, Exception)
    for kind in known:
        app.add_exception_handler(kind, _handle)
