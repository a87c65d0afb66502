"""Text to token ids and back for the HTTP layer, from the files in the model folder.

Reads tokenizer.json with the `tokenizers` library alone, so that importing the router never imports torch. Generated
tokens become text in the aggregator, not here. Made once per app.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from router.chat_template import ChatTemplate
from router.errors import ApiError, Fault
from router.protocol import ChatFields
from workers.sampling_params import SamplingParams

INLINE_CHARS = 16_384
"""Longer text is tokenised in a thread, so that it does not hold up the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Sampling values of the model's generation_config.json; OpenAI's defaults where it has none.

    `load` raises ValueError naming a value that is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> "GenerationDefaults":
        config = _read_json(folder / "generation_config.json")
        known = {name: config[name] for name in cls.__slots__ if config.get(name) is not None}
        SamplingParams(max_tokens=1, seed=0, **known)
        return cls(**known)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and the like by name, as chat templates read them."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


class Tokenizer:
    """The served model's tokenizer and chat template.

    Raises ValueError when the folder has no tokenizer.json that can be read.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"no usable tokenizer.json in the model folder: {error}") from error
        self._fast.no_truncation()
        self._fast.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        self._template = ChatTemplate.load(folder, config, special)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        if sum(map(len, texts)) <= INLINE_CHARS:
            return self._encode(texts, add_special_tokens)
        return await asyncio.to_thread(self._encode, texts, add_special_tokens)

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        return [self._fast.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        text: str = self._fast.decode(list(ids), skip_special_tokens=False)
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str | None]:
        """Each id as it stands in the vocabulary."""
        return [self._fast.id_to_token(token_id) for token_id in ids]

    def chat_text(self, chat: ChatFields) -> str:
        """The prompt text of a chat. Raises ApiError (400) without a template, or when it refuses the messages."""
        if self._template is None:
            message = "this model has no chat template; use /v1/completions"
            raise ApiError(Fault.INVALID, message, "messages")
        unfinished = bool(chat.continue_final_message)
        return self._template.render(
            [message.for_template() for message in chat.messages],
            add_generation_prompt=not unfinished if chat.add_generation_prompt is None else chat.add_generation_prompt,
            continue_final_message=unfinished,
            variables=chat.chat_template_kwargs or {},
        )
