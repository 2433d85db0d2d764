"""Tables on terminals of every width: no word, name or figure is broken."""

from __future__ import annotations

import re

import pytest
from rich.console import Console

from slipstream.bench.result_tables import Cell, Table, accepted_by_position
from slipstream.certificate.checks import Check

ARMS = ["none", "ngram@3", "suffix+p=10", "hf-assisted-tuned@4", "ngram@4/typical (lossy)"]
FAMILIES = ["chat", "question answering", "code edit", "translation"]
NARROW, USUAL, WIDE = 60, 80, 200


def overall() -> Table:
    figures = Cell("650.5", "612.3", "930.6")
    rows = [[arm, figures, Cell("1.52x", "1.31", "1.77"), "38 identical, 2 tie", "71%", "88%", "3.25"] for arm in ARMS]
    columns = ("arm", "tok/s", "speed-up", "texts", "acceptance\nrate", "alpha", "tokens per\nforward")
    return Table("batch size 1", columns, rows, words=["texts"], optional=["alpha", "acceptance\nrate"])


def families() -> Table:
    rows = [[family, *(Cell("12.52x", "11.31", "13.77") for _ in ARMS)] for family in FAMILIES]
    return Table("speed-up per family", ["family", *ARMS], rows)


def evidence() -> Table:
    check = Check(
        "greedy text, one by one", True, "40 of 40 identical over 1920 tokens; a wrong rule is noticed at 12", 3.1
    )
    rows = [[check.name, Cell("pass", tone="good"), check.detail, f"{check.seconds:.1f}"]] * 3
    columns = ("check", "result", "evidence", "seconds")
    return Table("", columns, rows, words=("result", "evidence"), optional=("seconds",))


TABLES = {"overall": overall, "families": families, "evidence": evidence}


def printed(table: Table, width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


def pieces(table: Table) -> set[str]:
    """Everything that must not be broken: words, names and figures."""
    texts = [table.title, *table.columns]
    texts += [part for row in table.cells for cell in row for part in (cell.text, cell.low, cell.high)]
    return {piece for text in texts for piece in re.split(r"[\s-]+", text) if piece}


@pytest.mark.parametrize("width", [NARROW, USUAL, 100, WIDE])
@pytest.mark.parametrize("name", sorted(TABLES))
def test_no_word_and_no_figure_is_broken(name: str, width: int) -> None:
    table = TABLES[name]()
    lines = printed(table, width)
    assert max(map(len, lines)) <= width
    printed_pieces = {piece for line in lines for piece in re.split(r"[\s-]+", line) if piece} - {
        "─" * n for n in range(1, width + 1)
    }
    assert printed_pieces <= pieces(table) | {"-"}, printed_pieces - pieces(table)
    assert "".join(lines).count("…") == 0


def test_a_table_laid_out_by_rich_breaks_words() -> None:
    """Negative control of the test above: rich's own layout breaks words."""
    from rich.table import Table as RichTable

    console = Console(width=40, color_system=None, force_terminal=True)
    rich_table = RichTable(*overall().columns)
    rich_table.add_row(*(str(cell) for cell in overall().cells[3]))
    with console.capture() as captured:
        console.print(rich_table)
    printed_pieces = {piece for line in captured.get().splitlines() for piece in re.split(r"[\s-]+", line) if piece}
    assert not printed_pieces <= pieces(overall())


def test_a_narrow_table_drops_optional_columns_before_intervals(subtests: pytest.Subtests) -> None:
    small = Table("", ("arm", "tok/s", "alpha"), [["none", Cell("650.5", "612.3", "930.6"), "1%"]], optional=["alpha"])
    below = " 612.3-930.6"
    for width, header, interval in ((60, "alpha", "650.5  612.3-930.6"), (24, "alpha", below), (17, "", below)):
        with subtests.test(width=width):
            text = "\n".join(printed(small, width))
            assert header in text and interval in text and ("alpha" in text) == bool(header)
    assert printed(small, 10)[0].strip() == "none"  # where no table fits, a list of entries is printed


def test_figures_are_listed_if_columns_do_not_fit() -> None:
    text = "\n".join(printed(families(), NARROW))
    assert text.count("12.52x") == len(ARMS) * len(FAMILIES) and text.count("hf-assisted-tuned@4") >= len(FAMILIES)


def test_accepted_shares_are_listed_by_position_on_a_line_per_arm() -> None:
    text = accepted_by_position([("none", []), ("ngram@3", [0.5, 0.25])]).plain
    assert text.splitlines()[:2] == ["accepted at draft position 1, 2, ...", "  ngram@3: 50% 25%"]
    assert "none" not in text
    assert accepted_by_position([("none", [])]).plain == ""
