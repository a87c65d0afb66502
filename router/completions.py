"""POST /v1/completions: from its request body to a plan, and from results to its reply and chunks.

Prompts come as text or as token ids, one or many; choice index = prompt number x n + sample position. Called by
`router.app`.
"""

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from aggregation.results import ChoiceDelta, ParentResult, PositionLogprobs
from router.errors import ApiError, Fault
from router.plan import Plan, TokenBudget, check_limits, check_token_ids, make_plan, sampling_params, truncated
from router.protocol import CompletionRequest
from router.serving import Serving
from router.streaming import ChunkWriter, compact, quoted, reply_body

DEFAULT_MAX_TOKENS = 16


def respond(serving: Serving, request: CompletionRequest, request_id: str) -> Response:
    """The response to a checked body. Raises ApiError for what the model or the limits do not allow."""
    check(serving, request)

    async def plan() -> Plan:
        return await make(serving, request, f"cmpl-{request_id}")

    children = len(request.prompts) * request.choices_per_prompt
    return serving.respond(children, bool(request.stream), plan, CompletionFormat())


def check(serving: Serving, request: CompletionRequest) -> None:
    """What can be said before anything is spent. Raises ApiError."""
    prompts = request.prompts
    check_limits(request, len(prompts), serving.engine.model, serving.limits)
    if not prompts or not all(prompts):
        raise ApiError(Fault.INVALID, "prompt is empty", "prompt")


async def make(serving: Serving, request: CompletionRequest, reply_id: str) -> Plan:
    """The plan of a request that passed `check`. Raises ApiError."""
    model = serving.engine.model
    budget = TokenBudget("max_tokens", request.max_tokens, DEFAULT_MAX_TOKENS)
    whole = await _token_ids(serving, request)
    prompts = [truncated(ids, request, budget.prompt_room(model.max_model_len)) for ids in whole]
    if not all(prompts):
        raise ApiError(Fault.INVALID, "prompt has no tokens", "prompt")
    max_tokens = budget.fit(max(map(len, prompts)), model.max_model_len, "prompt")
    params = sampling_params(request, model, serving.defaults, max_tokens, request.logprobs)
    echo = _echo_texts(serving, request, whole, prompts) if request.echo else ()
    return make_plan(request, reply_id, model, prompts, params, echo)


async def _token_ids(serving: Serving, request: CompletionRequest) -> list[list[int]]:
    texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    if texts:
        return await serving.tokenizer.encode(texts, request.add_special_tokens is not False)
    ids = [prompt for prompt in request.prompts if not isinstance(prompt, str)]
    for prompt in ids:
        check_token_ids(prompt, serving.engine.model, "prompt")
    return ids


def _echo_texts(
    serving: Serving, request: CompletionRequest, whole: Sequence[list[int]], kept: Sequence[list[int]]
) -> list[str]:
    """Each prompt as the client wrote it; as its tokens read where it sent ids, or only a part was kept."""
    return [
        prompt if isinstance(prompt, str) and len(ids) == len(part) else serving.tokenizer.decode(part)
        for prompt, ids, part in zip(request.prompts, whole, kept, strict=True)
    ]


def _characters(data: Sequence[int]) -> int:
    """How many UTF-8 characters begin in these bytes."""
    return sum(byte & 0xC0 != 0x80 for byte in data)


def logprobs_body(positions: Sequence[PositionLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """The legacy log-probability lists, and the text offset after them. `offset` is in characters of the choice."""
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += _characters(position.drawn.bytes)
    body = {
        "tokens": [position.drawn.token for position in positions],
        "token_logprobs": [position.drawn.logprob for position in positions],
        "top_logprobs": [{top.token: top.logprob for top in position.top} for position in positions],
        "text_offset": offsets,
    }
    return body, offset


class CompletionWriter(ChunkWriter):
    """Chunks of a streamed completion. Each choice's first chunk carries the seed and begins with the echo."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, "text_completion")
        self._introduced = [False] * plan.parent.num_children
        self._offsets = [0] * plan.parent.num_children

    def opening(self) -> list[str]:
        return []

    def chunk(self, delta: ChoiceDelta) -> str:
        index, parent = delta.index, self.plan.parent
        first = not self._introduced[index]
        self._introduced[index] = True
        number = parent.prompt_number(index)
        text = self.plan.echo[number] + delta.text if first and self.plan.echo else delta.text
        prompt = f',"prompt_token_ids":{compact(parent.prompts[number])}' if first and self._ids_wanted else ""
        choice = (
            f'{{"index":{index},"sample":{parent.sample_number(index)},"text":{quoted(text)},'
            f'"logprobs":{self._logprobs(delta)},{self.finish_keys(delta)}{prompt}}}'
        )
        seed = f',"seed":{parent.params.seed}' if first else ""
        return self.event(choice, index, delta.completion_tokens, seed)

    @property
    def _ids_wanted(self) -> bool:
        return self.plan.return_token_ids

    def _logprobs(self, delta: ChoiceDelta) -> str:
        if delta.logprobs is None:
            return "null"
        body, self._offsets[delta.index] = logprobs_body(delta.logprobs, self._offsets[delta.index])
        return compact(body)


class CompletionFormat:
    """Replies of the completions route."""

    def writer(self, plan: Plan) -> ChunkWriter:
        return CompletionWriter(plan)

    def reply(self, plan: Plan, result: ParentResult) -> dict[str, Any]:
        choices = [self._choice(plan, choice) for choice in result.choices]
        return reply_body(plan, "text_completion", choices, result.usage)

    def _choice(self, plan: Plan, choice: ChoiceDelta) -> dict[str, Any]:
        number = plan.parent.prompt_number(choice.index)
        return {
            "index": choice.index,
            "sample": plan.parent.sample_number(choice.index),
            "text": (plan.echo[number] if plan.echo else "") + choice.text,
            "logprobs": None if choice.logprobs is None else logprobs_body(choice.logprobs, 0)[0],
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if plan.return_token_ids else None,
            "prompt_token_ids": list(plan.parent.prompts[number]) if plan.return_token_ids else None,
            "prompt_logprobs": None,
        }
