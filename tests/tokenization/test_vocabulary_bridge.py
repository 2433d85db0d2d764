"""The bridge between vocabularies: target tokens for the draft model to read, and drafts as target tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.cross_vocabulary import bridged_session
from slipstream.drafters.cross_vocabulary.bridged_session import DraftText
from slipstream.drafters.cross_vocabulary.continuation import Continuation
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge, unfinished
from tests.support.vocabularies import KINDS, SPECIALS, TEXT, bridge, vocabulary

PAIRS = [
    ("bytes", "sentencepiece"),
    ("sentencepiece", "bytes"),
    ("digits", "bytes"),
    ("toy", "bytes"),
    ("bytes", "toy"),
]
STORY = "\n".join(TEXT)


def ours(pair: VocabularyBridge, text: str) -> list[int]:
    return pair.target.encode(text).ids


def read(pair: VocabularyBridge, tokens: Sequence[int], step: int = 1) -> list[int]:
    """The tokens that the draft model has read after the text was committed `step` tokens at a time."""
    text, ids = DraftText(pair), list[int]()
    for end in [*range(step, len(tokens), step), len(tokens)]:
        before = text.settled
        ids = ids[:before] + text.follow(tokens[:end])
    return ids


def written(texts: Sequence[bytes | None], ids: Sequence[int]) -> bytes:
    return b"".join(texts[number] or b"" for number in ids)


def drafted(pair: VocabularyBridge, before: str | list[int], *drafts: str | int) -> list[int]:
    """The target tokens for a draft of text pieces and draft tokens."""
    made = Continuation(pair, ours(pair, before) if isinstance(before, str) else before)
    for draft in drafts:
        for token in pair.draft.encode(draft).ids if isinstance(draft, str) else [draft]:
            made.add(token)
    return made.tokens()


# What the draft model reads


@pytest.mark.pairwise
@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_a_text_is_retokenized_by_the_draft_models_tokenizer_however_it_arrives(
    target: str, draft: str, step: int
) -> None:
    pair = bridge(target, draft)
    assert read(pair, ours(pair, STORY), step) == pair.draft.encode(STORY).ids


def test_settling_one_word_too_early_is_caught() -> None:
    """Negative control of the test above: tokens that could still change are not read again."""
    pair = bridge("digits", "bytes")
    tokens = ours(pair, STORY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridged_session, "first_unsettled", lambda encoding, text, longest: len(encoding.ids) - 1)
        assert read(pair, tokens) != pair.draft.encode(STORY).ids
    assert read(pair, tokens) == pair.draft.encode(STORY).ids


@pytest.mark.slow
@settings(max_examples=40)
@given(st.text(max_size=40), st.sampled_from(PAIRS), st.integers(1, 5))
def test_no_byte_is_lost_or_added_whatever_the_text(text: str, kinds: tuple[str, str], step: int) -> None:
    pair = bridge(*kinds)
    tokens = ours(pair, text)
    assert written(pair.draft.texts, read(pair, tokens, step)) == written(pair.target.texts, tokens)


def test_digits_that_arrive_one_by_one_are_regrouped() -> None:
    pair = bridge("digits", "bytes")
    tokens = ours(pair, "and 12345")
    assert len(tokens) > len(read(pair, tokens)) and written(pair.draft.texts, read(pair, tokens)[-1:]) == b" 12345"


def test_an_incomplete_character_is_read_byte_by_byte_and_then_whole() -> None:
    pair = bridge("toy", "bytes")
    data = list("a \U0001f680".encode())
    half, text = data[:-1], DraftText(pair)
    assert written(pair.draft.texts, text.follow(half)) == bytes(half)
    assert text.follow(data) == pair.draft.encode("a \U0001f680").ids


def test_invalid_utf8_is_read_as_the_replacement_character() -> None:
    pair = bridge("toy", "bytes")
    assert written(pair.draft.texts, read(pair, [97, 0xFF, 98])) == "a\ufffdb".encode()


@pytest.mark.parametrize(
    ("data", "count"), [(b"a", 0), (b"a\xc3", 1), ("é".encode(), 0), (b"\xf0\x9f\x9a", 3), (b"", 0)]
)
def test_the_bytes_of_an_unfinished_character_are_counted(data: bytes, count: int) -> None:
    assert unfinished(data) == count


@pytest.mark.parametrize("draft", KINDS)
def test_special_tokens_become_those_with_the_same_name_and_never_text(draft: str) -> None:
    pair = bridge("sentencepiece" if draft == "bytes" else "bytes", draft)
    marks = [pair.target.special[name] for name in SPECIALS]
    tokens = [marks[1], *ours(pair, "Hello"), marks[0], marks[2]]
    ids = read(pair, tokens)
    assert [ids[0], *ids[-2:]] == [pair.draft.special[SPECIALS[i]] for i in (1, 0, 2)]
    assert written(pair.draft.texts, ids) == b"Hello"


def test_a_role_marker_that_the_draft_model_lacks_is_read_as_its_name() -> None:
    pair = bridge("bytes", "toy")
    ids = read(pair, [pair.target.special["<|user|>"], *ours(pair, "Hi"), pair.target.end_ids[0]])
    assert ids == [*b"<|user|>Hi", pair.draft.end_ids[0]]


def test_the_name_of_a_special_token_in_a_text_stays_text() -> None:
    pair = bridge("bytes", "sentencepiece")
    ids = read(pair, ours(pair, f"say {SPECIALS[0]}"))
    assert pair.draft.special[SPECIALS[0]] not in ids


def test_the_space_that_the_targets_tokenizer_adds_is_not_read() -> None:
    pair = bridge("prefixed", "bytes")
    tokens = pair.target.encode("The heron", beginning=True).ids
    assert written(pair.target.texts, tokens) == b" The heron"
    assert written(pair.draft.texts, read(pair, tokens)) == b"The heron"


def test_a_text_without_spaces_settles_as_well() -> None:
    pair = bridge("toy", "bytes")
    text, tokens = DraftText(pair, longest_tail=40), list(b"x" * 300)
    for end in range(1, 301):
        text.follow(tokens[:end])
        assert len(text.tail) <= 41
    assert text.settled > 0


# How drafts become target tokens


@pytest.mark.each_value
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("draft", ["toy", "bytes", "sentencepiece"])
def test_a_draft_becomes_the_tokens_that_the_target_would_have_used(target: str, draft: str) -> None:
    pair = bridge(target, draft)
    whole = ours(pair, "The heron was slow and never wrong. It looked at the water")
    for at in range(3, len(whole) - 4):
        continuation = written(pair.target.texts, whole[at:]).decode()
        assert drafted(pair, whole[:at], continuation) == whole[at:]


def test_a_draft_that_would_retokenize_the_committed_text_is_encoded_alone() -> None:
    pair = bridge("bytes", "sentencepiece")
    tokens = [*ours(pair, "The "), *(pair.target.ids[bytes([byte])] for byte in b"he")]  # "heron" is cut otherwise
    assert written(pair.target.texts, drafted(pair, tokens, "ron was")) == b"ron was"


def test_an_unfinished_character_is_never_proposed() -> None:
    pair = bridge("sentencepiece", "toy")
    assert drafted(pair, "a ", *"\U0001f680".encode()[:-1]) == []
    whole = drafted(pair, "a", *" \U0001f680".encode())
    assert written(pair.target.texts, whole) == " \U0001f680".encode()


def test_a_character_begun_by_the_target_is_completed() -> None:
    pair = bridge("toy", "bytes")
    rocket = "\U0001f680".encode()
    missing_bytes = pair.draft.spelled(rocket[2:])
    assert drafted(pair, [97, *rocket[:2]], *missing_bytes) == list(rocket[2:])


def test_the_draft_models_end_becomes_the_targets_and_ends_the_draft() -> None:
    pair = bridge("bytes", "sentencepiece")
    end = pair.draft.end_ids[0]
    assert drafted(pair, "The", " end", end, " more") == [*ours(pair, " end"), pair.target.end_ids[0]]


def test_another_special_token_ends_the_draft_and_is_not_proposed() -> None:
    pair = bridge("bytes", "sentencepiece")
    assert drafted(pair, "The", " end", pair.draft.special["<|user|>"], " more") == ours(pair, " end")


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_padding_of_the_draft_models_head_ends_the_draft(target: str, draft: str) -> None:
    pair = bridge(target, draft)
    if draft != "toy":
        assert drafted(pair, "The", " end", pair.draft.head_size - 1, " more") == ours(pair, " end")


def test_the_probability_of_a_token_is_that_of_the_draft_tokens_beginning_in_it() -> None:
    pair = bridge("toy", "bytes")
    made = Continuation(pair, list(b"A"))
    for token in pair.draft.encode(" heron,").ids:
        made.add(token)
    assert made.chances([0.5, 0.25]) == [0.5, 1, 1, 1, 1, 1, 0.25]
    joined = Continuation(bridge("bytes", "toy"), ours(bridge("bytes", "toy"), "A"))
    for token in b" heron":
        joined.add(token)
    assert joined.chances([0.5] * 6) == [0.5**6]


def test_shared_tokens_have_the_same_bytes_or_are_end_tokens() -> None:
    pair = bridge("bytes", "sentencepiece")
    for target_id, draft_id in pair.shared.items():
        same = pair.target.texts[target_id] == pair.draft.texts[draft_id]
        assert same and (pair.target.texts[target_id] is not None or target_id in pair.target.end_ids)
    assert pair.shared[pair.target.end_ids[0]] == pair.draft.end_ids[0]
    assert pair.shared[vocabulary("bytes").tokenizer.bare(" heron")[0]] == pair.draft.ids[b" heron"]  # type: ignore[union-attr]
