"""One real server, seen from outside: the openai client, exact samples, honest counts, nothing left behind."""

import asyncio
import random
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_grafana import dashboard_metrics
from tests.system.conftest import Server, marked_processes
from tests.system.requests import PROMPT, QUESTION, choices, complete, stream, streamed_choices

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SAMPLING = {"max_tokens": 12, "temperature": 1.0, "seed": 5}


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_openai_client_completions(server: Server, n: int):
    whole = server.client.completions.create(model=server.model, prompt=PROMPT, n=n, **SAMPLING)
    assert [c.index for c in whole.choices] == list(range(n))
    usage = whole.usage
    assert usage and usage.prompt_tokens == len(_tokens(server, PROMPT))
    texts, finishes = [""] * n, [0] * n
    events = server.client.completions.create(
        model=server.model, prompt=PROMPT, n=n, stream=True, stream_options={"include_usage": True}, **SAMPLING
    )
    streamed_usage = None
    for event in events:
        streamed_usage = event.usage or streamed_usage
        for c in event.choices:
            assert finishes[c.index] == 0
            texts[c.index] += c.text
            finishes[c.index] += c.finish_reason is not None
    assert texts == [c.text for c in whole.choices] and finishes == [1] * n
    assert streamed_usage and streamed_usage.completion_tokens == usage.completion_tokens <= 12 * n
    assert streamed_usage.prompt_tokens == usage.prompt_tokens


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_openai_client_chat(server: Server, n: int):
    whole = server.client.chat.completions.create(model=server.model, messages=QUESTION, n=n, **SAMPLING)
    assert [c.index for c in whole.choices] == list(range(n))
    with server.client.chat.completions.stream(model=server.model, messages=QUESTION, n=n, **SAMPLING) as events:
        for _ in events:
            pass
        final = events.current_completion_snapshot
    assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
    assert [c.finish_reason for c in final.choices] == [c.finish_reason for c in whole.choices]
    assert {c.message.role for c in final.choices} == {"assistant"}


def test_two_prompts_with_three_samples_each(server: Server):
    prompts = [PROMPT, "The best thing about music is"]
    reply = complete(server.url, prompt=prompts, n=3, logprobs=0)
    whole = choices(reply)
    assert len(whole) == 6 and [c["sample"] for c in reply["choices"]] == [0, 1, 2] * 2
    assert reply["usage"]["prompt_tokens"] == sum(len(_tokens(server, prompt)) for prompt in prompts)
    assert reply["usage"]["completion_tokens"] == sum(len(c[1]) for c in whole)
    assert streamed_choices(server.url, 3, prompt=prompts, logprobs=0, num_choices=6) == whole


def _tokens(server: Server, text: str) -> list[int]:
    reply = httpx.post(f"{server.url}/tokenize", json={"prompt": text})
    tokens: list[int] = reply.json()["tokens"]
    return tokens


def test_c2_streaming_changes_nothing(server: Server):
    assert streamed_choices(server.url, 4, logprobs=3) == choices(complete(server.url, n=4, logprobs=3))


def test_c2_a_child_is_replayed_by_its_sample_number_and_the_returned_seed(server: Server):
    drawn = complete(server.url, n=8, logprobs=1, seed=None)
    replayed = complete(server.url, samples=[5, 2], logprobs=1, seed=drawn["seed"])
    assert [c["sample"] for c in replayed["choices"]] == [5, 2]
    assert choices(replayed) == [choices(drawn)[5], choices(drawn)[2]]


def test_c2_neighbours_change_nothing(server: Server):
    alone = choices(complete(server.url, n=4, logprobs=1))

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=300) as client:
            body = {"prompt": PROMPT, "max_tokens": 16, "seed": 11, "temperature": 1.0, "n": 4, "logprobs": 1}
            others = [{**body, "seed": None, "top_p": 0.8, "prompt": f"{i} {PROMPT}"} for i in range(3)]
            posts = [client.post(f"{server.url}/v1/completions", json=b) for b in [*others, body, *others]]
            return await asyncio.gather(*posts)

    assert choices(asyncio.run(crowd())[3].json()) == alone


def test_seeds_change_the_text_on_both_routes(server: Server):
    for path, text in (("completions", lambda c: c["text"]), ("chat/completions", lambda c: c["message"]["content"])):
        first, again, other = (
            [text(c) for c in complete(server.url, path, n=2, seed=seed)["choices"]] for seed in (1, 1, 2)
        )
        assert first == again != other and first[0] != first[1]


