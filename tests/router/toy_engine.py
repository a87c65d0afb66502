"""A deterministic engine in memory with knobs for everything that can go wrong, and a tiny model folder for it.

Each child's tokens depend on (seed, prompt number, sample number) only, as the real ones do. Token texts hold several
scripts, quotes and line separators, so that every writer has to escape them.
"""

import asyncio
import json
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from aggregation.parent_request import ParentRequest
from aggregation.results import (
    ChoiceDelta,
    ParentResult,
    ParentUpdate,
    PositionLogprobs,
    TextLogprob,
    Usage,
)
from cluster.sinks import SinkAddress
from router.engine import ModelInfo

VOCAB = 300
SINK = SinkAddress("sink", None, "node", b"")
WORDS = ("one ", "zwei ", 'tr"ois ', "四 ", "fünf\n", "\u2028six ", "😀 ", "\\8 ")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_folder(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A byte-level tokenizer of 256 bytes and two special tokens (ids 256, 257), and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class ToyEngine:
    folder: Path
    max_model_len: int = 400
    exact: bool = True
    step_s: float = 0.0
    """Time per step; 0 still gives way to others."""
    reverse: bool = False
    """Lists the deltas of an update from the last child to the first, and lets the last child start first."""
    start_error: Exception | None = None
    fail: dict[int, int] = field(default_factory=dict)
    """Choice index to the step at which it fails."""
    lose: set[int] = field(default_factory=set)
    """Choices that never finish and are missing from whole replies."""
    repeat: set[int] = field(default_factory=set)
    """Choices that send one more delta after their finish."""
    hang_at: int | None = None
    """Step at which everything stops."""
    textless_finish: bool = False
    up: bool = True
    parents: list[ParentRequest] = field(default_factory=list)
    running: int = 0
    """Parents inside `stream` or `complete` now."""

    @property
    def model(self) -> ModelInfo:
        return ModelInfo("toy", str(self.folder), self.max_model_len, VOCAB, self.exact, 1_700_000_000)

    async def healthy(self) -> bool:
        return self.up

    async def metrics(self) -> str:
        return "# TYPE choral_toy gauge\nchoral_toy 1\n"

    def length(self, parent: ParentRequest, index: int) -> int:
        """Tokens child `index` will have."""
        most = parent.params.max_tokens
        return most if parent.params.ignore_eos else min(most, 2 + self._noise(parent, index, 0) % 7)

    def tokens(self, parent: ParentRequest, index: int) -> list[int]:
        return [self._noise(parent, index, t + 1) % VOCAB for t in range(self.length(parent, index))]

    def text(self, parent: ParentRequest, index: int) -> str:
        tokens = self.tokens(parent, index)
        return "".join(map(word, tokens[:-1] if self.textless_finish else tokens))

    def _noise(self, parent: ParentRequest, index: int, t: int) -> int:
        key = (parent.params.seed, parent.prompt_number(index), parent.sample_number(index), t)
        return zlib.crc32(repr(key).encode())

    async def stream(self, parent: ParentRequest, *, whole: bool = False) -> AsyncIterator[ParentUpdate]:
        pieces = self._steps(parent)
        async with aclosing(finished(pieces) if whole else pieces) as updates:
            async for update in updates:
                yield update

    async def _steps(self, parent: ParentRequest) -> AsyncGenerator[ParentUpdate, None]:
        self.parents.append(parent)
        self.running += 1
        try:
            if self.start_error is not None:
                raise self.start_error
            for step in range(max(self.length(parent, i) for i in range(parent.num_children)) + 1):
                await self._pause(step)
                if deltas := self._deltas(parent, step):
                    yield ParentUpdate(deltas)
            yield ParentUpdate([], self._usage(parent))
        finally:
            self.running -= 1

    async def complete(self, parent: ParentRequest) -> ParentResult:
        whole: dict[int, ChoiceDelta] = {}
        usage = Usage(0, 0, 0)
        async for update in self.stream(parent):
            for delta in update.deltas:
                if (known := whole.get(delta.index)) is None:
                    whole[delta.index] = delta
                else:
                    known.extend(delta)
            usage = update.usage or usage
        return ParentResult([whole[i] for i in sorted(whole) if i not in self.lose], usage)

    async def _pause(self, step: int) -> None:
        if step == self.hang_at:
            await asyncio.Event().wait()
        await asyncio.sleep(self.step_s)

    def _deltas(self, parent: ParentRequest, step: int) -> list[ChoiceDelta]:
        order = list(range(parent.num_children))
        if self.reverse:
            order = order[::-1]
        found = (self._delta(parent, index, step - (self.reverse and index == 0)) for index in order)
        return [delta for delta in found if delta is not None]

    def _delta(self, parent: ParentRequest, index: int, step: int) -> ChoiceDelta | None:
        tokens = self.tokens(parent, index)
        if self.fail.get(index) == step:
            return ChoiceDelta(index, "", [], None, step, "error", error="the sandbox broke")
        late = step == len(tokens) and index in self.repeat
        if self.fail.get(index, step) < step or not (0 <= step < len(tokens) or late):
            return None
        token = tokens[min(step, len(tokens) - 1)]
        last = step == len(tokens) - 1
        finish = ("length" if len(tokens) == parent.params.max_tokens else "stop") if last else None
        text = "" if last and self.textless_finish else word(token)
        delta = ChoiceDelta(
            index, text, [token], None, step + 1, None if index in self.lose else finish, "END" if last else None
        )
        if (most := parent.params.logprobs) is not None:
            found = positions(token, most)
            if parent.text.bare_logprobs:
                delta.drawn_logprobs = [found.drawn.logprob]
            else:
                delta.logprobs = [found]
        return delta

    def _usage(self, parent: ParentRequest) -> Usage:
        generated = sum(self.length(parent, i) for i in range(parent.num_children))
        return Usage(sum(map(len, parent.prompts)), generated, 3)


async def finished(updates: AsyncGenerator[ParentUpdate, None]) -> AsyncGenerator[ParentUpdate, None]:
    """The same with every choice in one piece."""
    whole: dict[int, ChoiceDelta] = {}
    async with aclosing(updates):
        async for update in updates:
            for delta in update.deltas:
                if (known := whole.get(delta.index)) is None:
                    whole[delta.index] = delta
                else:
                    known.extend(delta)
            ended = [whole.pop(d.index) for d in update.deltas if d.finish_reason is not None]
            if ended or update.usage:
                yield ParentUpdate(ended, update.usage)


def word(token: int) -> str:
    return WORDS[token % len(WORDS)]


def positions(token: int, top: int) -> PositionLogprobs:
    """The drawn token ranks just below the `top` best, so it is appended."""
    best = tuple(_text_logprob(token + 1 + k, -0.5 * (k + 1)) for k in range(top))
    drawn = _text_logprob(token, -9.0)
    return PositionLogprobs(drawn, (*best, drawn))


def _text_logprob(token: int, logprob: float) -> TextLogprob:
    text = word(token)
    return TextLogprob(text, token, logprob, tuple(text.encode()))
