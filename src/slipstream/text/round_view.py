"""Shows what happened round by round, in terminals and notebooks, and writes figures and verdicts.

Marks show where a token came from, so that no color is needed. An accepted token has none, except ^ around one from a
branch of a draft tree, and = around one that a constraint forced. Rejected tokens are struck through and stand between
-, the target's own between +.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from slipstream.core.rounds import Round
from slipstream.text.detokenizer import TextStream
from slipstream.text.terminal_text import harmless
from slipstream.tokenization.tokenizer import Tokenizer

Kind = Literal["accepted", "branch", "forced", "rejected", "recovered", "bonus", "plain"]


class Look(NamedTuple):
    """How tokens of one kind are shown."""

    style: str  # in a terminal
    css: str = ""  # in a notebook
    mark: str = ""  # before and after the token
    meaning: str = ""  # in the legend; the target's own tokens share one


LOOKS: dict[Kind, Look] = {
    "accepted": Look("green", "color:#14742d", "", "accepted"),
    "branch": Look("green underline", "color:#14742d;text-decoration:underline", "^", "accepted from a branch"),
    "forced": Look("cyan", "color:#0b6e77", "=", "forced by the constraint"),
    "rejected": Look("red strike", "color:#b3261e;text-decoration:line-through", "-", "rejected"),
    "recovered": Look("blue", "color:#1a55b0;font-weight:600", "+", "the target's own (recovered or bonus)"),
    "bonus": Look("blue", "color:#1a55b0;font-weight:600", "+"),
    "plain": Look(""),
}


@dataclass(frozen=True)
class Piece:
    """One token of a round and what became of it."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class RoundView:
    """One round, and the running counts up to and including it."""

    number: int
    pieces: tuple[Piece, ...]  # in order of position
    num_draft_tokens: int
    num_accepted_tokens: int
    total_drafted: int
    total_accepted: int
    predicted: bool = False  # the draft is the request's prediction

    @property
    def acceptance(self) -> str:
        """The acceptance rate so far; a dash before the first draft."""
        return f"{self.total_accepted / self.total_drafted:.0%}" if self.total_drafted else "-"

    @property
    def caption(self) -> str:
        """Round number, accepted of drafted tokens, running acceptance rate, and whether a prediction was drafted."""
        counts = f"{self.number:4} {self.num_accepted_tokens:2}/{self.num_draft_tokens:<2} {self.acceptance:>4}"
        return f"{counts} prediction" if self.predicted else counts


def views(rounds: Sequence[Round], tokenizer: Tokenizer | None) -> Iterator[RoundView]:
    """The rounds of one row, in order."""
    shown = None if tokenizer is None else TextStream(tokenizer.decode)
    drafted = accepted = 0
    for number, round in enumerate(rounds, 1):
        proposed = round.without_forced
        drafted, accepted = drafted + proposed.num_draft_tokens, accepted + proposed.num_accepted_tokens
        texts = [f"[{token}]" if shown is None else shown.push(token) for token in round.tokens]
        committed = list(map(Piece, round.origins, texts))
        if round.finish_reason is not None and shown is not None and committed:
            committed[-1] = Piece(committed[-1].kind, committed[-1].text + shown.flush())
        kept = round.num_accepted_tokens
        for place in range(round.num_accepted_on_chain, kept):
            committed[place] = Piece("branch", committed[place].text)
        rejected = round.unaccepted if round.rejected or round.path is not None else ()
        lost = [f"[{token}]" if tokenizer is None else tokenizer.decode([token]) for token in rejected]
        pieces = (*committed[:kept], *(Piece("rejected", text) for text in lost), *committed[kept:])
        predicted = bool(round.num_prediction_tokens)
        yield RoundView(
            number, pieces, proposed.num_draft_tokens, proposed.num_accepted_tokens, drafted, accepted, predicted
        )


def _kinds_of(all_views: Sequence[RoundView]) -> frozenset[Kind]:
    return frozenset(piece.kind for view in all_views for piece in view.pieces)


