"""Text is released token by token, in whole characters and without any part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.models.toy import END, ToyTokenizer
from slipstream.text.detokenizer import BROKEN, StopStrings, TextStream, new_text, read_as_committed, text_of

TOKENIZER = ToyTokenizer()  # one byte per token, so that most characters are split
modest = settings(max_examples=150)
texts = st.text(st.sampled_from("abAB \né€😀ß中"), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab€"), min_size=1, max_size=4), min_size=1, max_size=3)


def pieces(ids: list[int]) -> list[str]:
    stream = TextStream(TOKENIZER.decode)
    return [*map(stream.push, ids), stream.flush()]


@modest
@given(texts)
def test_a_streamed_text_arrives_in_whole_characters(text: str) -> None:
    shown = pieces(TOKENIZER.encode(text))
    assert "".join(shown) == text
    assert BROKEN not in "".join(shown)
    assert shown[-1] == ""  # text that can no longer change is released before the end


@modest
@given(texts)
def test_character_is_shown_with_its_last_byte(text: str) -> None:
    stream, shown = TextStream(TOKENIZER.decode), ""
    for character in text:
        for byte in TOKENIZER.encode(character):
            shown += stream.push(byte)
        assert shown.endswith(character)
    assert shown == text


@modest
@given(st.lists(st.integers(0, END), max_size=40))
def test_a_stream_of_any_ids_adds_up_to_decode(ids: list[int]) -> None:
    assert "".join(pieces(ids)) == TOKENIZER.decode(ids)


def test_half_a_character_is_shown_only_at_the_end() -> None:
    stream = TextStream(TOKENIZER.decode)
    assert [stream.push(byte) for byte in "a€".encode()[:-1]] == ["a", "", ""]
    assert stream.flush() == BROKEN
    assert stream.flush() == ""


def test_stream_decodes_a_bounded_number_of_tokens_at_a_time() -> None:
    class Counting(ToyTokenizer):
        longest = 0

        def decode(self, ids):  # type: ignore[no-untyped-def]
            self.longest = max(self.longest, len(ids))
            return super().decode(ids)

    tokenizer = Counting()
    stream = TextStream(tokenizer.decode)
    assert "".join(map(stream.push, "né€😀".encode() * 100)) == "né€😀" * 100
    assert tokenizer.longest <= 40


def shown_through(stop_strings: list[str], chunks: list[str]) -> tuple[str, bool]:
    watch = StopStrings(stop_strings)
    text = "".join(watch.push(chunk) for chunk in chunks)
    return text + watch.push("", final=True), watch.found


def first_completed(text: str, stop_strings: list[str]) -> str:
    """The text before the stop string that is complete first; of several complete at once, the longest counts."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stop_strings if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return text


@modest
@given(st.text(st.sampled_from("ab€"), max_size=20), stops)
def test_text_is_shown_up_to_the_stop_string_completed_first(text: str, strings: list[str]) -> None:
    shown, stopped = shown_through(strings, list(text))
    assert shown == first_completed(text, strings)
    assert stopped == any(stop in text for stop in strings)


@pytest.mark.slow
@modest
@given(st.lists(st.text(st.sampled_from("ab"), max_size=5), max_size=8), st.text(st.sampled_from("ab"), min_size=1))
def test_one_stop_string_cuts_the_same_however_the_text_is_split(chunks: list[str], stop: str) -> None:
    whole = "".join(chunks)
    assert shown_through([stop], chunks) == (whole.partition(stop)[0], stop in whole)


