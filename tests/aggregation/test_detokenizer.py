import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from aggregation.detokenizer import ByteLevelDetokenizer, WindowDetokenizer, make_detokenizer, share_out
from aggregation.parent_request import TextOptions
from aggregation.vocabulary import Vocabulary

FAMILIES = ["byte_level", "byte_fallback", "metaspace", "word_piece"]


def pieces(vocabulary: Vocabulary, ids: list[int], **options: bool) -> list[list[str]]:
    """What each push and the final flush settled."""
    detokenizer = make_detokenizer(vocabulary, TextOptions(**options))
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def text_of(settled: list[list[str]]) -> str:
    return "".join(text for group in settled for text in group)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), skip=st.booleans())
def test_increments_add_up_to_the_one_shot_decode(tokenizers, vocabularies, family, data, skip):
    tokenizer = tokenizers[family]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    settled = pieces(vocabularies[family], ids, skip_special_tokens=skip)
    assert text_of(settled) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert sum(len(group) for group in settled) == len(ids)


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
@given(data=st.data())
def test_runs_of_raw_bytes_add_up_too(tokenizers, vocabularies, family, data):
    """Bytes of real text, cut and damaged, so that whole, broken and open characters all occur."""
    tokenizer, vocabulary = tokenizers[family], vocabularies[family]
    byte_ids = {vocabulary.piece(i).data: i for i in reversed(range(tokenizer.get_vocab_size()))}
    raw = data.draw(st.text("aé你😀", max_size=8)).encode()
    damaged = raw[data.draw(st.integers(0, 3)) :] + data.draw(st.binary(max_size=2)) + raw
    ids = [byte_ids[bytes([byte])] for byte in damaged]
    assert text_of(pieces(vocabulary, ids)) == tokenizer.decode(ids)


@given(text=st.text(max_size=40))
def test_no_push_settles_half_a_character(tokenizer, vocabulary, text):
    ids = tokenizer.encode(text).ids
    assume(tokenizer.decode(ids) == text)  # the added token "é?" reads as one damaged byte, by Hugging Face too
    settled = pieces(vocabulary, ids)
    assert all("\ufffd" not in "".join(group) for group in settled) or "\ufffd" in text
    assert text_of(settled) == text


def test_tokens_inside_a_character_are_settled_together(tokenizer, vocabulary):
    ids = tokenizer.encode("a😀b").ids
    settled = pieces(vocabulary, ids)
    assert [len(group) for group in settled if group] == [1, len(ids) - 2, 1]
    assert ["".join(group) for group in settled if group] == ["a", "😀", "b"]


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback"])
def test_an_open_character_at_the_end_is_a_replacement_character(vocabularies, family):
    vocabulary = vocabularies[family]
    first, last = (next(i for i in range(400) if vocabulary.piece(i).data == data) for data in (b"a", b"\xe4"))
    detokenizer = make_detokenizer(vocabulary, TextOptions())
    assert detokenizer.push(first) + detokenizer.push(last) in ([], ["a"])
    assert detokenizer.flush()[-1] == "\ufffd"
    assert detokenizer.flush() == []


def test_a_byte_run_gives_each_character_to_the_token_of_its_last_byte(tokenizers, vocabularies):
    tokenizer = tokenizers["byte_fallback"]
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "é你".encode()]
    settled = pieces(vocabularies["byte_fallback"], [*ids, tokenizer.token_to_id("s")])
    assert settled[:-2] == [[]] * 5
    assert settled[-2] == ["", "é", "", "", "你", "s"]


def test_share_out_of_broken_and_stripped_runs():
    assert list(share_out("\ufffd\ufffd", 2)) == ["\ufffd", "\ufffd"]
    assert list(share_out("é", 3)) == ["", "", "é"]


def test_skipped_special_tokens_do_not_end_a_character(tokenizer, vocabulary):
    smile = tokenizer.encode("😀").ids
    ids = [smile[0], tokenizer.token_to_id("<eos>"), *smile[1:]]
    assert text_of(pieces(vocabulary, ids)) == "😀"
    assert text_of(pieces(vocabulary, ids, skip_special_tokens=False)) == tokenizer.decode(
        ids, skip_special_tokens=False
    )


def test_spaces_between_special_tokens():
    """A tokenizer without a decoder joins tokens with spaces; the option takes them away between added tokens only."""
    tokenizer = Tokenizer(models.WordLevel({"the": 0, "end": 1}, unk_token="the"))
    tokenizer.add_special_tokens([AddedToken("<a>"), AddedToken("<b>")])
    a, b = tokenizer.token_to_id("<a>"), tokenizer.token_to_id("<b>")
    ids, vocabulary = [0, a, b, a, 1, 0], Vocabulary(tokenizer)
    shown = text_of(pieces(vocabulary, ids, skip_special_tokens=False))
    assert shown == "the <a> <b> <a> end the" == tokenizer.decode(ids, skip_special_tokens=False)
    tight = pieces(vocabulary, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert text_of(tight) == "the <a><b><a> end the"


def test_each_vocabulary_gets_its_detokenizer(vocabularies):
    assert isinstance(make_detokenizer(vocabularies["byte_level"], TextOptions()), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(vocabularies["byte_fallback"], TextOptions()), WindowDetokenizer)
