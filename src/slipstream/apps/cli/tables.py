"""What the commands print: coloured text, tables, time splits. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from slipstream.bench.comparison import BATCH, HF, PLAIN, SPECULATIVE, Comparison
from slipstream.certificate.checks import Check
from slipstream.text.detokenizer import TextStream, Tokenizer
from slipstream.text.results import Result
from slipstream.text.round_view import percent, verdict

STYLES = {"accepted": "green", "forced": "yellow", "recovered": "blue", "bonus": "cyan", "plain": ""}
MEANINGS = {
    "accepted": "accepted draft token",
    "forced": "forced by the constraint",
    "bonus": "bonus",
    "recovered": "recovered after a rejection",
}


def coloured(result: Result, tokenizer: Tokenizer, limit: int | None = None) -> Text:
    """A result's text, each token in the colour of its origin."""
    text, stream = Text(), TextStream(tokenizer)
    for done in result.rounds:
        for token, origin in zip(done.tokens, done.origins, strict=True):
            text.append(stream.push(token), STYLES[origin])
    text.append(stream.flush())
    if limit is not None and len(text) > limit:
        text.truncate(limit)
        text.append(" ...", "dim")
    return text


def legend(comparisons: Sequence[Comparison]) -> Text:
    """What the colours of speculative texts mean, as far as they occur."""
    results = [done.runs[SPECULATIVE].result for done in comparisons]
    shown = {origin for result in results if result is not None for done in result.rounds for origin in done.origins}
    return Text("  ").join(Text(meaning, STYLES[origin]) for origin, meaning in MEANINGS.items() if origin in shown)


def side_by_side(done: Comparison, tokenizer: Tokenizer) -> Table:
    """Plain text left, speculative text right, in the colours of its tokens' origins."""
    plain, fast = done.runs[PLAIN], done.runs[SPECULATIVE]
    assert plain.result is not None and fast.result is not None
    table = Table(box=box.SIMPLE, pad_edge=False, expand=True)
    table.add_column(f"{done.prompt.category}: plain, {plain.tokens_per_second:.1f} tok/s", ratio=1)
    table.add_column(f"speculative, {fast.tokens_per_second:.1f} tok/s, {verdict(fast.difference)}", ratio=1)
    table.add_row(coloured(plain.result, tokenizer), coloured(fast.result, tokenizer))
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One line per prompt."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("prompt")
    with_hf = HF in comparisons[0].runs
    for name in ([HF] if with_hf else []) + [PLAIN, SPECULATIVE]:
        table.add_column(f"{name}\ntok/s", justify="right")
    for name in ("speed-up", "acceptance\nrate", "block\nefficiency"):
        table.add_column(name, justify="right")
    table.add_column("text")
    if with_hf:
        table.add_column("HF's text")
    for done in comparisons:
        table.add_row(*_line(done, with_hf))
    return table


def _line(done: Comparison, with_hf: bool) -> list[str]:
    run = done.runs[SPECULATIVE]
    assert run.result is not None
    stats = run.result.stats
    speeds = [f"{done.runs[arm].tokens_per_second:.1f}" for arm in ([HF] if with_hf else []) + [PLAIN, SPECULATIVE]]
    cells = [
        done.prompt.category,
        *speeds,
        f"{done.speed_up(SPECULATIVE):.2f}x",
        percent(stats.acceptance_rate),
        f"{stats.block_efficiency:.2f}",
        verdict(run.difference),
    ]
    return [*cells, verdict(done.runs[HF].difference)] if with_hf else cells


def summary_table(summary: dict[str, Any]) -> Table:
    """One line per arm."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("arm", "tok/s", "speed-up\n(geom. mean)", "speed-up\n(median)", "identical", "ties", "different"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for arm, line in summary["arms"].items():
        table.add_row(
            arm,
            f"{line['tokens_per_second']:.1f}",
            f"{line['speed_up_geometric_mean']:.2f}x",
            f"{line['speed_up_median']:.2f}x",
            *(str(line[key]) for key in ("identical", "ties", "different")),
        )
    if batch := summary.get(BATCH):
        table.add_row(
            f"batch of {min(batch['rows'], batch['max_batch_size'])} against one by one",
            f"{batch['tokens_per_second']:.1f}",
            f"{batch['speed_up']:.2f}x",
            "",
            *(str(batch[key]) for key in ("identical", "ties", "different")),
        )
    return table


def certificate(checks: Sequence[Check]) -> Table:
    """One line per check."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("check", "", "evidence", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    for check in checks:
        style = {"pass": "green", "FAIL": "bold red", "not applicable": "dim"}[check.outcome]
        table.add_row(check.name, Text(check.outcome, style), check.detail, f"{check.seconds:.1f}")
    return table
