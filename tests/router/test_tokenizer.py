"""Tokenising for prompts: the library's own ids, long text off the event loop, the model's sampling defaults."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tokenizers import Tokenizer as FastTokenizer

from router.app import create_app
from router.limits import RouterLimits
from router.tokenizer import INLINE_CHARS, GenerationDefaults, Tokenizer
from tests.router.toy_engine import ToyEngine, write_model_folder


def test_ids_are_those_of_the_library(model_folder: Path) -> None:
    texts = ["plain", "héllo <|im_end|>\n", "😀"]
    fast = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
    assert asyncio.run(Tokenizer(model_folder).encode(texts, True)) == [fast.encode(text).ids for text in texts]


def test_long_text_is_tokenised_in_a_thread(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(model_folder)
    threads: list[int] = []
    whole = tokenizer._encode

    def watched(*args: Any) -> list[list[int]]:
        threads.append(threading.get_ident())
        return whole(*args)

    monkeypatch.setattr(tokenizer, "_encode", watched)
    for length in (INLINE_CHARS, INLINE_CHARS + 1):
        (ids,) = asyncio.run(tokenizer.encode(["x" * length], True))
        assert len(ids) == length
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False]


def test_truncation_settings_of_the_file_are_not_applied(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    fast = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    fast.enable_truncation(3)
    fast.enable_padding(length=9)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert len(asyncio.run(Tokenizer(tmp_path).encode(["abcde"], True))[0]) == 5


def test_a_folder_without_tokenizer_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        create_app(ToyEngine(tmp_path), RouterLimits())


def test_defaults_are_the_request_then_the_model_then_openai(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 20, "eos_token_id": 2}))
    engine = ToyEngine(tmp_path)
    client = TestClient(create_app(engine, RouterLimits()))
    for fields in ({}, {"temperature": 0.75, "top_k": 0}):
        assert client.post("/v1/completions", json={"prompt": "x", **fields}).status_code == 200
    first, second = (parent.params for parent in engine.parents)
    assert (first.temperature, first.top_k, first.top_p) == (0.5, 20, 1.0)
    assert (second.temperature, second.top_k) == (0.75, 0)


def test_a_bad_default_of_the_model_is_named_at_start(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 3}))
    with pytest.raises(ValueError, match="top_p"):
        GenerationDefaults.load(tmp_path)
