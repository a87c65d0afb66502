"""A request in its final form: the parent to generate, and all its reply needs to know, whatever the route.

Here the checks that need the model or the operator's limits are made: vocabulary, context length, counts. Nothing has
been spent before a plan exists but the tokenising. Called by `router.completions` and `router.chat`.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from aggregation.parent_request import ParentRequest, TextOptions
from router.engine import ModelInfo
from router.errors import ApiError, Fault, clip, listing
from router.limits import RouterLimits
from router.protocol import GenerationRequest
from router.tokenizer import GenerationDefaults
from workers.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One parent and how to write its reply."""

    parent: ParentRequest
    reply_id: str
    """The public id, prefix included."""
    created: int
    """Unix seconds."""
    model: str
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    echo: tuple[str, ...] = ()
    """Per prompt the text each of its choices begins with; empty: none."""
    generate: bool = True
    """False when only the prompt is echoed."""

    def prompt_tokens(self, index: int) -> int:
        """Length of the prompt that choice `index` continues."""
        return len(self.parent.prompts[self.parent.prompt_number(index)])


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """How many tokens a child may generate: what the client asked for in the field `param`, or a default."""

    param: str
    asked: int | None
    default: int | None
    """None: fill the context."""

    def fit(self, longest_prompt: int, max_model_len: int, prompt_param: str) -> int:
        """Tokens per child beside a prompt of that length. Raises ApiError when they do not fit the context."""
        room = max_model_len - longest_prompt
        if room < (0 if self.asked == 0 else 1):
            message = f"the prompt has {longest_prompt} tokens, but the context holds {max_model_len}, reply included"
            raise ApiError(Fault.CONTEXT_LENGTH, message, prompt_param)
        if self.asked is not None and self.asked > room:
            message = (
                f"the prompt has {longest_prompt} tokens and {self.param} is {self.asked}, "
                f"together more than the context of {max_model_len} tokens"
            )
            raise ApiError(Fault.CONTEXT_LENGTH, message, self.param)
        if self.asked is not None:
            return self.asked
        return room if self.default is None else min(self.default, room)

    def prompt_room(self, max_model_len: int) -> int:
        """Longest prompt that leaves the reply its tokens."""
        reply = self.asked if self.asked is not None else self.default or 1
        return max(max_model_len - reply, 0)


def check_model(name: str | None, model: ModelInfo) -> None:
    """Raises ApiError (404) for a model that is not served; None means the served one."""
    if name not in (None, model.name):
        raise ApiError(Fault.MODEL_NOT_FOUND, f"the model {clip(str(name))!r} does not exist", "model")


def check_limits(request: GenerationRequest, prompts: int, model: ModelInfo, limits: RouterLimits) -> None:
    """Counts against the operator's limits, and the model's name. Raises ApiError."""
    check_model(request.model, model)
    param = "n" if request.samples is None else "samples"
    if request.choices_per_prompt > limits.max_n:
        raise ApiError(Fault.INVALID, f"{param} asks for more than {limits.max_n} choices per prompt", param)
    if prompts > limits.max_prompts:
        raise ApiError(Fault.INVALID, f"prompt lists {prompts} prompts, more than {limits.max_prompts}", "prompt")
    if len(request.stop_strings) > limits.max_stop:
        raise ApiError(Fault.INVALID, f"stop lists more than {limits.max_stop} strings", "stop")


def check_token_ids(ids: Sequence[int], model: ModelInfo, param: str) -> None:
    """Raises ApiError naming the ids that lie outside the vocabulary."""
    if bad := [token_id for token_id in ids if token_id >= model.vocab_size]:
        message = f"{param}: token ids outside the vocabulary of {model.vocab_size}: {listing(bad)}"
        raise ApiError(Fault.INVALID, message, param)


def _bias_key(key: str, vocab_size: int) -> int | None:
    """The token id a key stands for, in its one spelling; None when it is not one."""
    if len(key) > 10 or not key.isascii() or not key.isdecimal() or str(int(key)) != key:
        return None
    return int(key) if int(key) < vocab_size else None


def _logit_bias(request: GenerationRequest, model: ModelInfo) -> tuple[tuple[int, float], ...]:
    pairs, bad = [], []
    for key, value in (request.logit_bias or {}).items():
        token_id = _bias_key(key, model.vocab_size)
        if token_id is None:
            bad.append(key)
        else:
            pairs.append((token_id, float(value)))
    if bad:
        message = f"logit_bias: keys that are no token ids below {model.vocab_size}: "
        raise ApiError(Fault.INVALID, message + listing(bad, len(bad)), "logit_bias")
    return tuple(pairs)


def truncated(ids: list[int], request: GenerationRequest, room: int) -> list[int]:
    """The part of a prompt that `truncate_prompt_tokens` keeps; -1 keeps what leaves the reply its tokens."""
    if (keep := request.truncate_prompt_tokens) is None:
        return ids
    keep = room if keep == -1 else keep
    if request.truncation_side == "right":
        return ids[:keep]
    return ids[max(len(ids) - keep, 0) :]


def sampling_params(
    request: GenerationRequest,
    model: ModelInfo,
    defaults: GenerationDefaults,
    max_tokens: int,
    logprobs: int | None,
) -> SamplingParams:
    """The engine's values: the request's own, else the model's defaults. Raises ApiError naming the field."""
    check_token_ids(request.stop_token_ids or (), model, "stop_token_ids")
    check_token_ids(request.allowed_token_ids or (), model, "allowed_token_ids")
    if (min_tokens := request.min_tokens or 0) > max_tokens:
        raise ApiError(Fault.INVALID, f"min_tokens is more than the {max_tokens} tokens to generate", "min_tokens")
    return SamplingParams(
        max_tokens=max(max_tokens, 1),
        seed=secrets.randbits(63) if request.seed in (None, -1) else request.seed,
        temperature=_first(request.temperature, defaults.temperature),
        top_k=max(int(_first(request.top_k, defaults.top_k)), 0),
        top_p=_first(request.top_p, defaults.top_p),
        min_p=_first(request.min_p, defaults.min_p),
        repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        min_tokens=min_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logit_bias=_logit_bias(request, model),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        logprobs=logprobs,
    )


def _first(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def make_plan(
    request: GenerationRequest,
    public_id: str,
    model: ModelInfo,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    echo: Sequence[str] = (),
) -> Plan:
    """Tie the parts together. The parent's internal id is unique whatever public id the client chose."""
    stream = request.stream_options
    include_usage = bool(stream and stream.include_usage)
    parent = ParentRequest(
        parent_id=f"{public_id}-{uuid4().hex}",
        prompts=tuple(tuple(prompt) for prompt in prompts),
        samples=request.sample_numbers,
        params=params,
        text=text_options(request),
    )
    return Plan(
        parent=parent,
        reply_id=public_id,
        created=int(time.time()),
        model=model.name,
        include_usage=include_usage,
        continuous_usage=bool(include_usage and stream and stream.continuous_usage_stats),
        return_token_ids=bool(request.return_token_ids),
        echo=tuple(echo),
        generate=request.max_tokens != 0,
    )


def text_options(request: GenerationRequest) -> TextOptions:
    """How the children's tokens become text."""
    return TextOptions(
        stop=request.stop_strings,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
    )
