from math import inf, nan

from aggregation.logprobs import position_logprobs, text_logprob
from workers.outputs import TokenLogprobs


def test_bytes_of_partial_characters_are_exact(tokenizer, vocabulary):
    ids = tokenizer.encode("x😀").ids
    entries = [text_logprob(vocabulary, i, -0.5) for i in ids]
    assert bytes(byte for entry in entries for byte in entry.bytes) == "x😀".encode()
    assert [entry.token_id for entry in entries] == ids
    assert entries[0].token == "x"
    assert all("\ufffd" in entry.token for entry in entries[1:])


def test_values_are_floored(vocabulary):
    assert [text_logprob(vocabulary, 5, value).logprob for value in (-inf, -1e30, nan, -1.25)] == [
        -9999.0,
        -9999.0,
        -9999.0,
        -1.25,
    ]


def test_the_drawn_token_is_appended_only_when_absent(vocabulary):
    absent = position_logprobs(vocabulary, TokenLogprobs(9, -3.0, (7, 8), (-1.0, -2.0)))
    assert [(entry.token_id, entry.logprob) for entry in absent.top] == [(7, -1.0), (8, -2.0), (9, -3.0)]
    present = position_logprobs(vocabulary, TokenLogprobs(8, -2.0, (7, 8), (-1.0, -2.0)))
    assert [entry.token_id for entry in present.top] == [7, 8]
    assert present.drawn == present.top[1]


def test_with_no_alternatives_the_drawn_token_stands_alone(vocabulary):
    alone = position_logprobs(vocabulary, TokenLogprobs(9, -3.0, (), ()))
    assert alone.top == (alone.drawn,)
