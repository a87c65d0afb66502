import pytest
from tokenizers import Tokenizer, decoders, models

from aggregation.vocabulary import Vocabulary, byte_level_bytes


def test_every_byte_of_the_byte_level_alphabet_is_itself(tokenizer, vocabulary):
    singles = [i for i in range(tokenizer.get_vocab_size()) if len(tokenizer.id_to_token(i)) == 1]
    assert sorted(vocabulary.piece(i).data for i in singles) == [bytes([byte]) for byte in range(256)]


def test_the_bytes_of_a_text_are_the_bytes_of_its_tokens(tokenizer, vocabulary):
    text = "naïve 😀 the end, 你好\n\tüber"
    ids = tokenizer.encode(text).ids
    assert b"".join(vocabulary.piece(i).data for i in ids) == text.encode()
    assert len(ids) < len(text.encode())


def test_a_piece_that_is_no_character_has_no_text_but_exact_bytes(tokenizer, vocabulary):
    split = next(i for i in tokenizer.encode("😀").ids if vocabulary.piece(i).text is None)
    shown = vocabulary.shown(split)
    assert "\ufffd" in shown.text
    assert bytes(shown.bytes) == vocabulary.piece(split).data


def test_byte_fallback_tokens_are_their_byte_and_metaspace_is_a_space(tokenizers, vocabularies):
    tokenizer, vocabulary = tokenizers["byte_fallback"], vocabularies["byte_fallback"]
    assert vocabulary.shown(tokenizer.token_to_id("<0xE4>")) == ("\ufffd", (0xE4,))
    assert vocabulary.shown(tokenizer.token_to_id("▁the")) == (" the", tuple(b" the"))


def test_special_tokens_and_unknown_ids(tokenizer, vocabulary):
    assert vocabulary.piece(tokenizer.token_to_id("<eos>")).special
    tool = vocabulary.piece(tokenizer.token_to_id("<tool call>"))
    assert (tool.special, tool.added, tool.data) == (False, True, b"<tool call>")
    unknown = vocabulary.piece(10_000_000)
    assert (unknown.known, unknown.data) == (False, b"")


def test_a_token_outside_the_alphabet_is_its_own_utf8():
    assert byte_level_bytes("a b｜") == "a b｜".encode()


def test_a_mixed_byte_level_decoder_is_refused():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ValueError, match="decoder"):
        Vocabulary(tokenizer)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        Vocabulary.load(tmp_path)
