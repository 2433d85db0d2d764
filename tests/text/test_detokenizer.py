"""Text is released token by token, in whole characters and without any part of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.toy import END, ToyTokenizer
from slipstream.text.detokenizer import BROKEN, StopStrings, TextStream, VisibleText, visible_text

TOKENIZER = ToyTokenizer()  # one byte per token, so that most characters are split
modest = settings(max_examples=150)
texts = st.text(st.sampled_from("abAB \né€😀ß中"), max_size=30)
stops = st.lists(st.text(st.sampled_from("ab€"), min_size=1, max_size=4), min_size=1, max_size=3)


def pieces(ids: list[int]) -> list[str]:
    stream = TextStream(TOKENIZER)
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
    stream, shown = TextStream(TOKENIZER), ""
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
    stream = TextStream(TOKENIZER)
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
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, "né€😀".encode() * 100)) == "né€😀" * 100
    assert tokenizer.longest <= 8


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


def test_text_that_only_starts_like_a_stop_is_shown_later() -> None:
    watch = StopStrings(["<end>"])
    assert [watch.push(piece) for piece in ["a <e", "<en", "x"]] == ["a ", "<e", "<enx"]
    assert not watch.found


def test_stop_that_overlaps_itself_is_found_at_its_first_place() -> None:
    watch = StopStrings(["aab"])
    assert [watch.push(c) for c in "aaab"] == ["", "", "a", ""]
    assert watch.found


def test_unfinished_stop_at_the_end_is_shown_and_a_finished_one_is_not() -> None:
    unfinished, finished = StopStrings(["abc"]), StopStrings(["abc"])
    assert unfinished.push("xab") + unfinished.push("", final=True) == "xab"
    assert not unfinished.found
    assert finished.push("xab") + finished.push("c", final=True) == "x"
    assert finished.found


def test_earliest_of_several_stops_in_one_piece_counts() -> None:
    watch = StopStrings(["three", "two"])
    assert watch.push("one two three") == "one "


def test_without_stops_nothing_is_held_back() -> None:
    assert StopStrings([]).push("anything") == "anything"


@modest
@given(texts, st.text(st.sampled_from("ab€中😀"), min_size=1, max_size=3))
def test_the_token_that_completes_a_stop_string_is_detected(text: str, stop: str) -> None:
    watch, ids = VisibleText(TOKENIZER, SamplingParams(stop=[stop])), TOKENIZER.encode(text)
    fired = [watch.completes_stop(token) for token in ids]
    expected = [stop in bytes(ids[:end]).decode(errors="ignore") for end in range(1, len(ids) + 1)]
    assert fired == expected


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


def test_a_stop_string_before_the_minimum_length_neither_ends_nor_cuts_the_text() -> None:
    params = SamplingParams(stop=["a"], min_tokens=4)
    ids = TOKENIZER.encode("a ba ba")
    watch = VisibleText(TOKENIZER, params)
    assert [watch.completes_stop(token) for token in ids[:4]] == [False, False, False, True]
    assert visible_text(TOKENIZER, params, ids[:4]) == "a b"
