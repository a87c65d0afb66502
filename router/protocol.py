"""The request bodies of the HTTP API as pydantic models: types and ranges of every supported field.

Null means "unset" everywhere. What needs the model (vocabulary, context length) or the operator's limits is checked
later, in `router.plan`. Fields beyond these models go through the table in `router.fields`.
"""

import math
from typing import Annotated, Any, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from router.errors import ApiError, Fault, listing
from router.fields import refuse_unsupported
from workers.sampling_params import MAX_LOGPROBS

MAX_SAMPLE_NUMBER = 2**31 - 1


def _must_be(what: str) -> WrapValidator:
    """One plain message instead of one error per branch of a union and per element."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("shape", f"must be {what}") from None

    return WrapValidator(check)


def _unicode(text: str) -> str:
    """JSON escapes can spell half a surrogate pair, which is no text and cannot be tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "must be valid Unicode") from None
    return text


def _bias_values(bias: dict[str, Any]) -> dict[str, float]:
    for key, value in bias.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or abs(value) > 100:
            raise PydanticCustomError("bias", f"the value of {listing([key])} must be a number in -100..100")
    return bias


def _distinct(samples: list[int]) -> list[int]:
    if len(set(samples)) != len(samples):
        raise PydanticCustomError("distinct", "sample numbers must be distinct")
    return samples


Text = Annotated[str, AfterValidator(_unicode)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
Strings = Annotated[list[Text], Field(fail_fast=True)]
Prompt = Annotated[
    Text | Strings | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
    _must_be("a string, a list of strings, a list of token ids or a list of lists of token ids, in valid Unicode"),
]
NonEmpty = Annotated[Text, Field(min_length=1)]
Stop = Annotated[
    NonEmpty | Annotated[list[NonEmpty], Field(fail_fast=True)],
    _must_be("a string or a list of strings, none of them empty, in valid Unicode"),
]
Samples = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_SAMPLE_NUMBER)]],
    Field(fail_fast=True, min_length=1),
    AfterValidator(_distinct),
]
LogitBias = Annotated[dict[str, Any], AfterValidator(_bias_values)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Body(BaseModel):
    """JSON as it is: no string is taken for a number, no float for an integer; numbers are finite."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """`continuous_usage_stats` has an effect only with `include_usage`; obfuscation is never added."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(Body):
    """What completions and chat completions share."""

    model: Text | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: int | None = None
    samples: Samples | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stop: Stop | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Annotated[str, Field(pattern="^(left|right)$")] | None = None
    return_token_ids: bool | None = None
    request_id: str | None = None

    @model_validator(mode="after")
    def _known_fields_and_counts(self) -> Self:
        refuse_unsupported(self.model_extra or {})
        if self.samples is not None and self.n not in (None, len(self.samples)):
            message = f"n is {self.n}, but samples lists {len(self.samples)} sample numbers"
            raise ApiError(Fault.INVALID, message, "n")
        if self.best_of not in (None, self.choices_per_prompt):
            raise ApiError(Fault.UNSUPPORTED, "best_of other than n is not supported", "best_of")
        if self.stream_options is not None and not self.stream:
            raise ApiError(Fault.INVALID, "stream_options needs stream: true", "stream_options")
        return self

    @property
    def choices_per_prompt(self) -> int:
        return len(self.samples) if self.samples is not None else self.n or 1

    @property
    def sample_numbers(self) -> tuple[int, ...]:
        return tuple(self.samples) if self.samples is not None else tuple(range(self.n or 1))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _echo_rules(self) -> Self:
        if self.echo and self.logprobs is not None:
            message = "logprobs together with echo is not supported: prompt log-probabilities are not computed"
            raise ApiError(Fault.UNSUPPORTED, message, "logprobs")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(Fault.INVALID, "max_tokens: 0 needs echo: true", "max_tokens")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry per prompt, text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [prompt]
        return cast("list[str] | list[list[int]]", prompt)


class TextPart(Body):
    """The one kind of content part a text model takes."""

    type: Annotated[str, Field(pattern="^text$")]
    text: Text


class Message(Body):
    """One chat message. Unknown roles and further keys such as `name` are the chat template's business."""

    role: Text
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True, min_length=1)],
        _must_be("a string or a list of parts of type text, in valid Unicode"),
    ]

    @model_validator(mode="after")
    def _text_only(self) -> Self:
        for name in ("tool_calls", "function_call", "audio"):
            if (self.model_extra or {}).get(name):
                raise ApiError(Fault.UNSUPPORTED, f"{name} in a message is not supported", "messages")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as plain data without nulls, its text parts joined by line ends."""
        extra = {key: value for key, value in (self.model_extra or {}).items() if value is not None}
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        return {"role": self.role, "content": text, **extra}


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1)]


class ChatFields(Body):
    """What turns messages into a prompt; shared by chat completions and tokenize."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt exclude each other"
            raise ApiError(Fault.INVALID, message, "continue_final_message")
        return self


class ChatCompletionRequest(GenerationRequest, ChatFields):
    """Body of POST /v1/chat/completions."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(Fault.INVALID, "top_logprobs needs logprobs: true", "top_logprobs")
        return self


class TokenizeRequest(ChatFields):
    """Body of POST /tokenize: either a text or a chat."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Messages = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _text_or_chat(self) -> Self:
        refuse_unsupported(self.model_extra or {})
        if (self.prompt is None) == (not self.messages):
            raise ApiError(Fault.INVALID, "give either prompt or messages", "prompt")
        return self


class DetokenizeRequest(Body):
    """Body of POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds
