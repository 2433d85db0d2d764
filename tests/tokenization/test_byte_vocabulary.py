"""The bytes of tokens: what each token stands for, how plain text is encoded, and which tokenizers are refused."""

from __future__ import annotations

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from slipstream import UsageError
from slipstream.tokenization.byte_vocabulary import PROBES, ByteVocabulary, byte_vocabulary
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary import VocabularyInfo
from tests.support.vocabularies import KINDS, SPECIALS, bridge, vocabulary

TEXTS = [*PROBES, "The heron, 12345", "\n\n\n    x", "\u6771\u4eac \U0001f600", f"a {SPECIALS[0]} in a text", "  "]


def of(kind: str) -> ByteVocabulary:
    return bridge("toy", kind).draft


def pieces(vocabulary: ByteVocabulary, text: str, *, beginning: bool = False) -> list[bytes | None]:
    return [vocabulary.texts[number] for number in vocabulary.encode(text, beginning=beginning).ids]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["toy", *KINDS])
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_join_to_the_text(kind: str, text: str) -> None:
    assert b"".join(piece or b"?" for piece in pieces(of(kind), text)) == text.encode()


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["toy", *KINDS])
@pytest.mark.parametrize("text", TEXTS)
def test_encoding_starts_are_where_tokens_begin(kind: str, text: str) -> None:
    encoding, at = of(kind).encode(text), 0
    assert len(encoding.starts) == len(encoding.ids)
    for number, start in zip(encoding.ids, encoding.starts, strict=True):
        inside = len(text[:start].encode())
        assert inside <= at < inside + 4  # all bytes of a character begin at its position
        at += len(of(kind).texts[number] or b"")


@pytest.mark.parametrize("kind", KINDS)
def test_encoding_a_text_never_produces_special_tokens(kind: str) -> None:
    vocabulary = of(kind)
    assert set(vocabulary.special) >= set(SPECIALS)
    ids = vocabulary.encode(f"{SPECIALS[0]}x{SPECIALS[1]}", beginning=True).ids
    assert ids and not set(ids) & set(vocabulary.special.values())
    assert all(vocabulary.texts[number] is None for number in vocabulary.special.values())


@pytest.mark.parametrize(("kind", "opens"), [("bytes", False), ("sentencepiece", True), ("metaspace", True)])
def test_tokens_that_a_tokenizer_adds_before_a_text_are_found(kind: str, opens: bool) -> None:
    assert of(kind).tokens.opening == ((of(kind).special["<|user|>"],) if opens else ())


@pytest.mark.parametrize(("kind", "adds"), [("bytes", False), ("sentencepiece", False), ("prefixed", True)])
def test_a_space_is_added_only_at_the_beginning_of_a_text(kind: str, adds: bool) -> None:
    vocabulary = of(kind)
    assert vocabulary.tokens.adds_space is adds
    assert pieces(vocabulary, "The", beginning=True) == ([b" The"] if adds else [b"The"])
    assert pieces(vocabulary, "The") == [b"The"]


def test_a_character_is_spelled_by_its_own_token_rather_than_a_byte_token() -> None:
    vocabulary = of("sentencepiece")
    assert vocabulary.ids[b"a"] not in vocabulary.tokens.fallback
    assert vocabulary.ids[b"\n"] not in vocabulary.tokens.fallback
    assert vocabulary.ids[b"\xf0"] in vocabulary.tokens.fallback
    assert vocabulary.spelled(b"The\xf0\x9f") == [
        vocabulary.ids[b"The"],
        vocabulary.ids[b"\xf0"],
        vocabulary.ids[b"\x9f"],
    ]


def test_ids_that_only_pad_the_head_stand_for_nothing() -> None:
    padded, info = of("bytes"), vocabulary("bytes")
    assert len(padded.texts) == info.head_size and padded.texts[-7:] == [None] * 7
    smaller = byte_vocabulary(info, 300)
    assert len(smaller.texts) == 300 and max(smaller.ids.values()) < 300


def test_a_normalizer_changes_only_text_that_is_not_normal() -> None:
    vocabulary = of("normalized")
    assert b"".join(piece or b"" for piece in pieces(vocabulary, "cafe\u0301")) == "caf\u00e9".encode()
    assert b"".join(piece or b"" for piece in pieces(vocabulary, "caf\u00e9")) == "caf\u00e9".encode()


def info(inner: Tokenizer) -> VocabularyInfo:
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner)
    return VocabularyInfo("m", 50, (), HFTokenizer(made))


def letters(**options: object) -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate("abcdefghijklmnopqrstuvwxyz .?")}
    return Tokenizer(models.BPE(vocabulary, [], **options))


def test_tokenizers_without_known_bytes_are_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="it has no tokenizer"):
        byte_vocabulary(VocabularyInfo("m", 50, ()), 50)
    with pytest.raises(UsageError, match="of the kind WordPiece"):
        byte_vocabulary(info(Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))), 50)
    with pytest.raises(UsageError, match="'</w>' in them marks parts of words"):
        byte_vocabulary(info(letters(end_of_word_suffix="</w>")), 50)
    spaced = letters()
    spaced.decoder = decoders.CTC()
    with pytest.raises(UsageError, match="its decoder CTC changes characters"):
        byte_vocabulary(info(spaced), 50)
    lower = letters()
    lower.normalizer = normalizers.Replace("t", "d")
    with pytest.raises(UsageError, match="'the end' becomes 'dhe end'"):
        byte_vocabulary(info(lower), 50)
    cut = letters()
    cut.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UsageError, match="'the end' becomes 'theend'"):
        byte_vocabulary(info(cut), 50)


def test_a_tokenizer_of_plain_characters_is_read() -> None:
    vocabulary = byte_vocabulary(info(letters(unk_token="?")), 50)
    assert vocabulary.ids[b"t"] == 19 and b"?" not in vocabulary.ids  # the token for unknown text has no text
