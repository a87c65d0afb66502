"""Every test compares a child fed in pieces with the same child fed at once, or with the one-shot decode."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregation.child import ChildStream, TextRules
from aggregation.parent_request import ParentRequest
from aggregation.results import ChoiceDelta
from aggregation.vocabulary import Vocabulary
from workers.outputs import ChildDelta, FinishReason, TokenLogprobs

TEXT = st.text("aenNEDd é你😀", max_size=24)
STOPS = st.lists(st.text("aenNEDd é😀", min_size=1, max_size=4), max_size=3).map(tuple)
CUTS = st.lists(st.integers(0, 40), max_size=10)


@pytest.fixture(scope="session")
def make_child(vocabulary: Vocabulary, make_parent: Callable[..., ParentRequest]) -> Callable[..., ChildStream]:
    def make(*, stream: bool = True, vocabulary: Vocabulary = vocabulary, **options: object) -> ChildStream:
        return ChildStream(0, TextRules.of(make_parent(**options), vocabulary, stream=stream))

    return make


def deltas_of(ids: list[int], cuts: list[int], logprobs: bool = False, **finish: object) -> list[ChildDelta]:
    """The ids of one child cut at `cuts`; the finish comes with the last piece."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    deltas = [ChildDelta(0, ids[start:end]) for start, end in pairwise(bounds)]
    for delta in deltas if logprobs else ():
        delta.logprobs = [TokenLogprobs(i, -i / 10, (0,), (-0.1,)) for i in delta.token_ids]
    for name, value in finish.items():
        setattr(deltas[-1], name, value)
    return deltas


def feed(child: ChildStream, deltas: list[ChildDelta]) -> list[ChoiceDelta]:
    return [choice for delta in deltas if (choice := child.push(delta))]


def whole(choices: list[ChoiceDelta]) -> ChoiceDelta:
    total, *rest = choices
    for choice in rest:
        total.extend(choice)
    return total


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
@given(data=st.data(), stops=STOPS, cuts=CUTS, include=st.booleans(), least=st.integers(0, 6))
def test_any_cutting_into_deltas_gives_the_same_choice(
    make_child, tokenizers, vocabularies, family, data, stops, cuts, include, least
):
    highest = tokenizers[family].get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, highest), min_size=1, max_size=30))
    ids += tokenizers["byte_level"].encode(data.draw(TEXT)).ids if family == "byte_level" else []
    options = {"stop": stops, "include_stop_str_in_output": include, "min_tokens": least, "logprobs": 1}
    options["vocabulary"] = vocabularies[family]
    finish = {"finish_reason": FinishReason.LENGTH}
    streamed = feed(make_child(**options), deltas_of(ids, cuts, logprobs=True, **finish))
    (once,) = feed(make_child(stream=False, **options), deltas_of(ids, cuts, logprobs=True, **finish))
    assert whole(streamed) == once
    assert (once,) == tuple(feed(make_child(**options), deltas_of(ids, [], logprobs=True, **finish)))


@given(text=TEXT, stops=STOPS, cuts=CUTS, include=st.booleans())
def test_the_text_ends_where_the_first_stop_string_ends(make_child, tokenizer, vocabulary, text, stops, cuts, include):
    ids = tokenizer.encode(text + "!").ids
    child = make_child(stop=stops, include_stop_str_in_output=include)
    choice = whole(feed(child, deltas_of(ids, cuts, finish_reason=FinishReason.LENGTH)))
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (text + "!", "length", None)
        assert choice.token_ids == ids
        return
    end, _, stop = min(ends)
    assert (choice.text, choice.finish_reason) == (text[: end if include else end - len(stop)], "stop")
    assert choice.stop_reason == stop
    # The tokens are the shortest beginning whose text holds the stop string: the last one completed it.
    reached = b"".join(vocabulary.piece(i).data for i in choice.token_ids)
    before = b"".join(vocabulary.piece(i).data for i in choice.token_ids[:-1])
    assert len(before) < len(text[:end].encode()) <= len(reached)
    assert choice.completion_tokens == len(choice.token_ids) == child.tokens