@pytest.mark.parametrize("length", [20, 32, 45])
def test_c3_the_prompt_is_computed_once(server: Server, length: int):
    prompt = random.Random(length).sample(range(100, 40_000), length)
    before = server.metrics()
    complete(server.url, prompt=prompt, n=16, max_tokens=4)
    after = server.metrics()
    for name in ("choral_prompt_tokens_asked_total", "choral_prompt_tokens_computed_total"):
        assert after[name] - before[name] == length
    assert after["choral_prompt_tokens_cached_total"] == before["choral_prompt_tokens_cached_total"]


def test_c6_usage_says_what_was_cached_before(server: Server):
    prompt = random.Random(99).sample(range(100, 40_000), 70)
    first, second = (complete(server.url, prompt=prompt, n=3)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 64
    assert first["prompt_tokens"] == second["prompt_tokens"] == 70


def test_stop_strings_end_a_child_and_never_show(server: Server):
    free = complete(server.url, n=3, max_tokens=24)["choices"]
    word = free[1]["text"][8:11]
    request = {"n": 3, "max_tokens": 24, "stop": [word]}
    stopped = complete(server.url, logprobs=0, **request)
    for before, after in zip(free, stopped["choices"], strict=True):
        assert after["text"] == before["text"].split(word)[0]
    assert stopped["choices"][1]["finish_reason"] == "stop" and stopped["choices"][1]["stop_reason"] == word
    assert streamed_choices(server.url, 3, logprobs=0, **{k: v for k, v in request.items() if k != "n"}) == choices(
        stopped
    )


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"n": 0}, 400, "n"),
        ({"temperature": 3}, 400, "temperature"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"best_of": 5}, 400, "best_of"),
        ({"prompt": []}, 400, "prompt"),
        ({"max_tokens": 10**6}, 400, None),
        ({"model": "nobody"}, 404, "model"),
    ],
)
def test_bad_requests_are_refused_by_name(server: Server, body, status: int, param: str | None):
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": PROMPT, **body})
    assert reply.status_code == status
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param


def test_health_and_models(server: Server):
    assert httpx.get(f"{server.url}/health").status_code == 200
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert model["exact"] is True and model["max_model_len"] > 0
    assert httpx.get(f"{server.url}/nowhere").json()["error"]["type"] == "invalid_request_error"


async def _cancelled_family(client: httpx.AsyncClient, url: str, rng: random.Random) -> None:
    """Start a family and leave it at a random moment, by closing the stream or by cancelling the task."""
    body = {"prompt": PROMPT * rng.randint(1, 12), "n": 4, "max_tokens": 400, "ignore_eos": True}
    if rng.random() < 0.5:
        task = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
        await asyncio.sleep(rng.random() * 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    async with client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}) as reply:
        lines = reply.aiter_lines()
        for _ in range(rng.randint(0, 20)):
            await anext(lines)


def test_c5_two_hundred_families_cancelled_at_random_leave_nothing(server: Server):
    async def storm() -> None:
        rng = random.Random(3)
        gate = asyncio.Semaphore(25)
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=200)) as client:

            async def one() -> None:
                async with gate:
                    await _cancelled_family(client, server.url, rng)

            await asyncio.gather(*(one() for _ in range(200)))

    asyncio.run(storm())
    server.wait_until_idle(5)
    assert len(complete(server.url, n=4)["choices"]) == 4


def test_the_dashboard_asks_only_for_what_the_server_exports(server: Server):
    assert dashboard_metrics() <= server.metrics().keys()


def test_a_finished_stream_leaves_nothing(server: Server):
    for _ in stream(server.url, n=8):
        pass
    server.wait_until_idle(5)


def test_the_reply_to_a_closed_socket_is_cancelled_during_a_long_prompt(server: Server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{server.url}/v1/completions",
            json={"prompt": PROMPT * 300, "n": 2, "max_tokens": 200, "ignore_eos": True},
            timeout=httpx.Timeout(30, read=0.5),
        )
    time.sleep(0.1)
    server.wait_until_idle(60)  # an abort waits for the step, which takes seconds on the fallback kernels


def test_sigterm_reaches_every_process(server: Server):
    for pid in marked_processes(server.mark):
        blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        assert blocked is not None
        assert not int(blocked[1], 16) >> signal.SIGTERM - 1 & 1, Path(f"/proc/{pid}/cmdline").read_text()
