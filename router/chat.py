"""POST /v1/chat/completions: from its request body to a plan, and from results to its reply and chunks.

A chat has one prompt, made of its messages by the model's chat template. Called by `router.app`.
"""

from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

from aggregation.results import ChoiceDelta, ParentResult, PositionLogprobs, TextLogprob
from router.errors import ApiError, Fault
from router.plan import Plan, TokenBudget, check_limits, make_plan, sampling_params, truncated
from router.protocol import ChatCompletionRequest
from router.serving import Serving
from router.streaming import ChunkWriter, compact, quoted, reply_body


def respond(serving: Serving, request: ChatCompletionRequest, request_id: str) -> Response:
    """The response to a checked body. Raises ApiError for what the model or the limits do not allow."""
    check(serving, request)

    async def plan() -> Plan:
        return await make(serving, request, f"chatcmpl-{request_id}")

    return serving.respond(request.choices_per_prompt, bool(request.stream), plan, reply_format(request))


def check(serving: Serving, request: ChatCompletionRequest) -> None:
    """What can be said before anything is spent. Raises ApiError."""
    check_limits(request, 1, serving.engine.model, serving.limits)


def reply_format(request: ChatCompletionRequest) -> "ChatFormat":
    """How replies to this request are written."""
    return ChatFormat((request.top_logprobs or 0) if request.logprobs else 0)


def _budget(request: ChatCompletionRequest) -> TokenBudget:
    if request.max_completion_tokens is not None:
        return TokenBudget("max_completion_tokens", request.max_completion_tokens, None)
    return TokenBudget("max_tokens", request.max_tokens, None)


async def make(serving: Serving, request: ChatCompletionRequest, reply_id: str) -> Plan:
    """The plan of a request within the limits. Raises ApiError."""
    model, budget = serving.engine.model, _budget(request)
    text = serving.tokenizer.chat_text(request)
    (whole,) = await serving.tokenizer.encode([text], bool(request.add_special_tokens))
    prompt = truncated(whole, request, budget.prompt_room(model.max_model_len))
    if not prompt:
        raise ApiError(Fault.INVALID, "the messages make an empty prompt", "messages")
    max_tokens = budget.fit(len(prompt), model.max_model_len, "messages")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    params = sampling_params(request, model, serving.defaults, max_tokens, logprobs)
    return make_plan(request, reply_id, model, [prompt], params)


def _token(entry: TextLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": entry.bytes}


def logprobs_body(positions: Sequence[PositionLogprobs] | None, top: int) -> dict[str, Any] | None:
    """The chat form of log-probabilities; the drawn token may come on top of the `top` most probable ones."""
    if positions is None:
        return None
    content = [
        {**_token(position.drawn), "top_logprobs": [_token(entry) for entry in position.top] if top else []}
        for position in positions
    ]
    return {"content": content, "refusal": None}


class ChatWriter(ChunkWriter):
    """Chunks of a streamed chat completion.

    The role chunks of all choices go out in index order together with the first text: clients take the first chunk
    for the first token, and their accumulators index choices by position.
    """

    def __init__(self, plan: Plan, top_logprobs: int) -> None:
        super().__init__(plan, "chat.completion.chunk")
        self._top = top_logprobs

    def opening(self) -> list[str]:
        return [self._role(index) for index in range(self.plan.parent.num_children)]

    def _role(self, index: int) -> str:
        parent = self.plan.parent
        choice = (
            f'{{"index":{index},"sample":{parent.sample_number(index)},'
            '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        )
        wanted = self.plan.return_token_ids and index == 0
        prompt = f',"prompt_token_ids":{compact(parent.prompts[0])}' if wanted else ""
        return self.event(choice, index, 0, f',"seed":{parent.params.seed}{prompt}')

    def chunk(self, delta: ChoiceDelta) -> str:
        content = f'{{"content":{quoted(delta.text)}}}' if delta.text else "{}"
        logprobs = "null" if delta.logprobs is None else compact(logprobs_body(delta.logprobs, self._top))
        choice = (
            f'{{"index":{delta.index},"sample":{self.plan.parent.sample_number(delta.index)},'
            f'"delta":{content},"logprobs":{logprobs},{self.finish_keys(delta)}}}'
        )
        return self.event(choice, delta.index, delta.completion_tokens)


class ChatFormat:
    """Replies of the chat route, with so many most probable tokens per position."""

    def __init__(self, top_logprobs: int) -> None:
        self._top = top_logprobs

    def writer(self, plan: Plan) -> ChunkWriter:
        return ChatWriter(plan, self._top)

    def reply(self, plan: Plan, result: ParentResult) -> dict[str, Any]:
        choices = [self._choice(plan, choice) for choice in result.choices]
        return {
            **reply_body(plan, "chat.completion", choices, result.usage),
            "prompt_token_ids": list(plan.parent.prompts[0]) if plan.return_token_ids else None,
            "prompt_logprobs": None,
        }

    def _choice(self, plan: Plan, choice: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": choice.index,
            "sample": plan.parent.sample_number(choice.index),
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": logprobs_body(choice.logprobs, self._top),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if plan.return_token_ids else None,
        }