@given(text=TEXT, stops=STOPS, cuts=CUTS)
def test_every_delta_is_the_text_of_its_own_tokens(make_child, tokenizer, vocabulary, text, stops, cuts):
    ids = tokenizer.encode(text + "!").ids
    child = make_child(stop=stops, logprobs=0)
    choices = feed(child, deltas_of(ids, cuts, logprobs=True, finish_reason=FinishReason.LENGTH))
    for choice in choices:
        exact = b"".join(vocabulary.piece(i).data for i in choice.token_ids).decode()
        assert exact.startswith(choice.text)
        assert exact == choice.text or choice.finish_reason == "stop"
        assert [entry.drawn.token_id for entry in choice.logprobs] == choice.token_ids
        assert choice.text or choice.finish_reason
    counts = [choice.completion_tokens for choice in choices]
    assert counts == sorted(set(counts))
    assert [choice.finish_reason is not None for choice in choices] == [False] * (len(choices) - 1) + [True]


@given(text=TEXT, stops=STOPS)
def test_no_more_and_no_less_is_held_than_may_become_a_stop_string(make_child, tokenizer, vocabulary, text, stops):
    child, sent, read = make_child(stop=stops), 0, []
    for token_id in tokenizer.encode(text).ids:
        choice = child.push(ChildDelta(0, [token_id]))
        read.append(token_id)
        sent += len(choice.token_ids) if choice else 0
        if choice and choice.finish_reason:
            return
        so_far = b"".join(vocabulary.piece(i).data for i in read).decode(errors="ignore")
        shown = b"".join(vocabulary.piece(i).data for i in read[:sent]).decode()
        begun = [k for k in range(len(so_far)) if any(stop.startswith(so_far[k:]) for stop in stops)]
        assert len(shown) <= min(begun, default=len(so_far))
        if not begun and vocabulary.piece(token_id).text is not None:
            assert shown == so_far


def test_a_stop_string_across_tokens_is_held_and_cut_out(make_child, tokenizer):
    one = [tokenizer.token_to_id(char) for char in "aEND"]
    child = make_child(stop=("END",))
    assert child.push(ChildDelta(0, one[:1])) == ChoiceDelta(0, "a", one[:1], None, 1)
    assert child.push(ChildDelta(0, one[1:2])) is None
    assert child.push(ChildDelta(0, one[2:3])) is None
    assert child.push(ChildDelta(0, [*one[3:], *one])) == ChoiceDelta(0, "", one[1:], None, 4, "stop", "END")


def test_a_false_start_is_let_out_with_its_tokens(make_child, tokenizer):
    e, n, a = (tokenizer.token_to_id(char) for char in "Ena")
    child = make_child(stop=("END",))
    assert child.push(ChildDelta(0, [e])) is None
    assert child.push(ChildDelta(0, [a])) == ChoiceDelta(0, "Ea", [e, a], None, 2)
    assert child.push(ChildDelta(0, [n])) == ChoiceDelta(0, "n", [n], None, 3)


def test_a_held_beginning_comes_out_at_the_finish(make_child, tokenizer):
    e, n = (tokenizer.token_to_id(char) for char in "EN")
    child = make_child(stop=("END",))
    assert child.push(ChildDelta(0, [e])) is None
    last = child.push(ChildDelta(0, [n], finish_reason=FinishReason.LENGTH))
    assert last == ChoiceDelta(0, "EN", [e, n], None, 2, "length")


def test_stop_strings_within_the_first_min_tokens_are_plain_text(make_child, tokenizer):
    a, b = (tokenizer.token_to_id(char) for char in "ab")
    child = make_child(stop=("ab",), min_tokens=2)
    choices = feed(child, deltas_of([a, b, b, a, b, a], [1, 2, 3, 4, 5]))
    assert whole(choices) == ChoiceDelta(0, "abb", [a, b, b, a, b], None, 5, "stop", "ab")


def test_a_split_character_waits_for_its_last_token(make_child, tokenizer):
    ids = tokenizer.encode("😀").ids
    child = make_child()
    assert [child.push(ChildDelta(0, [i])) for i in ids[:-1]] == [None] * (len(ids) - 1)
    assert child.push(ChildDelta(0, ids[-1:])) == ChoiceDelta(0, "😀", ids, None, len(ids))


