"""Chat messages to prompt text: the model's own Jinja template, rendered in a sandbox as its authors expect.

The conventions are those of Hugging Face tokenizers (https://huggingface.co/docs/transformers/chat_templating): block
trimming, loop controls, `raise_exception`, `strftime_now`, a plain `tojson`, special tokens by name. Knows nothing of
token ids. Called by `router.tokenizer`.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.errors import ApiError, Fault, clip

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})
# Its trailing space shows whether the template keeps or strips the space around a message.
_END_MARK = "\ue0fcEND-OF-UNFINISHED-MESSAGE\ue0fc "


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's turns for training; here its body renders as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter: no HTML escapes, and characters stay as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template. Raises jinja2.TemplateSyntaxError when `source` is malformed."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> "ChatTemplate | None":
        """The template of a model folder: its own file, or the entry in tokenizer_config.json; None without one."""
        if (path := folder / "chat_template.jinja").is_file():
            return cls(path.read_text(encoding="utf-8"), special)
        source = config.get("chat_template")
        if isinstance(source, list):
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return None if source is None else cls(source, special)

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text. Raises ApiError (400) when the template refuses the messages or trips over them."""
        if taken := RESERVED & variables.keys():
            message = f"chat_template_kwargs may not set {', '.join(sorted(taken))}"
            raise ApiError(Fault.INVALID, message, "chat_template_kwargs")
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _END_MARK}]
        text = self._render({**variables, "messages": messages, "add_generation_prompt": add_generation_prompt})
        return _cut_unfinished(text) if continue_final_message else text

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            text = self._template.render({**self._special_tokens, "tools": None, "documents": None, **variables})
            text.encode()
        except Exception as error:  # a template may raise anything on data it was not written for
            reason = clip(str(error)) or type(error).__name__
            raise ApiError(Fault.INVALID, f"the chat template refused these messages: {reason}", "messages") from error
        return text


def _cut_unfinished(text: str) -> str:
    """The text up to the end of the final message's own words. Raises ApiError when the template dropped them."""
    end = text.rfind(_END_MARK.rstrip())
    if end < 0:
        message = "continue_final_message: the chat template leaves out the final message"
        raise ApiError(Fault.INVALID, message, "continue_final_message")
    kept_space = text.startswith(_END_MARK, end)
    return text[:end] if kept_space else text[:end].rstrip()
