"""What a token id stands for: its exact bytes and whether it is special, read from a tokenizer.json.

One instance is shared by all children of an aggregator; it remembers every id it was asked for, so a token
costs one dictionary look-up. Knows nothing of children or of requests. Used by the detokenizers and by
`logprobs`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
METASPACE = "▁"


class Piece(NamedTuple):
    """One entry. `text` is None where `data` is not whole UTF-8 on its own; an unknown id has no bytes."""

    data: bytes
    text: str | None
    known: bool
    special: bool
    added: bool
    byte_fallback: bool


class TokenText(NamedTuple):
    """A token as shown beside its log-probability: bytes that are no character show as U+FFFD."""

    text: str
    bytes: tuple[int, ...]


class Vocabulary:
    """The pieces of one tokenizer. Raises ValueError if its decoder mixes byte-level with other rules."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        rules = list(_rules(json.loads(tokenizer.to_str())["decoder"]))
        kinds = {rule["type"] for rule in rules}
        self.byte_level = "ByteLevel" in kinds
        if self.byte_level and not kinds <= {"ByteLevel", "Fuse"}:
            raise ValueError(f"tokenizer.json: decoder {sorted(kinds)} is not supported")
        self._byte_fallback = "ByteFallback" in kinds
        self._metaspace = any(_shows_space(rule) for rule in rules)
        added = tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._pieces: dict[int, Piece] = {}
        self._shown: dict[int, TokenText] = {}
        self._alone: dict[int, str] = {}

    @classmethod
    def load(cls, folder: str | Path) -> "Vocabulary":
        """The vocabulary of `folder`/tokenizer.json. Raises FileNotFoundError naming the file."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        return cls(Tokenizer.from_file(str(path)))

    def piece(self, token_id: int) -> Piece:
        known = self._pieces.get(token_id)
        if known is None:
            known = self._pieces[token_id] = self._make_piece(token_id)
        return known

    def shown(self, token_id: int) -> TokenText:
        known = self._shown.get(token_id)
        if known is None:
            data = self.piece(token_id).data
            known = self._shown[token_id] = TokenText(data.decode(errors="replace"), tuple(data))
        return known

    def decode(self, token_ids: list[int]) -> str:
        """One-shot decode, special tokens included."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def alone(self, token_id: int) -> str:
        """`decode` of a single token."""
        known = self._alone.get(token_id)
        if known is None:
            known = self._alone[token_id] = self.decode([token_id])
        return known

    def _make_piece(self, token_id: int) -> Piece:
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return Piece(b"", "", False, False, False, False)
        is_byte = self._byte_fallback and BYTE_TOKEN.fullmatch(token) is not None
        data = bytes([int(token[3:5], 16)]) if is_byte else self._token_bytes(token)
        return Piece(data, _strict_text(data), True, token in self._special, token_id in self._added, is_byte)

    def _token_bytes(self, token: str) -> bytes:
        if self.byte_level:
            return byte_level_bytes(token)
        return (token.replace(METASPACE, " ") if self._metaspace else token).encode()


def _rules(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The decoder's rules with nested sequences laid out flat."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _rules(inner)
    else:
        yield decoder


def _shows_space(rule: dict[str, Any]) -> bool:
    """Whether the rule writes the metaspace character as a space."""
    if rule["type"] == "Replace":
        return bool(rule["pattern"] == {"String": METASPACE} and rule["content"] == " ")
    return bool(rule["type"] == "Metaspace")


def _strict_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-in character of every byte: itself where printable, else the next one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level piece; a token with any character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()