@modest
@given(st.text(st.sampled_from("ab"), max_size=20), stops)
def test_held_back_text_is_exactly_what_may_begin_a_stop(text: str, strings: list[str]) -> None:
    watch, shown = StopStrings(strings), ""
    for end, character in enumerate(text, start=1):
        shown += watch.push(character)
        if watch.found:
            return
        held = text[len(shown) : end]
        starts = [n for stop in strings for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert len(held) == max(starts, default=0)


def test_stop_split_over_pieces_is_found_and_never_shown() -> None:
    watch = StopStrings(["<end>"])
    assert [watch.push(piece) for piece in ["one <", "en", "d", "> two"]] == ["one ", "", "", ""]
    assert watch.found and watch.push("three") == ""


def test_earliest_of_several_stops_in_one_piece_counts() -> None:
    watch = StopStrings(["three", "two"])
    assert watch.push("one two three") == "one "


def test_without_stops_nothing_is_held_back() -> None:
    assert StopStrings([]).push("anything") == "anything"


PIECES = [
    b"a",
    b"b",
    b" ab",
    b"",
    b" \xe2",
    b"\x82",
    b"\xac",
    b"\x82\xacb",
    b"a\xf0\x9f",
    b"\x98\x80",
    b"\xff",
    b"\xef\xbf\xbd",
]


class Pieces(ToyTokenizer):
    """Its tokens hold whole characters and parts of them; like SentencePiece's, a text loses its first space."""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(PIECES[i] for i in ids).decode(errors="replace").removeprefix(" ")


class TokenByToken:
    """The specification: a row that decodes after every token, and looks for its ends then."""

    def __init__(self, params: SamplingParams, end: int) -> None:
        self.params, self.end, self.stops = params, end, StopStrings(params.stop_strings)
        self.ids, self.num_shown, self.context = list[int](), 0, 0
        self.finish_reason: str | None = None

    def piece(self) -> tuple[str, bool]:
        before, now = (Pieces().decode(self.ids[self.context : n]) for n in (self.num_shown, len(self.ids)))
        return now[len(before) :], len(now) > len(before) and not now.endswith(BROKEN)

    def push(self, token: int) -> str:
        self.ids.append(token)
        text, is_whole = self.piece()
        if is_whole:
            self.context, self.num_shown = self.num_shown, len(self.ids)
        shown, count = text * is_whole, len(self.ids)
        if count >= self.params.min_tokens:
            shown = self.stops.push(shown)
            self.finish_reason = "stop" if self.stops.found or token == self.end else None
        if self.finish_reason is None and count == self.params.max_tokens:
            self.finish_reason = "length"
        return shown + (self.stops.push(self.piece()[0], final=True) if self.finish_reason else "")


@pytest.mark.slow
@settings(max_examples=500)
@given(
    st.lists(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=8), min_size=1, max_size=20),
    st.lists(st.text(st.sampled_from(["a", "b", " ", "€", "😀", BROKEN]), min_size=1, max_size=4), max_size=3),
    st.integers(0, 20),
    st.integers(20, 60),
    st.booleans(),
)
def test_rounds_are_read_as_if_token_by_token(
    rounds: list[list[int]], strings: list[str], min_tokens: int, max_tokens: int, streamed: bool
) -> None:
    params = SamplingParams(stop=strings, min_tokens=min_tokens, max_tokens=max_tokens)
    row, wanted, whole = Row(0, [0], params, 0, frozenset({3})), TokenByToken(params, 3), ""
    if streamed or strings:
        read_as_committed(row, Pieces())
    for tokens in rounds:
        text, start = "", row.num_output_tokens
        for token in tokens:
            text += wanted.push(token)
            if wanted.finish_reason:
                break
        whole += text
        assert row.commit(tokens) == tuple(wanted.ids[start:])
        assert row.finish_reason == wanted.finish_reason
        if row.text is not None:
            assert new_text(row, Pieces()) == text
        if row.finish_reason is not None:
            assert text_of(row, Pieces()) == whole
            return


@pytest.mark.each_value
@pytest.mark.parametrize("stop", [["heron"], ["river", "heron"], [" "], ["the heron "], ["e", "eron"], ["never there"]])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_streamed_text_and_tokens_equal_those_of_generate(stop: list[str], drafter: str) -> None:
    decoder = SpeculativeDecoder("toy", drafter=drafter)
    params = SamplingParams(max_tokens=80, stop=stop)
    result = decoder.generate("The sparrow", params)
    chunks = list(decoder.stream("The sparrow", params))
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    plain = decoder.generate("The sparrow", SamplingParams(max_tokens=80))
    assert result.text == first_completed(plain.text, stop)
    stopped = any(string in plain.text for string in stop)
    assert result.finish_reason == ("stop" if stopped else plain.finish_reason)
