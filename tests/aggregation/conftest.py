"""Tiny tokenizers of every decoder family that occurs, and step outputs made by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from aggregation.aggregator import Aggregator
from aggregation.parent_request import ParentRequest, TextOptions
from aggregation.vocabulary import Vocabulary
from workers.outputs import ChildDelta, FinishReason, StepOutput
from workers.sampling_params import SamplingParams

settings.register_profile("choral", deadline=None)  # other processes may take the cores
settings.load_profile("choral")

CORPUS = ["the end of the world, and the start: END stop café über 你好 😀 naïve", "hello hello the the end end"]


def byte_level() -> Tokenizer:
    """All 256 bytes, some merges, special and plain added tokens, some with characters that are no ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>", "<|im|>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<｜begin▁of｜>"])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False), AddedToken("é?", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """A Llama-2 style vocabulary: metaspace pieces, one token per byte, the first space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁end", "s", "a", "é", "你", "�", "END", "▁a", "."]
    model = models.BPE({piece: k for k, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    pieces = ["<unk>", "▁", "▁the", "▁▁end", "end", "a▁b", "é", "."]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, False))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "[CLS]", "[SEP]", "the", "end", "##s", "##ing", ".", "'", "n't", "do", "é"]
    tokenizer = Tokenizer(models.WordPiece({piece: k for k, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


FAMILIES: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: make() for name, make in FAMILIES.items()}


@pytest.fixture(scope="session")
def vocabularies(tokenizers: dict[str, Tokenizer]) -> dict[str, Vocabulary]:
    return {name: Vocabulary(tokenizer) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="session")
def tokenizer(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_level"]


@pytest.fixture(scope="session")
def vocabulary(vocabularies: dict[str, Vocabulary]) -> Vocabulary:
    return vocabularies["byte_level"]


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def aggregator(tokenizer_folder: Path) -> Aggregator:
    return Aggregator(tokenizer_folder)


@pytest.fixture(scope="session")
def make_parent() -> Callable[..., ParentRequest]:
    def make(n: int = 2, parent_id: str = "p", prompts: int = 1, **text: Any) -> ParentRequest:
        params = {key: text.pop(key) for key in ("logprobs", "min_tokens", "temperature") if key in text}
        return ParentRequest(
            parent_id=parent_id,
            prompts=tuple((1, 2, 3) for _ in range(prompts)),
            samples=tuple(range(n)),
            params=SamplingParams(max_tokens=4096, seed=1, **params),
            text=TextOptions(**text),
        )

    return make


@pytest.fixture(scope="session")
def make_step() -> Callable[..., StepOutput]:
    def make(
        tokens: dict[int, list[int]],
        finish: dict[int, FinishReason] | None = None,
        parent_id: str = "p",
        group: str = "g",
    ) -> StepOutput:
        step = StepOutput(group)
        for index, ids in tokens.items():
            step.parent(parent_id).add(ChildDelta(index, ids, finish_reason=(finish or {}).get(index)))
        return step

    return make
