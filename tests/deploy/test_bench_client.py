import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.bench_client import ask, connect, fast_piece, pieces
from tests.deploy.virtual_server import VirtualServer, chunk, now, run

DONE = b"data: [DONE]\n\n"


def asked(*script, n=2, expected=4, status=200):
    """What one request for `n` choices measures when the server plays `script`."""

    async def measure():
        server = VirtualServer(lambda body: iter(script))
        server.status = status
        async with server.client() as client:
            return await ask(client, b"{}", n, expected, now)

    return run(measure())


def test_every_choice_has_a_clock_of_its_own_however_chunks_interleave():
    timing = asked(
        0.5, chunk(1, "a"),
        0.25, chunk(0, "b"),
        0.25, chunk(1, "c"), chunk(1, "d"),
        1.0, chunk(0, "e", "length"),
        2.0, chunk(1, "f", "length"), DONE,
    )  # fmt: skip
    assert timing.error is None
    zero, one = timing.choices
    assert (zero.first_s, zero.gaps, zero.end_s) == (0.75, [1.25], 2.0)
    assert (one.first_s, one.gaps, one.end_s) == (0.5, [0.5, 0.0, 3.0], 4.0)
    assert (timing.start_s, timing.first_s, timing.all_first_s, timing.end_s) == (0.0, 0.5, 0.75, 4.0)


def test_a_family_in_step_shows_the_step_not_a_part_of_it():
    async def measure():
        server = VirtualServer()
        async with server.client() as client:
            return await ask(client, json.dumps({"n": 8, "max_tokens": 5}).encode(), 8, 40, now)

    timing = run(measure())
    assert [choice.gaps for choice in timing.choices] == [[0.25] * 4] * 8
    assert (timing.first_s, timing.end_s, timing.tokens) == (0.25, 1.25, 40)


def test_only_chunks_with_text_are_tokens_and_a_silent_choice_begins_with_its_finish():
    timing = asked(
        1.0, chunk(0, ""), chunk(0, "a"),
        1.0, chunk(0, ""),
        1.0, chunk(0, "b"),
        1.0, chunk(0, "", "stop"), chunk(1, "", "stop"), DONE,
    )  # fmt: skip
    zero, one = timing.choices
    assert (zero.first_s, zero.gaps, zero.end_s) == (1.0, [2.0], 4.0)
    assert (one.first_s, one.gaps, one.end_s) == (4.0, [], 4.0)


def test_a_chunk_counts_when_its_line_is_complete():
    line = b": keep-alive\r\n\r\ndata: " + json.dumps(chunk(0, "é\u2028", "stop"), ensure_ascii=False).encode()
    timing = asked(0.5, line[:30], 0.5, line[30:], 0.5, b"\r", 0.5, b"\n\r\n" + DONE, n=1, expected=1)
    assert (timing.error, timing.choices[0].first_s) == (None, 2.0)


def test_tokens_come_from_usage_where_the_server_decides():
    both = (chunk(0, "a", "stop"), chunk(1, "b", "stop"))
    usage = {"choices": [], "usage": {"completion_tokens": 7}}
    assert asked(*both, usage, DONE, expected=None).tokens == 7
    assert asked(*both, DONE, expected=4).tokens == 4
    assert "reports no usage" in asked(*both, DONE, expected=None).error


ENDED = (chunk(0, "a", "stop"), chunk(1, "b", "stop"))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([chunk(0, "a", "stop"), DONE], "without a finish for choice 1"),
        ([*ENDED, chunk(1, "c"), DONE], "continued after its finish"),
        ([*ENDED, chunk(2, "c"), DONE], "choice 2 of 2"),
        ([*ENDED], "broke off before its end"),
        (
            [*ENDED, {"choices": [], "usage": {"completion_tokens": 3}}, DONE],
            "reports 3 completion tokens instead of 4",
        ),
        ([chunk(0, "a"), {"error": {"message": "rank 1 was lost"}}, DONE], "reported an error: rank 1 was lost"),
        ([b"data: {nonsense\n\n", DONE], "no chunk: {nonsense"),
        ([b"data: 7\n\n", DONE], "no chunk: 7"),
        ([{"choices": [{"text": "a"}]}, DONE], "no chunk"),
    ],
)
def test_what_goes_wrong_in_a_stream_is_told(script, said):
    timing = asked(*script)
    assert said in timing.error
    assert timing.tokens is None


def test_a_refusal_is_told_with_the_servers_words():
    refused = asked(b'{"error": {"message": "n is too large"}}', status=400)
    assert refused.error == "the server answered 400: n is too large"
    assert asked(b"busy", status=503).error == "the server answered 503: busy"


def test_a_server_that_is_not_there_is_a_failed_request():
    async def measure():
        async with connect("http://127.0.0.1:9", 1.0) as client:
            return await ask(client, b"{}", 1, 1, now)

    assert "connection to http://127.0.0.1:9 failed" in asyncio.run(measure()).error


TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["", '"index":1', '\\"text":""', '"finish_reason":null', "null"])
)
LOGPROBS = st.one_of(st.none(), st.fixed_dictionaries({"top_logprobs": st.lists(st.dictionaries(TEXTS, st.floats()))}))
CHOICES = st.fixed_dictionaries(
    {
        "index": st.integers(0, 40),
        "text": st.one_of(TEXTS, st.none()),
        "finish_reason": st.sampled_from([None, "stop"]),
    },
    optional={"logprobs": LOGPROBS, "index2": st.integers(), "stop_reason": st.one_of(TEXTS, st.none())},
)
CHUNKS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, max_size=2)},
    optional={
        "id": TEXTS,
        "usage": st.sampled_from([None, {"completion_tokens": 3}]),
        "error": st.none(),
        "text": TEXTS,
    },
)
LAYOUTS = st.sampled_from([(",", ":"), (", ", ": ")])


BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # other processes may take the cores


@BUSY
@given(CHUNKS, LAYOUTS, st.booleans())
def test_reading_without_parsing_never_differs_from_parsing(value, separators, ascii_only):
    data = json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode(errors="replace")
    piece = fast_piece(data)
    assert piece is None or [piece] == pieces(json.loads(data))


@BUSY
@given(st.integers(0, 200), TEXTS, st.sampled_from([None, "stop"]), LAYOUTS)
def test_a_plain_chunk_needs_no_parsing(index, text, finish, separators):
    assert fast_piece(json.dumps(chunk(index, text, finish), separators=separators).encode()) is not None


def test_log_probabilities_and_usage_are_parsed():
    plain = chunk(0, "a")
    assert fast_piece(json.dumps(plain | {"usage": {"completion_tokens": 1}}).encode()) is None
    plain["choices"][0]["logprobs"] = {"top_logprobs": [{"index": -1.0}]}
    assert fast_piece(json.dumps(plain).encode()) is None


def test_the_longest_silence_is_the_one_given():
    assert connect("http://127.0.0.1:9", 5.0).timeout == httpx.Timeout(5.0, connect=10.0)
