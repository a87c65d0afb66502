"""Rows become plans by the checks of the HTTP routes, and whatever is wrong is named."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from router.batch.rows import Row, RowReader, RowRules
from router.errors import ApiError
from router.limits import RouterLimits
from router.serving import Serving
from tests.router.toy_engine import ToyEngine

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def read(model_folder: Path):
    serving = Serving.load(ToyEngine(model_folder), RouterLimits(max_n=8))

    def read(raw: Any, number: int = 0, **rules: Any) -> Row:
        reader = RowReader(serving, RowRules(**{"key": "k", **rules}))
        row_id, fields = reader.identify(number, raw if isinstance(raw, str | dict) else json.dumps(raw))
        if isinstance(fields, ApiError):
            raise fields
        return asyncio.run(reader.read(number, row_id, fields))

    return read


def line(body: Any, **changes: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body, **changes}


def test_plain_rows_and_openai_lines_make_the_same_plan(read):
    plain = read({"id": "a", "prompt": "hi", "n": 2, "temperature": 0.5})
    openai = read(line({"prompt": "hi", "n": 2, "temperature": 0.5}))
    assert plain.id == openai.id == "a"
    assert plain.parent.prompts == openai.parent.prompts and plain.parent.params == openai.parent.params
    ids = read({"id": "a", "prompt_token_ids": list(plain.parent.prompts[0]), "n": 2, "temperature": 0.5})
    assert ids.parent.prompts == plain.parent.prompts and ids.parent.params == plain.parent.params
    chat = read({"id": "a", "messages": CHAT})
    assert chat.parent.prompts == read(line({"messages": CHAT}, url="/v1/chat/completions")).parent.prompts


def test_a_seed_is_given_or_fixed_by_the_job_and_the_id(read):
    def seed(fields: Any, **rules: Any) -> int:
        return read({"prompt": "x", **fields}, **rules).parent.params.seed

    assert seed({"seed": 5}) == 5
    assert seed({"id": "a"}) == seed({"id": "a", "seed": -1}) == seed({"id": "a"}, number=9) >= 0
    assert len({seed({"id": "a"}), seed({"id": "b"}), seed({"id": "a"}, key="other"), seed({})}) == 4


def test_defaults_fill_in_what_a_row_does_not_say(read):
    defaults = {"n": 4, "max_tokens": 9, "temperature": 0.25}
    row = read({"prompt": "x", "max_tokens": 3, "temperature": None}, defaults=defaults)
    assert (row.parent.num_children, row.parent.params.max_tokens, row.parent.params.temperature) == (4, 3, 0.25)
    assert read({"prompt": "x", "samples": [7]}, defaults=defaults).parent.samples == (7,)
    assert read({"messages": CHAT, "max_completion_tokens": 2}, defaults=defaults).parent.params.max_tokens == 2


def test_rows_without_an_id_go_by_their_number(read):
    assert read({"prompt": "x"}, number=17).id == "17"
    assert read({"id": 3, "prompt": "x"}, number=17).id == "3"


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        ("{", None, "not valid JSON"),
        ("[1]", None, "not a JSON object"),
        ({"id": ""}, "id", "not empty"),
        ('{"id": "\\ud800", "prompt": "x"}', "id", "text"),
        ({"id": "a"}, "prompt", "one of prompt, messages and prompt_token_ids"),
        ({"prompt": "x", "messages": CHAT}, "prompt", "one of"),
        ({"prompt": ["x", "y"]}, "prompt", "must be a text"),
        ({"prompt_token_ids": ["x"]}, "prompt_token_ids", "token ids"),
        ({"prompt_token_ids": [301]}, "prompt", "301"),
        ({"prompt": "x", "temperature": 3}, "temperature", "less than or equal to 2"),
        ({"prompt": "x", "n": 9}, "n", "more than 8"),
        ({"prompt": "x", "temprature": 1}, "temprature", "unknown field"),
        ({"prompt": "x", "stream": True}, "stream", "not supported in a batch"),
        ({"prompt": "x", "echo": True}, "echo", "not supported in a batch"),
        ({"prompt": "x", "logprobs": 2}, "logprobs", "OpenAI's format"),
        ({"prompt": "x", "tools": [{}]}, "tools", "not supported"),
        ({"prompt": "x" * 500}, "prompt", "context"),
        ({"prompt": "x", "model": "other"}, "model", "does not exist"),
        (line({"prompt": "x"}, url="/v1/embeddings"), "url", "/v1/completions"),
        (line({"prompt": "x"}, method="GET"), "method", "POST"),
        (line("x"), "body", "object"),
        (line({"prompt": "x"}, n=3), "n", "beside the body"),
        (line({"prompt": "x"}, custom_id=["a"]), "custom_id", "text"),
    ],
)
def test_what_is_wrong_is_named(read, raw: Any, param: str | None, words: str):
    with pytest.raises(ApiError, match=words) as caught:
        read(raw)
    assert caught.value.param == param


def test_extra_fields_are_named_by_the_job(read):
    row = {"id": "a", "prompt": "x", "answer": 4}
    with pytest.raises(ApiError, match="answer"):
        read(row)
    assert read(row, extra=frozenset({"answer"})).parent.params == read({"id": "a", "prompt": "x"}).parent.params
    assert read(row, strict=False).id == "a"


def test_a_batch_of_one_route_refuses_the_other(read):
    with pytest.raises(ApiError, match="url must be /v1/chat/completions"):
        read(line({"prompt": "x"}), url="/v1/chat/completions")


def test_log_probabilities_come_with_every_sample_but_only_when_asked_for_in_a_reply(read):
    assert read({"prompt": "x"}).parent.params.logprobs == 0
    assert read({"messages": CHAT, "logprobs": True}).parent.params.logprobs == 0
    assert read({"prompt": "x"}, replies=True).parent.params.logprobs is None
    assert read({"prompt": "x", "logprobs": 3}, replies=True).parent.params.logprobs == 3
