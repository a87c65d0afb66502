"""From one line of a batch to a checked plan: the same models, limits and messages as the HTTP routes.

Takes OpenAI's batch lines and plain rows, fills in the job's defaults, and gives every row a seed. Whatever is wrong
with a row is an ApiError that names the field. Called by `runner` and by whoever starts one; knows nothing of
files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from aggregation.parent_request import ParentRequest
from router import chat, completions
from router.errors import ApiError, Fault, clip, describe, listing
from router.fields import UNSUPPORTED
from router.plan import Plan
from router.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from router.serving import Format, Serving

Raw = str | bytes | Mapping[str, Any]
"""A line of JSON, or the values of a table's row by column."""

URLS: Mapping[str, type[GenerationRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}
_LINE = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be sampled. `style` writes its replies in OpenAI's form; None where nobody wants them."""

    number: int
    id: str
    plan: Plan
    style: Format | None

    @property
    def parent(self) -> ParentRequest:
        return self.plan.parent

    @property
    def length(self) -> tuple[int, int]:
        """For longest first: what its longest child may take, then the whole family."""
        parent, most = self.parent, self.parent.params.max_tokens
        return most, most * parent.num_children + sum(map(len, parent.prompts))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What a job says about all its rows."""

    key: str
    """Rows without a seed get one derived from this and their id."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling fields for rows that do not have them."""
    extra: frozenset[str] = frozenset()
    """Fields that are there for others and say nothing about sampling."""
    replies: bool = False
    """Whether OpenAI's replies will be written; without, each sample gets the log-probabilities of its tokens."""
    strict: bool = True
    """Whether fields nobody knows fail the row; the HTTP routes let them pass."""
    url: str | None = None
    """When given, the only url allowed."""
    created: int = 0
    """Unix seconds that replies carry, so that a resumed job writes the same bytes."""


class RowReader:
    """`read` turns raw rows into plans; `identify` finds the id of any row, even of a bad one."""

    def __init__(self, serving: Serving, rules: RowRules) -> None:
        self._serving = serving
        self._rules = rules
        self._seen: set[bytes] = set()

    def identify(self, number: int, raw: Raw) -> tuple[str, Mapping[str, Any] | ApiError]:
        """The row's id, its number where it has none, and its fields or what is wrong with them.

        To be called once per row, in order: the second row of an id is refused.
        """
        try:
            fields = _fields(raw)
        except ApiError as error:
            return str(number), error
        name = "custom_id" if "custom_id" in fields else "id"
        value = fields.get(name)
        if value is None and name == "id":
            return str(number), fields
        if (row_id := _id_text(value)) is None:
            return str(number), ApiError(Fault.INVALID, f"{name} must be a text that is not empty", name)
        digest = hashlib.blake2b(row_id.encode(), digest_size=8).digest()
        if digest in self._seen:
            return row_id, ApiError(Fault.INVALID, f"{name} {clip(row_id)!r} was used before", name)
        self._seen.add(digest)
        return row_id, fields

    def seed(self, row_id: str) -> int:
        """What a row without a seed gets."""
        return _derived(63, self._rules.key, row_id)

    async def read(self, number: int, row_id: str, fields: Mapping[str, Any]) -> Row:
        """The row as a plan. Raises ApiError naming the field."""
        url, body = self.request(fields)
        rules = self._rules
        body = {**_fitting(rules.defaults, body), **body}
        if body.get("seed") in (None, -1):
            body["seed"] = self.seed(row_id)
        request = _validated(URLS[url], body)
        self._refuse(request)
        plan, style = await self._plan(request, f"{_derived(96, rules.key, row_id, 'reply'):024x}")
        plan = replace(plan, created=rules.created)
        if rules.replies:
            return Row(number, row_id, plan, style)
        return Row(number, row_id, _with_bare_logprobs(plan), None)

    def request(self, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The route and the body of either kind of row, fields without a value left out. Raises ApiError."""
        if "custom_id" not in fields and "body" not in fields:
            return _plain(fields, self._rules.extra)
        if unknown := [name for name in fields if name not in _LINE | self._rules.extra]:
            raise ApiError(Fault.INVALID, f"unknown field beside the body: {listing(unknown)}", unknown[0])
        url, method, body = fields.get("url"), fields.get("method", "POST"), fields.get("body")
        if method != "POST":
            raise ApiError(Fault.INVALID, "method must be POST", "method")
        if url not in URLS or url != (self._rules.url or url):
            allowed = self._rules.url or " or ".join(URLS)
            raise ApiError(Fault.INVALID, f"url must be {allowed}", "url")
        if not isinstance(body, Mapping):
            raise ApiError(Fault.INVALID, "body must be an object", "body")
        return str(url), _given(body)

    def _refuse(self, request: GenerationRequest) -> None:
        """What a batch cannot do, and fields nobody knows."""
        if request.stream:
            raise ApiError(Fault.UNSUPPORTED, "stream is not supported in a batch", "stream")
        if getattr(request, "echo", None):
            raise ApiError(Fault.UNSUPPORTED, "echo is not supported in a batch", "echo")
        if request.request_id is not None:
            raise ApiError(Fault.UNSUPPORTED, "request_id is not supported in a batch: rows have ids", "request_id")
        unknown = [name for name in request.model_extra or {} if name not in UNSUPPORTED]
        if unknown and self._rules.strict:
            raise ApiError(Fault.INVALID, f"unknown field: {listing(unknown)}", unknown[0])
        if self._rules.replies:
            return
        for name in ("logprobs", "top_logprobs"):
            value = getattr(request, name, None)
            if value and value is not True:
                message = f"{name}: the most probable tokens are only written in OpenAI's format"
                raise ApiError(Fault.UNSUPPORTED, message, name)

    async def _plan(self, request: GenerationRequest, reply_id: str) -> tuple[Plan, Format]:
        if isinstance(request, ChatCompletionRequest):
            chat.check(self._serving, request)
            return await chat.make(self._serving, request, f"chatcmpl-{reply_id}"), chat.reply_format(request)
        assert isinstance(request, CompletionRequest)
        completions.check(self._serving, request)
        plan = await completions.make(self._serving, request, f"cmpl-{reply_id}")
        return plan, completions.CompletionFormat()


def _fields(raw: Raw) -> Mapping[str, Any]:
    if isinstance(raw, Mapping):
        return _given(raw)
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(Fault.INVALID, f"the line is not valid JSON: {clip(str(error))}") from None
    if not isinstance(fields, dict):
        raise ApiError(Fault.INVALID, "the line is not a JSON object")
    return fields


def _id_text(value: Any) -> str | None:
    """An id as text; None for what is none."""
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    text = str(value)
    return text if text == clip(text, len(text)) else None


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, which mean "unset" everywhere."""
    return {name: value for name, value in fields.items() if value is not None}


def _plain(fields: Mapping[str, Any], extra: frozenset[str]) -> tuple[str, dict[str, Any]]:
    body = {name: value for name, value in _given(fields).items() if name not in extra and name != "id"}
    kinds = [name for name in ("prompt", "messages", "prompt_token_ids") if name in body]
    if len(kinds) != 1:
        raise ApiError(Fault.INVALID, "give one of prompt, messages and prompt_token_ids", "prompt")
    if kinds == ["messages"]:
        return "/v1/chat/completions", body
    if kinds == ["prompt_token_ids"]:
        ids = body.pop("prompt_token_ids")
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise ApiError(Fault.INVALID, "prompt_token_ids must be a list of token ids", "prompt_token_ids")
        body["prompt"] = ids
    elif not isinstance(body["prompt"], str):
        raise ApiError(Fault.INVALID, "prompt must be a text; token ids go into prompt_token_ids", "prompt")
    return "/v1/completions", body


def _fitting(defaults: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that do not contradict what the row says in another way."""
    rivals = {"n": "samples", "max_tokens": "max_completion_tokens"}
    return {name: value for name, value in defaults.items() if rivals.get(name) not in body}


def _validated(kind: type[GenerationRequest], body: Mapping[str, Any]) -> GenerationRequest:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        raise describe(RequestValidationError([{**d, "loc": ("body", *d["loc"])} for d in details])) from None


def _with_bare_logprobs(plan: Plan) -> Plan:
    parent = plan.parent
    params, text = replace(parent.params, logprobs=0), replace(parent.text, bare_logprobs=True)
    return replace(plan, parent=replace(parent, params=params, text=text))


def _derived(bits: int, *parts: str) -> int:
    """A number that these texts fix, evenly spread."""
    text = json.dumps(parts).encode()
    return int.from_bytes(hashlib.sha256(text).digest()) >> (256 - bits)
