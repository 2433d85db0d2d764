"""The coloured text of recorded runs: what was accepted, what was rejected, what the target chose itself.

Marks need no colour: rejected tokens are struck through, the target's own are underlined, those from a branch doubly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from slipstream.bench.arm_labels import counted
from slipstream.bench.records import Run
from slipstream.core.rounds import Round, Seconds
from slipstream.text.detokenizer import Tokenizer
from slipstream.text.round_view import Piece, RoundView, views

LONGEST = 400  # output tokens shown of a text
_CLASSES = {
    "accepted": "acc",
    "branch": "acc tree",
    "forced": "acc",
    "rejected": "rej",
    "recovered": "own",
    "bonus": "own",
    "plain": "",
}
LEGEND = (
    '<p class="legend"><span class="acc">accepted draft token</span> '
    '<span class="acc tree">accepted from a branch</span> <span class="rej">rejected draft token</span> '
    '<span class="own">the target\'s own (after a rejection, or a bonus)</span> plain: nothing was drafted</p>'
)


def restored(rounds: Sequence[Mapping[str, Any]], row: int, num_rows: int) -> list[Round]:
    """The recorded rounds of one row, as the loop had made them; the last one counts as finished."""
    own = [r for r in rounds if r["row"] == row]
    return [
        Round(
            row=row,
            step=r["step"],
            num_rows=num_rows,
            start=r["start"],
            draft=tuple(r["draft"]),
            tokens=tuple(r["tokens"]),
            num_accepted_tokens=r["accepted"],
            rejected=r["rejected"],
            finish_reason="length" if r is own[-1] else None,
            seconds=Seconds(*r["seconds"]),
            parents=tuple(r["parents"]) if "parents" in r else None,
            path=tuple(r["path"]) if "path" in r else None,
        )
        for r in own
    ]


def chosen(runs: Sequence[Run], fastest: Sequence[str], per_family: int) -> dict[str, list[tuple[Run, int]]]:
    """Up to `per_family` texts of each family: a run that drafted, and the row in it; every prompt once.

    fastest: all arms, the one to show first in front.
    """
    found: dict[str, list[tuple[Run, int]]] = {}
    seen: set[str] = set()
    for run in sorted(runs, key=lambda r: (r.batch, fastest.index(r.arm), r.repeat)):
        drafted = run.stats is not None and run.stats["num_draft_tokens"] > 0
        for row, prompt in enumerate(run.prompts if drafted and run.rounds else ()):
            texts = found.setdefault(run.family, [])
            if prompt not in seen and len(texts) < per_family:
                seen.add(prompt)
                texts.append((run, row))
    return found


def sample(run: Run, row: int, tokenizer: Tokenizer | None, label: str | None = None) -> str:
    """One text as HTML, with the line that says whose it is, how much was accepted and whether it is plain's text.

    label: the arm in words.
    """
    found = list(views(restored(run.rounds or [], row, run.batch), tokenizer))
    text = "".join(_spans(_first(found, LONGEST)))
    shortened = " ..." if sum(len(view.pieces) for view in found) > LONGEST else ""
    acceptance = found[-1].acceptance if found else "-"
    who = f"{label or run.arm}, prompt {run.prompts[row]}: {counted(len(found), 'round')}, "
    who += f"{acceptance} of drafted tokens accepted"
    verdict = run.verdicts[row] if row < len(run.verdicts) else "not compared"
    caption = f"<figcaption>{escape(who)}; text: {escape(verdict)}</figcaption>"
    return f'<figure class="sample">{caption}<div class="text">{text}{shortened}</div></figure>'


def _first(found: Sequence[RoundView], limit: int) -> list[Piece]:
    return [piece for view in found for piece in view.pieces][:limit]


def _spans(pieces: Sequence[Piece]) -> Iterator[str]:
    for piece in pieces:
        if piece.text:
            name = _CLASSES[piece.kind]
            yield f'<span class="{name}">{escape(piece.text)}</span>' if name else escape(piece.text)
