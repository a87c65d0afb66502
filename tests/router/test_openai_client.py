"""The official Python client against a real server: what its users see."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from router.engine import NoHealthyGroupError
from tests.router.toy_engine import ToyEngine

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def api(server_port: int, engine: ToyEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server_port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("n", [1, 2, 8])
def test_chat_streamed_and_not_are_the_same(api: openai.OpenAI, engine: ToyEngine, n: int) -> None:
    engine.reverse = True
    fields: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "n": n, "seed": 5, "max_tokens": 9}
    reply = api.chat.completions.create(**fields)
    assert [choice.index for choice in reply.choices] == list(range(n))
    with api.chat.completions.stream(**fields) as events:
        for _ in events:
            pass
        final = events.get_final_completion()
    assert [c.message.content for c in final.choices] == [c.message.content for c in reply.choices]
    assert [c.message.role for c in final.choices] == ["assistant"] * n
    assert [c.finish_reason for c in final.choices] == [c.finish_reason for c in reply.choices]
    assert reply.seed == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("n", [1, 2, 8])
def test_accumulated_logprobs_are_those_of_the_reply(api: openai.OpenAI, n: int) -> None:
    fields: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "n": n, "seed": 5, "max_tokens": 9}
    fields |= {"logprobs": True, "top_logprobs": 2}
    reply = api.chat.completions.create(**fields)
    with api.chat.completions.stream(**fields) as events:
        final = events.get_final_completion()
    assert [choice.logprobs.content for choice in final.choices] == [c.logprobs.content for c in reply.choices]


@pytest.mark.parametrize("n", [1, 3])
def test_completions_of_a_list_of_prompts(api: openai.OpenAI, n: int) -> None:
    fields: dict[str, Any] = {"model": "toy", "prompt": ["a", "b"], "n": n, "seed": 5, "max_tokens": 9}
    reply = api.completions.create(**fields)
    texts = dict.fromkeys(range(2 * n), "")
    for chunk in api.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in reply.choices}


def test_own_fields_pass_through_the_extra_body(api: openai.OpenAI, engine: ToyEngine) -> None:
    reply = api.completions.create(model="toy", prompt="a", extra_body={"samples": [4], "top_k": 3, "seed": 9})
    assert reply.choices[0].sample == 4  # type: ignore[attr-defined]
    assert engine.parents[0].params.top_k == 3


def test_errors_become_the_right_exceptions(api: openai.OpenAI, engine: ToyEngine) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.completions.create(model="toy", prompt="a", temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert bad.value.request_id is not None
    with pytest.raises(openai.NotFoundError) as missing:
        api.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    engine.start_error = NoHealthyGroupError("starting")
    with pytest.raises(openai.InternalServerError) as down:
        api.completions.create(model="toy", prompt="a", stream=True)
    assert (down.value.status_code, down.value.code) == (503, "overloaded")


@pytest.mark.parametrize("chat", [False, True])
def test_a_child_lost_in_a_stream_is_an_exception_not_an_end(api: openai.OpenAI, engine: ToyEngine, chat: bool) -> None:
    engine.fail = {1: 2}
    with pytest.raises(openai.APIError, match="choice 1"):
        if chat:
            list(api.chat.completions.create(model="toy", messages=MESSAGES, n=3, stream=True))
        else:
            list(api.completions.create(model="toy", prompt="a", n=3, stream=True))


def test_models(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["toy"]
    assert api.models.retrieve("toy").max_model_len == 400  # type: ignore[attr-defined]