def _explained(kinds: frozenset[Kind]) -> list[Look]:
    """The looks that a legend explains: the common ones, and the rare ones that occur."""
    rare = {"branch", "forced"} - kinds
    return [look for kind, look in LOOKS.items() if look.meaning and kind not in rare]


def legend(kinds: frozenset[Kind] = frozenset()) -> Text:
    """The meanings of colors and marks. kinds: those that occur; rare kinds are explained only if they do."""
    text = Text.assemble(("round accepted/drafted acceptance so far | ", "dim"))
    for look in _explained(kinds):
        text.append(f"{look.mark}{look.meaning}{look.mark}", look.style)
        text.append("  ")
    return text


def round_line(view: RoundView) -> Text:
    """One round as a line of colored, marked text."""
    line = Text.assemble((f"{view.caption} | ", "dim"))
    for piece in view.pieces:
        look = LOOKS[piece.kind]
        line.append(f"{look.mark}{_visible(piece.text)}{look.mark}", look.style)
    return line


class RoundLines(Text):
    """Rounds as lines that show themselves: colored in a terminal and a notebook, with their marks in a file."""

    def __repr__(self) -> str:
        """The lines as an interactive Python session shows them, in colors in a terminal."""
        console = Console(force_jupyter=False)
        if console.legacy_windows:
            return self.plain
        with console.capture() as capture:
            console.print(self, end="", soft_wrap=True)
        return capture.get()


def round_lines(rounds: Sequence[Round], tokenizer: Tokenizer | None) -> RoundLines:
    """All rounds of one row, a line each, with the legend."""
    all_views = list(views(rounds, tokenizer))
    lines = RoundLines()
    lines.append_text(Text("\n").join([legend(_kinds_of(all_views)), *map(round_line, all_views)]))
    return lines


def to_html(rounds: Sequence[Round], tokenizer: Tokenizer | None) -> str:
    """The output, each token in the color of its origin, and a table of rounds to unfold."""
    all_views = list(views(rounds, tokenizer))
    kept = [piece for view in all_views for piece in view.pieces if piece.kind != "rejected"]
    text = "".join(f'<span style="{LOOKS[piece.kind].css}">{escape(piece.text)}</span>' for piece in kept)
    lines = "".join(
        f"<tr><td><code>{escape(view.caption)}</code></td><td>{''.join(map(_marked, view.pieces))}</td></tr>"
        for view in all_views
    )
    looks = _explained(_kinds_of(all_views))
    marks = ", ".join(f'<span style="{look.css}">{look.mark}{look.meaning}</span>' for look in looks)
    summary = f"{len(all_views)} rounds, acceptance {all_views[-1].acceptance}" if all_views else "no rounds"
    return (
        f'<div style="white-space:pre-wrap;font-family:monospace">{text}</div>'
        f"<details><summary>{summary}; {marks}</summary>"
        f'<table style="text-align:left;font-family:monospace;white-space:pre-wrap">'
        f"<tr><th>round, accepted/drafted, so far</th><th>tokens</th></tr>{lines}</table></details>"
    )


def _visible(text: str) -> str:
    return harmless(text.replace("\n", "\u21b5"))


def _marked(piece: Piece) -> str:
    look = LOOKS[piece.kind]
    return f'<span style="{look.css}">{look.mark}{escape(_visible(piece.text))}{look.mark}</span>'


def percent(value: float | None) -> str:
    """A share as a percentage; a dash where there is none."""
    return "-" if value is None else f"{value:.0%}"


def time_split(stats: dict[str, Any]) -> str:
    """The shares of the speculative arm's time, in one line."""
    total = stats["total_seconds"] or 1.0
    parts = ("prefill", "draft", "verify", "accept", "overhead")
    shares = "  ".join(f"{part} {stats[f'{part}_seconds'] / total:.1%}" for part in parts)
    return f"time of the speculative arm: {shares}"
