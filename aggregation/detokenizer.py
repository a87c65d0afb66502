"""From token ids to text, child by child: increments that together are the one-shot decode of all tokens.

A character is never split: what ends in the middle of one is held until it is whole. Text is handed out per
token, so that whoever matches stop strings knows which token completed one. Used by `child`; knows nothing of
requests.
"""

import codecs
from collections.abc import Iterator
from typing import Protocol

from aggregation.parent_request import TextOptions
from aggregation.vocabulary import Piece, Vocabulary

REPLACEMENT = "\ufffd"
UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The text of one child. Costs amortised O(1) per token."""

    def push(self, token_id: int) -> list[str]:
        """The texts of the tokens this one settles, oldest first, itself last; empty while held."""
        ...

    def flush(self) -> list[str]:
        """The texts of all tokens still held; an incomplete character is U+FFFD."""
        ...


def make_detokenizer(vocabulary: Vocabulary, options: TextOptions) -> Detokenizer:
    """The fast detokenizer where the vocabulary is byte-level, else the one that asks the tokenizer."""
    return (ByteLevelDetokenizer if vocabulary.byte_level else WindowDetokenizer)(vocabulary, options)


class ByteLevelDetokenizer:
    """Text of a byte-level vocabulary: the UTF-8 of the pieces' bytes.

    No decoder of this kind puts spaces between special tokens, so `spaces_between_special_tokens` changes
    nothing.
    """

    __slots__ = ("_held", "_skip_special", "_utf8", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self._vocabulary = vocabulary
        self._skip_special = options.skip_special_tokens
        self._utf8 = UTF8("replace")
        self._held: list[str] = []
        # Invariant between calls: `_held` is empty exactly when no character is open.

    def push(self, token_id: int) -> list[str]:
        piece = self._vocabulary.piece(token_id)
        shown = not (piece.special and self._skip_special)
        if not self._held and piece.text is not None:
            return [piece.text if shown else ""]
        self._held.append(self._utf8.decode(piece.data) if shown else "")
        return [] if self._utf8.getstate()[0] else self._take()

    def flush(self) -> list[str]:
        if self._held:
            self._held[-1] += self._utf8.decode(b"", final=True)
        return self._take()

    def _take(self) -> list[str]:
        taken, self._held = self._held, []
        return taken


class WindowDetokenizer:
    """Text of any other vocabulary: what a token adds to the decode of the last visible token before it.

    A run of byte-fallback tokens is held until it ends, because its last byte decides whether the whole run
    is text.
    """

    __slots__ = ("_anchor", "_options", "_run", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self._vocabulary = vocabulary
        self._options = options
        self._anchor: int | None = None
        self._run: list[int] = []
        """The open run, with the invisible tokens inside and after it."""

    def push(self, token_id: int) -> list[str]:
        piece = self._vocabulary.piece(token_id)
        if piece.byte_fallback or (self._run and not self._visible(piece)):
            self._run.append(token_id)
            return []
        return [*self.flush(), self._text(token_id, piece)]

    def flush(self) -> list[str]:
        run, self._run = self._run, []
        if not run:
            return []
        pieces = [self._vocabulary.piece(token_id) for token_id in run]
        run_bytes = [token_id for token_id, piece in zip(run, pieces, strict=True) if piece.byte_fallback]
        shares = share_out(self._extend(run_bytes), len(run_bytes))
        return [next(shares) if piece.byte_fallback else "" for piece in pieces]

    def _visible(self, piece: Piece) -> bool:
        return piece.known and not (piece.special and self._options.skip_special_tokens)

    def _text(self, token_id: int, piece: Piece) -> str:
        if not self._visible(piece):
            return ""
        joined = not self._options.spaces_between_special_tokens and piece.added
        if joined and self._anchor is not None and self._vocabulary.piece(self._anchor).added:
            self._anchor = token_id
            return piece.data.decode()
        return self._extend([token_id])

    def _extend(self, token_ids: list[int]) -> str:
        """What visible tokens add. Decoders look at the token before, and at being first, but no further."""
        anchor, self._anchor = self._anchor, token_ids[-1]
        if anchor is None:
            return self._vocabulary.decode(token_ids)
        return self._vocabulary.decode([anchor, *token_ids])[len(self._vocabulary.alone(anchor)) :]


def share_out(text: str, size: int) -> Iterator[str]:
    """Deals the text of a run of `size` byte tokens to them: each character to the token of its last byte.

    A run that is not UTF-8 reads as one U+FFFD per byte; a decoder may have stripped characters at its
    beginning.
    """
    broken = text == REPLACEMENT * size
    widths = [1 if broken else len(char.encode()) for char in text]
    shares = [""] * size
    position = size - sum(widths)
    for char, width in zip(text, widths, strict=True):
        position += width
        shares[max(position, 1) - 1] += char
    return iter(shares)
