"""Advice as a table for a terminal. Nothing is computed here."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from slipstream.bench.bootstrap import Estimate
from slipstream.bench.tuning.advice import Advice, Standing
from slipstream.text.figures_as_text import percent


def advice_table(advice: Advice) -> Table:
    """A line per candidate, the advised one first: speed-ups, parity, acceptance, and why the others lost."""
    title = f"batch size {advice.batch}; speed-up over plain decoding, 95 % intervals; measured {advice.units} times"
    table = Table(box=box.SIMPLE, pad_edge=False, title=title, title_justify="left", padding=(0, 1, 0, 0))
    for name in ("candidate", "speed-up", "", "predic-\nted", "texts", "accep-\ntance", "tokens\nper round", ""):
        left = name in ("candidate", "texts", "")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "candidate", overflow="fold")
    if advice.best is not None:
        table.add_row(*_line(advice.best, advice.expected), Text("use this", "green"))
    for one in advice.others:
        table.add_row(*_line(one, one.measured), Text(one.lost))
    return table


def positions(advice: Advice) -> str:
    """The acceptance of the advised drafts, position by position."""
    shares = () if advice.best is None else advice.best.acceptance_by_position
    return f"accepted at position 1, 2, ...: {' '.join(map(percent, shares))}" if shares else ""


def _line(one: Standing, estimate: Estimate | None) -> list[str | Text]:
    speed, interval = "-", ""
    if estimate is not None:
        speed = f"{estimate.value:.2f}x"
        interval = "" if estimate.low is None else f"{estimate.low:.2f} to {estimate.high:.2f}"
    return [
        Text(one.name),
        speed,
        interval,
        "-" if one.predicted is None else f"{one.predicted:.2f}x",
        _texts(one),
        percent(one.acceptance_rate),
        "-" if one.tokens_per_round is None else f"{one.tokens_per_round:.2f}",
    ]


def _texts(one: Standing) -> Text:
    found = Text()
    for name, number in (one.texts or {}).items():
        if number:
            bad = name == "different"
            found.append(f"{', ' if found else ''}{number} {name.upper() if bad else name}", "bold red" if bad else "")
    return found
