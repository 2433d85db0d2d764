"""Streamed text is wrapped at words, whatever the pieces."""

from __future__ import annotations

import io
import random

import pytest
from rich.cells import cell_len
from rich.table import Table

from slipstream import SamplingParams, SpeculativeDecoder, compare
from slipstream.apps.cli.consoles import Stream, WordWrap
from slipstream.apps.cli.tables import print_legend

TEXT = "The heron  waited by the river,\n\n    and was not hurried. " * 6


def wrapped(pieces: list[str], width: int) -> str:
    wrap = WordWrap(width)
    return "".join(map(wrap.push, pieces)) + wrap.flush()


@pytest.mark.parametrize("width", [16, 40, 60])
def test_lines_end_at_words_and_nothing_is_lost(width: int) -> None:
    rng, pieces, unsplit = random.Random(width), [], TEXT
    while unsplit:
        size = rng.randint(1, 7)
        pieces, unsplit = [*pieces, unsplit[:size]], unsplit[size:]
    text = wrapped(pieces, width)
    assert text == wrapped([TEXT], width) and text.split() == TEXT.split()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_a_word_is_written_once_it_is_complete() -> None:
    wrap = WordWrap(20)
    assert [wrap.push(piece) for piece in ("The he", "ron wai", "ted ")] == ["The", " heron", " waited"]


def test_scripts_without_spaces_are_not_held_back() -> None:
    wrap = WordWrap(10)
    text = "".join(wrap.push(letter) for letter in "苍鹭在河边等待着") + wrap.flush()
    assert text.replace("\n", "") == "苍鹭在河边等待着" and all(cell_len(line) <= 10 for line in text.splitlines())


def test_a_word_longer_than_a_line_is_not_broken() -> None:
    assert wrapped(["see https://example.org/ now"], 12) == "see\nhttps://example.org/\nnow"
    assert wrapped(["see https://exam", "ple", ".org/", " now"], 12) == "see\nhttps://example.org/\nnow"


@pytest.mark.parametrize(
    ("colors", "no_color", "drafter", "shown"),
    [
        ("standard", False, "ngram", True),
        ("standard", False, "none", False),
        ("standard", True, "ngram", False),
        (None, False, "ngram", False),
    ],
)
def test_colors_are_explained_only_where_they_are_shown(
    colors: str | None, no_color: bool, drafter: str, shown: bool
) -> None:
    decoder, written = SpeculativeDecoder("toy", drafter=drafter), io.StringIO()
    comparisons = list(compare(decoder, ["a fish, a fish, a fish,"], SamplingParams(max_tokens=8)))
    print_legend(Stream(file=written, color_system=colors, no_color=no_color, force_terminal=True), comparisons)
    assert ("Colors: " in written.getvalue()) == shown


def test_only_terminals_get_tables_padded_with_blanks() -> None:
    table = Table("name", "meaning", box=None, title="words")
    table.add_row("arm", "one setting of a benchmark\n\nand no more")
    printed = []
    for is_terminal in (False, True):
        written = io.StringIO()
        Stream(file=written, width=60, color_system=None, force_terminal=is_terminal).print(table, "a  b ", sep="\n")
        printed.append(written.getvalue().splitlines())
    assert printed[0] == [line.rstrip() for line in printed[1]] != printed[1]
    assert printed[0][-4:] == [" arm   one setting of a benchmark", "", "       and no more", "a  b"]
