"""Tables of results, and figures with their intervals, for a terminal, Markdown and the report's page.

A `Table` is made once, of cells; a terminal shows it, `markdown_table` and the report's template write it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from slipstream.bench.records import Run
from slipstream.bench.summary import PARTS, ArmSummary, Estimate
from slipstream.text.round_view import percent

MAX_PROMPT_NAMES = 8  # that a progress line lists
STYLES = {"": "", "good": "green", "best": "bold green", "slower": "red", "bad": "bold red", "faint": "dim"}
NONE = "-"


@dataclass(frozen=True)
class Cell:
    """A figure with its interval, or words."""

    text: str
    low: str = ""  # end of the interval; empty if there is none
    high: str = ""
    tone: Literal["", "good", "best", "slower", "bad", "faint"] = ""

    def __str__(self) -> str:
        """The form for sentences: the interval, if there is one, in parentheses."""
        return f"{self.text} ({self.low} to {self.high})" if self.low != self.high else self.text


def cell(estimate: Estimate | None, form: str = ".2f", unit: str = "") -> Cell:
    """An estimate with its interval; a dash without one."""
    if estimate is None:
        return Cell(NONE)
    text = f"{estimate.value:{form}}{unit}"
    if estimate.low is None or estimate.high is None:
        return Cell(text)
    return Cell(text, f"{estimate.low:{form}}", f"{estimate.high:{form}}")


Row = Sequence[Cell | str]


MIN_WORDS = 24  # columns of a cell of words that is broken over several lines
GAP = 2  # blanks between columns


@dataclass(frozen=True)
class Table:
    """Rows of cells below a title.

    A terminal shows it as wide as it is itself, without breaking a word or a figure. If it is too wide, intervals move
    below their figures; then optional columns are left out; and if that is not enough, each row becomes a list of its
    entries.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    words: Sequence[str] = ()  # columns besides the first that hold words instead of figures
    optional: Sequence[str] = ()  # columns that a narrow terminal can omit, in the order in which they go

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows, with plain texts as cells."""
        return [[Cell(entry) if isinstance(entry, str) else entry for entry in row] for row in self.rows]

    def without(self, name: str) -> Table:
        place = list(self.columns).index(name)
        rows = [[entry for number, entry in enumerate(row) if number != place] for row in self.rows]
        return replace(self, columns=[column for column in self.columns if column != name], rows=rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if self.title:
            yield Text(self.title, "italic")
        yield self._fitted(options.max_width)
        yield ""

    def _fitted(self, width: int) -> RenderableType:
        table, left_out = self, list(self.optional)
        while True:
            for narrow in (False, True):
                widths = _widths(table, width, narrow=narrow)
                if widths is not None:
                    return _grid(table, widths, narrow=narrow)
            if not left_out:
                return _lists(self)
            table = table.without(left_out.pop(0))


def _widths(table: Table, width: int, *, narrow: bool) -> list[int] | None:
    """The columns' widths; None if they do not fit. Columns of words share the room that the others leave."""
    rows = ([_terminal_text(cell, narrow=narrow) for cell in row] for row in table.cells)
    columns = list(zip(table.columns, *rows, strict=True))
    widest, least = [], []
    for number, (name, *texts) in enumerate(columns):
        lines = [line for text in (name, *map(str, texts)) for line in text.split("\n")]
        widest.append(max(map(cell_len, lines)))
        longest_word = max((cell_len(word) for line in lines for word in line.split()), default=0)
        is_words = number > 0 and name in table.words
        least.append(min(widest[-1], max(MIN_WORDS, longest_word)) if is_words else widest[-1])
    room = width - GAP * (len(columns) - 1)
    if sum(least) > room:
        return None
    for number in range(len(columns)):
        least[number] += min(widest[number] - least[number], room - sum(least))
    return least


def _grid(table: Table, widths: Sequence[int], *, narrow: bool) -> RichTable:
    written = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, (name, width) in enumerate(zip(table.columns, widths, strict=True)):
        is_words = name in table.words or (number == 0 and not all(row[0].text.isdigit() for row in table.cells))
        written.add_column(name, justify="left" if is_words else "right", width=width)
    for row in table.cells:
        written.add_row(*(_terminal_text(entry, narrow=narrow) for entry in row))
    return written


def _lists(table: Table) -> Group:
    """Each row as its name and, below it, the names of its columns next to their entries."""
    blocks: list[RenderableType] = []
    names = [" ".join(name.split()) for name in table.columns]
    for row in table.cells:
        blocks.append(Text(row[0].text, f"bold {STYLES[row[0].tone]}"))
        entries = RichTable.grid(padding=(0, GAP))
        entries.add_column(width=max(map(cell_len, names[1:])) + 2)
        entries.add_column(overflow="fold")
        for name, entry in zip(names[1:], row[1:], strict=True):
            if entry.text:
                entries.add_row(f"  {name}", _terminal_text(entry, narrow=False))
        blocks.append(entries)
    return Group(*blocks)


def _terminal_text(entry: Cell, *, narrow: bool) -> Text:
    interval = ""
    if entry.low and entry.low != entry.high:
        interval = f"\n{entry.low}-{entry.high}" if narrow else f"  {entry.low}-{entry.high}"
    return Text(entry.text + interval, STYLES[entry.tone])


def markdown_table(table: Table) -> str:
    """The table for a README; names are escaped."""
    rows = [list(table.columns), *([str(entry) for entry in row] for row in table.cells)]
    lines = ["| " + " | ".join(text.replace("|", "\\|").replace("<", "&lt;") for text in row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(table.columns) + "|", *lines[1:]])


