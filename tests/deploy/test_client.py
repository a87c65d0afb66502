import contextlib
import threading
import time

import pytest
import uvicorn

from deploy.client import Child, Family, Question, SampleError, TokenProb, connect, served_model, stream
from router.app import create_app
from router.limits import RouterLimits
from tests.router.toy_engine import ToyEngine, write_model_folder


def ask(server, question=None, model="tiny"):
    question = question or Question(prompt="Hi", samples=(0, 1, 2), max_tokens=4)
    family = Family.of(question)
    with connect(server.url) as client:
        for _ in stream(client, question, model, family):
            pass
    return family


def test_a_chat_question_asks_for_a_stream_of_n_with_counts(server):
    ask(server, Question(prompt="Hi", samples=(0, 1, 2), max_tokens=4, sampling={"top_k": 5, "stop": ["Z"]}))
    assert server.requests == [
        (
            "/v1/chat/completions",
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": "Hi"}],
                "n": 3,
                "max_completion_tokens": 4,
                "top_k": 5,
                "stop": ["Z"],
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            },
        )
    ]


def test_a_replay_sends_the_sample_numbers_instead_of_n():
    body = Question(prompt="Hi", samples=(3, 5), replay=True, max_tokens=4).body("m")
    assert body["samples"] == [3, 5]
    assert "n" not in body


def test_each_route_asks_for_logprobs_in_its_own_way():
    chat = Question(prompt="Hi", samples=(0,), max_tokens=4, logprobs=2).body("m")
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 2)
    raw = Question(prompt="Hi", samples=(0,), max_tokens=4, logprobs=0, chat=False)
    assert raw.path == "/v1/completions"
    assert raw.body("m")["prompt"] == "Hi"
    assert (raw.body("m")["logprobs"], raw.body("m")["max_tokens"]) == (0, 4)
    assert "messages" not in raw.body("m")


def test_interleaved_chunks_become_whole_children(server):
    family = ask(server)
    assert family.children == [
        Child(index, index, f"one {index}\ntwo\u2028{index}", 4, "length" if index else "stop") for index in range(3)
    ]
    assert (family.seed, family.model, family.id, family.tokens) == (77, "tiny", "chatcmpl-1", 12)
    assert family.usage["completion_tokens"] == 12


def test_logprobs_of_both_routes_read_alike():
    tops = [{"token": "a", "logprob": -0.5, "bytes": [97]}, {"token": "b", "logprob": -1.0, "bytes": [98]}]
    chat = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": tops}]}
    raw = {
        "tokens": ["a"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.0}],
        "text_offset": [0],
    }
    read = []
    for key, logprobs in (({"delta": {"content": "a"}}, chat), ({"text": "a"}, raw)):
        family = Family.of(Question(prompt="Hi", samples=(0,), max_tokens=4))
        family.absorb({"choices": [{"index": 0, "logprobs": logprobs, **key}]})
        read.append((family.children[0].text, family.children[0].logprobs))
    assert read == [("a", [TokenProb("a", -0.5, (("a", -0.5), ("b", -1.0)))])] * 2


def test_an_error_event_is_raised_with_its_message(server):
    def script(body):
        yield server.role(0)
        yield {"error": {"message": "rank 1 was lost", "type": "server_error", "param": None, "code": None}}
        yield server.done

    server.script = script
    with pytest.raises(SampleError, match="rank 1 was lost"):
        ask(server)


def test_a_refusal_is_raised_with_status_and_message(server):
    server.status = 400
    server.script = lambda body: [{"error": {"message": "n is out of range", "param": "n"}}]
    with pytest.raises(SampleError, match="400: n is out of range"):
        ask(server)


def test_a_stream_that_breaks_off_is_no_answer(server):
    server.script = lambda body: [server.role(0), server.chunk(0, "half", 1)]
    with pytest.raises(SampleError, match="broke off"):
        ask(server)


def test_a_stream_without_every_finish_is_no_answer(server):
    server.script = lambda body: [server.chunk(0, "all", 1, "stop"), server.done]
    with pytest.raises(SampleError, match="without a finish for choice 1, 2"):
        ask(server)


@pytest.mark.parametrize("data", ["no json", '{"choices": [{"index": 7}]}', "[]", '{"id": "x"}'])
def test_an_event_that_is_no_chunk_is_named(server, data):
    server.script = lambda body: [f"data: {data}\n\n", server.done]
    with pytest.raises(SampleError, match="no chunk"):
        ask(server)


def test_closing_the_stream_hangs_up(server):
    server.script = server.endless
    question = Question(prompt="Hi", samples=(0,), max_tokens=4)
    family = Family.of(question)
    with connect(server.url) as client, contextlib.closing(stream(client, question, "m", family)) as updates:
        while family.tokens < 3:
            next(updates)
    assert server.hung_up.wait(5)


def test_the_first_listed_model_is_asked(server):
    with connect(server.url) as client:
        assert served_model(client) == "tiny"


def test_a_silent_address_is_named(server):
    server.server_close()
    with (
        connect(server.url) as client,
        pytest.raises(SampleError, match=f"no server answers at {server.url}"),
    ):
        served_model(client)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_an_address_without_scheme_or_host_is_refused(url):
    with pytest.raises(SampleError, match="address"):
        connect(url)


@contextlib.contextmanager
def routed(engine):
    """The real router in front of an engine in memory, on a port of its own; yields its address."""
    app = create_app(engine, RouterLimits())
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        while not running.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join()


@pytest.mark.parametrize("chat", [True, False])
def test_the_router_is_understood(tmp_path, chat):
    engine = ToyEngine(write_model_folder(tmp_path / "model"))
    question = Question(
        prompt="Hi", samples=(4, 0, 2), replay=True, chat=chat, max_tokens=6, logprobs=2, sampling={"seed": -5}
    )
    family = Family.of(question)
    with routed(engine) as url, connect(url) as client:
        for _ in stream(client, question, served_model(client), family):
            pass
    (parent,) = engine.parents
    assert parent.samples == (4, 0, 2)
    assert (family.seed, family.model) == (-5, "toy")
    for child in family.children:
        assert child.text == engine.text(parent, child.index)
        assert child.tokens == len(child.logprobs) == engine.length(parent, child.index)
        assert child.sample == (4, 0, 2)[child.index]
        assert all(len(at.top) >= 2 for at in child.logprobs)
    assert family.usage["completion_tokens"] == family.tokens


def test_a_failed_child_of_the_router_is_raised_by_name(tmp_path):
    engine = ToyEngine(write_model_folder(tmp_path / "model"), fail={1: 2})
    question = Question(prompt="Hi", samples=(0, 1), max_tokens=6, sampling={"seed": 1, "ignore_eos": True})
    with routed(engine) as url, connect(url) as client, pytest.raises(SampleError, match="choice 1 failed"):
        for _ in stream(client, question, "toy", Family.of(question)):
            pass
