"""The text side of one child: token deltas in, choice deltas out, at most one finish and nothing after it.

Holds tokens back until their text may be shown: whole characters only, and nothing that may become a stop
string. A token, its log-probability and its text always leave in the same delta. Owned by `parent`; knows
nothing of siblings.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from aggregation.detokenizer import make_detokenizer
from aggregation.logprobs import floored, position_logprobs
from aggregation.parent_request import ParentRequest, TextOptions
from aggregation.results import ChoiceDelta
from aggregation.stop_strings import StopStrings
from aggregation.vocabulary import Vocabulary
from workers.outputs import ChildDelta, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How the tokens of one parent's children become text. Shared by all of them."""

    vocabulary: Vocabulary
    options: TextOptions
    stops: StopStrings
    min_tokens: int
    """A stop string completed by one of the first `min_tokens` tokens is plain text."""
    logprobs: bool
    stream: bool
    """False: a child's text is kept until it has finished."""

    @classmethod
    def of(cls, parent: ParentRequest, vocabulary: Vocabulary, *, stream: bool) -> "TextRules":
        """Raises ValueError naming the field."""
        return cls(
            vocabulary=vocabulary,
            options=parent.text,
            stops=StopStrings(parent.text.stop),
            min_tokens=parent.params.min_tokens,
            logprobs=parent.params.logprobs is not None,
            stream=stream,
        )


class Cut(NamedTuple):
    """A place where a child's output may be cut, in tokens and characters from its beginning."""

    tokens: int
    chars: int


class Stopped(NamedTuple):
    """A matched stop string and where the output ends because of it."""

    stop: str
    at: Cut


class ChildStream:
    """State of one child. `tokens` counts what has left it, `fingerprint` identifies those tokens."""

    __slots__ = (
        "_chars", "_cuts", "_detokenizer", "_ids", "_logprobs", "_rules", "_sent_chars", "_settled", "_state",
        "_texts", "fingerprint", "finish_reason", "index", "tokens",
    )  # fmt: skip

    def __init__(self, index: int, rules: TextRules) -> None:
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.tokens = 0
        self.fingerprint = 0
        self._rules = rules
        self._detokenizer = make_detokenizer(rules.vocabulary, rules.options)
        self._state = 0
        self._settled = 0
        """Tokens whose text is known, from the beginning; `_chars` counts their characters."""
        self._chars = 0
        self._sent_chars = 0
        self._cuts: deque[Cut] = deque()
        # What has not left yet, parallel lists; `_texts` is shorter by the tokens the detokenizer holds.
        self._ids: list[int] = []
        self._logprobs: list[Any] = []
        """PositionLogprobs, or numbers where they are bare."""
        self._texts: list[str] = []

    def push(self, delta: ChildDelta) -> ChoiceDelta | None:
        """What the delta lets out, if anything. A delta that comes after the finish is dropped."""
        if self.finish_reason is not None:
            return None
        if self._rules.logprobs and len(delta.logprobs or ()) != len(delta.token_ids):
            return self.push(_error(self.index, "the log-probabilities do not match the tokens"))
        hidden = self._hides_last(delta)
        if stopped := self._read(delta, len(delta.token_ids) - hidden):
            return self._stop(stopped)
        if delta.finish_reason is None:
            return self._release()
        if stopped := self._settle(self._detokenizer.flush()):
            return self._stop(stopped)
        if hidden:
            self._hold(delta, len(delta.token_ids) - 1)
            self._settle([""])
        return self._finish(delta.finish_reason, delta.stop_reason, delta.error)

    def _hides_last(self, delta: ChildDelta) -> bool:
        """Whether the last token ended the child and is hidden: end-of-sequence, or a stop id by option."""
        shown = delta.stop_reason is not None and self._rules.options.include_stop_str_in_output
        return delta.finish_reason is FinishReason.STOP and bool(delta.token_ids) and not shown

    def _read(self, delta: ChildDelta, count: int) -> Stopped | None:
        """Takes the first `count` tokens, up to the one that completes a stop string."""
        push = self._detokenizer.push
        for position in range(count):
            self._hold(delta, position)
            if stopped := self._settle(push(delta.token_ids[position])):
                return stopped
        return None

    def _hold(self, delta: ChildDelta, position: int) -> None:
        self._ids.append(delta.token_ids[position])
        if self._rules.logprobs and delta.logprobs is not None:
            entry, bare = delta.logprobs[position], self._rules.options.bare_logprobs
            self._logprobs.append(floored(entry.logprob) if bare else position_logprobs(self._rules.vocabulary, entry))

    def _settle(self, texts: list[str]) -> Stopped | None:
        """Takes the texts of the next tokens, which belong together: no cut falls between them."""
        for text in texts:
            start = self._chars
            self._settled += 1
            self._chars += len(text)
            self._texts.append(text)
            if text and self._rules.stops and (stopped := self._match(text, start)):
                return stopped
        if texts and self._rules.stream:
            self._cuts.append(Cut(self._settled, self._chars))
        return None

    def _match(self, text: str, start: int) -> Stopped | None:
        """Looks for a stop string that ends in `text`, which begins at character `start`."""
        stops = self._rules.stops
        self._state, match = stops.scan(self._state, text)
        while match and self._settled <= self._rules.min_tokens:
            start, text = start + match.end, text[match.end :]
            self._state, match = stops.scan(self._state, text)
        if match is None:
            return None
        kept = 0 if self._rules.options.include_stop_str_in_output else len(match.stop)
        return Stopped(match.stop, Cut(self._settled, start + match.end - kept))

    def _release(self) -> ChoiceDelta | None:
        """Lets out all that can no longer be part of a stop string, if there is text in it."""
        cut, free = None, self._chars - self._rules.stops.held(self._state)
        while self._cuts and self._cuts[0].chars <= free:
            cut = self._cuts.popleft()
        return self._emit(cut) if cut and cut.chars > self._sent_chars else None

    def _stop(self, stopped: Stopped) -> ChoiceDelta:
        self._settled, self._chars = stopped.at
        return self._finish(FinishReason.STOP, stopped.stop, None)

    def _finish(self, reason: FinishReason, stop_reason: int | str | None, error: str | None) -> ChoiceDelta:
        last = self._emit(Cut(self._settled, self._chars))
        last.finish_reason, last.stop_reason, last.error = reason.value, stop_reason, error
        self.finish_reason = reason
        self._ids, self._logprobs, self._texts = [], [], []
        self._cuts.clear()
        return last

    def _emit(self, cut: Cut) -> ChoiceDelta:
        count = cut.tokens - self.tokens
        text = "".join(self._texts[:count])[: cut.chars - self._sent_chars]
        ids, logprobs = self._ids[:count], self._logprobs[:count] if self._rules.logprobs else None
        del self._ids[:count], self._logprobs[:count], self._texts[:count]
        self.tokens, self._sent_chars = cut
        for token_id in ids:
            self.fingerprint = hash((self.fingerprint, token_id))
        if self._rules.options.bare_logprobs:
            return ChoiceDelta(self.index, text, ids, None, self.tokens, drawn_logprobs=logprobs)
        return ChoiceDelta(self.index, text, ids, logprobs, self.tokens)


def _error(index: int, message: str) -> ChildDelta:
    return ChildDelta(index, finish_reason=FinishReason.ERROR, error=message)