def verdict_cell(verdicts: Mapping[str, int], *, promised: bool = True) -> Cell:
    """Counts of outputs by verdict. promised: a different output breaks a promise, and is shown in capitals."""
    counts = {name: count for name, count in verdicts.items() if count}
    broken = promised and "different" in counts
    words = [f"{count} {'DIFFERENT' if broken and name == 'different' else name}" for name, count in counts.items()]
    return Cell(", ".join(words), tone="bad" if broken else "")


def bench_tables(summaries: Sequence[ArmSummary], reference: str) -> Iterator[Table | Text]:
    """Speeds and parity, speed-ups per family, where the time went, and what failed."""
    for batch in dict.fromkeys(arm.batch for arm in summaries):
        arms = [arm for arm in summaries if arm.batch == batch]
        yield _overall(arms, batch, reference)
        if len({family for arm in arms for family in arm.families}) > 1:
            yield _families(arms, reference)
        if any(arm.time_split is not None for arm in arms):
            yield _time(arms)
            yield accepted_by_position([(_name(arm), arm.acceptance_by_position) for arm in arms])
    if any(arm.failed for arm in summaries):
        yield _failures(summaries)


def accepted_by_position(shares: Sequence[tuple[str, Sequence[float]]]) -> Text:
    """A line per drafter: share of its tokens accepted at the 1st, 2nd, ... position of a draft."""
    lines = [f"  {name}: {' '.join(map(percent, accepted))}" for name, accepted in shares if accepted]
    return Text("\n".join(["accepted at draft position 1, 2, ...", *lines, ""]) if lines else "")


FIGURES = ("tok/s", "speed-up", "texts", "acceptance\nrate", "alpha", "tokens per\nforward")


def _overall(summaries: Sequence[ArmSummary], batch: int, reference: str) -> Table:
    rows: list[Row] = []
    for arm in summaries:
        speeds: Row = ["failed", ""]
        if arm.speed is not None:
            per_second = arm.speed.tokens_per_second
            form = ".1f" if per_second.value < 1000 else ".0f"
            speeds = [cell(per_second, form), cell(arm.speed.speed_up, unit="x")]
        rates = ["", ""]  # unknown of baselines
        if arm.stats is not None and arm.stats.num_rounds:
            rates = [percent(arm.stats.acceptance_rate), percent(arm.stats.alpha)]
        efficiency = "" if arm.block_efficiency is None else f"{arm.block_efficiency:.2f}"
        verdicts = verdict_cell(arm.verdicts, promised=arm.lossless)
        rows.append([_name(arm), *speeds, verdicts, *rates, efficiency])
    title = f"batch size {batch}: speed-up against {reference}, with 95 % intervals"
    return Table(title, ("arm", *FIGURES), rows, words=["texts"], optional=["alpha", "acceptance\nrate"])


def _families(summaries: Sequence[ArmSummary], reference: str) -> Table:
    """A line per family, so that the intervals of a few arms fit next to each other."""
    names = list(dict.fromkeys(family for arm in summaries for family in arm.families))
    rows: list[Row] = [
        [
            name,
            *(cell(arm.families[name].speed_up, unit="x") if name in arm.families else "failed" for arm in summaries),
        ]
        for name in names
    ]
    title = f"speed-up against {reference} per family of prompts, geometric means"
    return Table(title, ["family", *map(_name, summaries)], rows)


def _time(summaries: Sequence[ArmSummary]) -> Table:
    columns = ["arm", *PARTS, "overhead", "overhead\nof a round"]
    rows: list[Row] = [[_name(arm), *shares] for arm in summaries if (shares := time_shares(arm)) is not None]
    return Table("where the time went", columns, rows, optional=["overhead\nof a round", "accept"])


def time_shares(arm: ArmSummary) -> list[str] | None:
    """Shares of `PARTS` and of the overhead in the time, and the overhead of a round; None if unknown."""
    if arm.time_split is None:
        return None
    shares = [f"{arm.time_split[part]:.1%}" for part in (*PARTS, "overhead")]
    return [*shares, NONE if arm.round_overhead is None else f"{arm.round_overhead:.1%}"]


def _failures(summaries: Sequence[ArmSummary]) -> Table:
    rows: list[Row] = [
        [_name(arm), str(arm.batch), str(arm.failed), arm.error or ""] for arm in summaries if arm.failed
    ]
    return Table("failed", ["arm", "batch", "runs", "first error"], rows, words=["first error"])


def _name(arm: ArmSummary) -> str:
    return f"{arm.arm} (lossy)" if arm.lossy else arm.arm


def progress_line(number: int, total: int, runs: Sequence[Run]) -> str:
    """One line for a finished group of prompts: the median speed of each arm, and any bad verdict."""
    parts = []
    for arm in dict.fromkeys(run.arm for run in runs):
        arm_runs = [run for run in runs if run.arm == arm]
        speeds = [run.tokens_per_second for run in arm_runs if run.tokens_per_second is not None]
        different = any("different" in run.verdicts for run in arm_runs)
        remark = "" if not different else " DIFFERS" if arm_runs[0].num_forwards is None else " (another text)"
        state = "FAILED" if len(speeds) < len(arm_runs) else f"{median(speeds):.1f} tok/s"
        parts.append(f"{arm} {state}{remark}")
    names = runs[0].prompts
    prompts = ", ".join(names) if len(names) <= MAX_PROMPT_NAMES else f"{names[0]} to {names[-1]}, {len(names)} prompts"
    return f"{number}/{total} {prompts}, batch {runs[0].batch}: {'; '.join(parts)}"
