"""Fields of the OpenAI document and of its common extensions that Choral knows and does not support.

Each has its neutral values: sending one of them asks for nothing and is accepted; anything else is refused with the
field's name, never ignored. Fields in neither this table nor the request models are unknown; those are accepted and
named in the debug log. Called by the request models in `router.protocol`.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from router.errors import ApiError, Fault

_log = logging.getLogger(__name__)

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # of the other route
        "prompt": (None,),
        "messages": (None,),
        "echo": (None, False),
        "suffix": (None, ""),
        "top_logprobs": (None, 0),
        "max_completion_tokens": (None,),
        "add_generation_prompt": (None, True),
        "continue_final_message": (None, False),
        "chat_template_kwargs": (None, {}),
        # tools
        "tools": (None, []),
        "tool_choice": (None, "none"),
        "parallel_tool_calls": (None, True),
        "functions": (None, []),
        "function_call": (None, "none"),
        "web_search_options": (None,),
        # other kinds of input and output
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "documents": (None, []),
        "moderation": (None,),
        "reasoning_effort": (None, "none"),
        "verbosity": (None, "medium"),
        "safety_identifier": (None,),
        "prompt_cache_key": (None,),
        "prompt_cache_retention": (None,),
        "prompt_cache_options": (None,),
        # guided output
        "response_format": (None, {"type": "text"}),
        "structured_outputs": (None,),
        "guided_json": (None,),
        "guided_regex": (None,),
        "guided_choice": (None,),
        "guided_grammar": (None,),
        "guided_json_object": (None, False),
        "guided_decoding_backend": (None,),
        "guided_whitespace_pattern": (None,),
        # sampling
        "bad_words": (None, []),
        "logits_processors": (None, []),
        "use_beam_search": (None, False),
        "length_penalty": (None, 1),
        "early_stopping": (None, False),
        "best_of_score": (None, "mean_logprob"),
        "stop_after": (None,),
        "deadline_s": (None,),
        # log-probabilities
        "prompt_logprobs": (None,),
        "logprob_token_ids": (None, []),
        "return_tokens_as_token_ids": (None, False),
        # scheduling and transport
        "priority": (None, 0),
        "cache_salt": (None,),
        "stream_interval": (None, 1),
        "chat_template": (None,),
    }
)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that keeps booleans and numbers apart, as JSON does."""
    return any(isinstance(value, bool) == isinstance(known, bool) and value == known for known in neutral)


def refuse_unsupported(extra: Mapping[str, Any]) -> None:
    """Check the fields a request carries beyond its model. Raises ApiError naming the first unsupported one."""
    for name, value in extra.items():
        if name in UNSUPPORTED and not _is_neutral(value, UNSUPPORTED[name]):
            raise ApiError(Fault.UNSUPPORTED, f"{name} is not supported by this server here", name)
    if unknown := [name for name in extra if name not in UNSUPPORTED]:
        _log.debug("unknown fields without effect: %r", unknown)