def test_tokens_without_text_come_with_the_next_text(make_child, tokenizer):
    eos, a = tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("a")
    child = make_child()
    assert child.push(ChildDelta(0, [eos])) is None
    assert child.push(ChildDelta(0, [eos, a])) == ChoiceDelta(0, "a", [eos, eos, a], None, 3)


def test_end_of_sequence_is_counted_and_not_shown(make_child, tokenizer):
    """Even when special tokens are shown, the one that ended the child is not."""
    eos, a = tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("a")
    child = make_child(skip_special_tokens=False, include_stop_str_in_output=True)
    choice = child.push(ChildDelta(0, [eos, a, eos], finish_reason=FinishReason.STOP))
    assert choice == ChoiceDelta(0, "<eos>a", [eos, a, eos], None, 3, "stop")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_id_is_shown_only_when_asked_for(make_child, tokenizer, include, text):
    ids = [tokenizer.token_to_id(char) for char in "ab"]
    child = make_child(include_stop_str_in_output=include)
    choice = child.push(ChildDelta(0, ids, finish_reason=FinishReason.STOP, stop_reason=ids[1]))
    assert choice == ChoiceDelta(0, text, ids, None, 2, "stop", ids[1])


def test_the_finish_has_no_text_only_when_the_last_token_has_none(make_child, tokenizer):
    eos, a = tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("a")
    choices = feed(make_child(), deltas_of([a, eos], [1], finish_reason=FinishReason.STOP))
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("a", None), ("", "stop")]
    choices = feed(make_child(), deltas_of([a, a], [1], finish_reason=FinishReason.LENGTH))
    assert [(choice.text, choice.finish_reason) for choice in choices] == [("a", None), ("a", "length")]


def test_nothing_comes_after_the_finish(make_child, tokenizer):
    a = tokenizer.token_to_id("a")
    child = make_child()
    assert child.push(ChildDelta(0, [a], finish_reason=FinishReason.LENGTH)) is not None
    assert child.push(ChildDelta(0, [a])) is None
    assert child.push(ChildDelta(0, [a], finish_reason=FinishReason.ABORT)) is None
    assert child.tokens == 1


def test_an_error_keeps_the_text_and_names_its_cause(make_child, tokenizer):
    a = tokenizer.token_to_id("a")
    child = make_child(stream=False)
    child.push(ChildDelta(0, [a]))
    choice = child.push(ChildDelta(0, finish_reason=FinishReason.ERROR, error="rank 1 died"))
    assert choice == ChoiceDelta(0, "a", [a], None, 1, "error", None, "rank 1 died")


def test_missing_log_probabilities_fail_the_child(make_child, tokenizer):
    child = make_child(logprobs=2)
    choice = child.push(ChildDelta(0, [tokenizer.token_to_id("a")]))
    assert (choice.finish_reason, choice.error) == ("error", "the log-probabilities do not match the tokens")


@given(cuts=CUTS)
def test_the_fingerprint_depends_on_the_tokens_only(make_child, tokenizer, cuts):
    ids = tokenizer.encode("the end of the world").ids
    children = [make_child(), make_child(), make_child()]
    for child, tokens, where in zip(children, (ids, ids, ids[::-1]), (cuts, [], []), strict=True):
        feed(child, deltas_of(tokens, where, finish_reason=FinishReason.LENGTH))
    assert children[0].fingerprint == children[1].fingerprint != children[2].fingerprint


def test_bare_logprobs_are_those_of_the_drawn_tokens_and_go_with_them(make_child, tokenizer):
    ids = tokenizer.encode("abc END d").ids
    cuts = [2, 4]
    full, bare = (
        feed(make_child(stop=("END",), logprobs=0, bare_logprobs=bare), deltas_of(ids, cuts, logprobs=True))
        for bare in (False, True)
    )
    assert [c.drawn_logprobs for c in bare] == [[entry.drawn.logprob for entry in c.logprobs] for c in full]
    assert [c.token_ids for c in bare] == [c.token_ids for c in full]
    assert bare[-1].finish_reason == "stop" and all(c.logprobs is None for c in bare)
    bare[0].extend(bare[1])
    assert len(bare[0].drawn_logprobs) == len(bare[0].token_ids)
