"""Prints colored output, tables, comparisons and simulations; computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.apps.cli.consoles import Stream
from slipstream.bench.comparison import BATCH, HF, PLAIN, SPECULATIVE, Comparison
from slipstream.bench.result_tables import Cell, Row
from slipstream.bench.result_tables import Table as ResultTable
from slipstream.bench.speed_formula import Simulation
from slipstream.certificate.checks import Check
from slipstream.certificate.parity import verdict
from slipstream.checks import counted
from slipstream.text.detokenizer import TextStream
from slipstream.text.prompt_sets import titles
from slipstream.text.results import Result
from slipstream.text.round_view import percent
from slipstream.tokenization.tokenizer import Tokenizer

STYLES = {"accepted": "green", "forced": "yellow", "recovered": "red", "bonus": "cyan", "plain": ""}
BESIDE_TEXTS = 5  # columns of borders and gaps around two texts
SIDE_BY_SIDE = 76  # minimum columns for two outputs side by side
MEANINGS = {
    "accepted": "accepted draft token",
    "forced": "forced by the constraint",
    "bonus": "the model's own token after an accepted draft",
    "recovered": "the model's own token after a rejected draft",
}


def colored(result: Result, tokenizer: Tokenizer, limit: int | None = None) -> Text:
    """A result's output, each token in the color of its origin."""
    text, stream = Text(), TextStream(tokenizer.decode)
    for decoded in result.rounds:
        for token, origin in zip(decoded.tokens, decoded.origins, strict=True):
            text.append(stream.push(token), STYLES[origin])
    text.append(stream.flush())
    if limit is not None and len(text) > limit:
        text.truncate(limit)
        text.append(" ...", "dim")
    return text


def print_legend(console: Stream, comparisons: Sequence[Comparison]) -> None:
    """Explain the colors that occur in speculative outputs; print nothing if the console has no colors."""
    if console.color_system is None or console.no_color:
        return
    results = [comparison.runs[SPECULATIVE].result for comparison in comparisons]
    rounds = [decoded for result in results if result is not None for decoded in result.rounds]
    shown = {origin for decoded in rounds for origin in decoded.origins}
    legend = [Text(meaning, STYLES[origin]) for origin, meaning in MEANINGS.items() if origin in shown]
    if legend:
        console.sentence(Text("Colors: ", "dim") + Text(", ").join(legend))


def side_by_side(comparison: Comparison, tokenizer: Tokenizer, width: int) -> RenderableType:
    """Plain output on the left, speculative output on the right, colored by the origins of tokens.

    On a narrow console they stand one above the other, or are shown once if they are equal.
    """
    plain, fast = comparison.runs[PLAIN], comparison.runs[SPECULATIVE]
    assert plain.result is not None and fast.result is not None
    plain_title = f"plain, {plain.tokens_per_second:.1f} tok/s"
    fast_title = f"speculative, {fast.tokens_per_second:.1f} tok/s, {verdict(fast.difference)}"
    texts = colored(plain.result, tokenizer), colored(fast.result, tokenizer)
    if width < SIDE_BY_SIDE:
        if plain.result.token_ids == fast.result.token_ids:
            return Group(Text(f"{plain_title}; {fast_title}", "bold"), texts[1])
        return Group(Text(plain_title, "bold"), texts[0], Text(fast_title, "bold"), texts[1])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in (plain_title, fast_title):
        table.add_column(title, width=(width - BESIDE_TEXTS) // 2)  # the same, so that equal texts break alike
    table.add_row(*texts)
    return table


def comparison_table(comparisons: Sequence[Comparison]) -> ResultTable:
    """One line per prompt."""
    arms = [*([HF] if HF in comparisons[0].runs else []), PLAIN, SPECULATIVE]
    figures = ("speed-up", "estimated\nspeed-up", "acceptance\nrate", "tokens per\nforward")
    texts = ("text", "HF's text") if HF in arms else ("text",)
    columns = ("prompt", *(f"{arm}\ntok/s" for arm in arms), *figures, *texts)
    rows = []
    names = titles([comparison.prompt for comparison in comparisons])
    for name, comparison in zip(names, comparisons, strict=True):
        run = comparison.runs[SPECULATIVE]
        assert run.result is not None
        stats = run.result.stats
        row = [name, *(f"{comparison.runs[arm].tokens_per_second:.1f}" for arm in arms)]
        estimate = comparison.estimate
        about = "" if estimate is None else f"{estimate.estimated:.2f}x ({100 * estimate.error:+.0f} %)"
        row += [f"{comparison.speed_up(SPECULATIVE):.2f}x", about, percent(stats.acceptance_rate)]
        row += [f"{stats.block_efficiency:.2f}", verdict(run.difference)]
        rows.append([*row, verdict(comparison.runs[HF].difference)] if HF in arms else row)
    return ResultTable("", columns, rows, words=texts, optional=("estimated\nspeed-up", "acceptance\nrate"))


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """A sentence per arm: speed, speed-up over plain decoding, and the verdicts on its outputs."""
    arms = summary["arms"]
    plain = f"plain decoding {arms[PLAIN]['tokens_per_second']:.1f} tok/s"
    lines = [f"{plain}; {_arm_sentence(name, arm)}" for name, arm in arms.items() if name == SPECULATIVE]
    lines += [_arm_sentence(name, arm) for name, arm in arms.items() if name not in (PLAIN, SPECULATIVE)]
    stats = summary["stats"]
    if stats["num_draft_tokens"]:
        accepted = f"{stats['acceptance_rate']:.0%} of {stats['num_draft_tokens']} drafted tokens accepted"
        lines.append(f"{accepted}, {stats['block_efficiency']:.2f} tokens per forward")
    if estimate := summary.get("estimate"):
        errors = f"{estimate['median_error']:.1%} (median), {estimate['largest_error']:.1%} at most"
        of = counted(estimate["prompts"], "prompt")
        lines.append(f"the planner's estimate of the speed-up is off by {errors}, over {of}, prompts' reading left out")
    if batch := summary.get(BATCH):
        size = min(batch["rows"], batch["max_batch_size"])
        speed = f"{batch['tokens_per_second']:.1f} tok/s, {batch['speed_up']:.2f}x one by one"
        lines.append(f"as a batch of {size}: {speed}; {_verdicts(batch)}")
    return lines


def _arm_sentence(name: str, arm: dict[str, Any]) -> str:
    interval = "" if arm["speed_up_low"] is None else f" ({arm['speed_up_low']:.2f} to {arm['speed_up_high']:.2f})"
    noise = ", within noise: no difference shown" if arm["within_noise"] else ""
    speed = f"{name} {arm['tokens_per_second']:.1f} tok/s: {arm['speed_up']:.2f}x{interval}{noise}"
    return f"{speed}; {_verdicts(arm)}"


def _verdicts(counts: dict[str, Any]) -> str:
    total = sum(counts[kind] for kind in ("identical", "ties", "different", "not_compared"))
    others = {"ties": "tied", "different": "DIFFERENT", "not_compared": "not compared"}
    more = "".join(f", {counts[kind]} {word}" for kind, word in others.items() if counts[kind])
    if total == 1:
        return "text identical" if counts["identical"] else f"text {more.split(' ', 2)[2]}"
    return f"{counts['identical']} of {total} texts identical{more}"


def certificate(checks: Sequence[Check]) -> ResultTable:
    """One line per check."""
    tones: dict[str, Any] = {"pass": "good", "FAIL": "bad", "not applicable": "faint"}
    rows: list[Row] = [
        [check.name, Cell(check.outcome, tone=tones[check.outcome]), check.detail, f"{check.seconds:.1f}"]
        for check in checks
    ]
    columns = ("check", "result", "evidence", "seconds")
    return ResultTable("", columns, rows, words=("result", "evidence"), optional=("seconds",))


def simulation_table(simulation: Simulation) -> ResultTable:
    """Speed-ups by draft length, a column per batch."""
    columns = ("draft\nlength", "tokens per\nforward", *(f"batch\n{batch}" for batch in simulation.best))
    rows: list[Row] = []
    for length, tokens in simulation.tokens.items():
        cells: list[str | Cell] = [str(length), f"{tokens:.2f}"]
        for batch, best in simulation.best.items():
            value = simulation.speed_ups[batch][length]
            if length == best:
                cells.append(Cell(f"{value:.2f}x*", tone="best"))
            else:
                cells.append(Cell(f"{value:.2f}x-", tone="slower") if value < 1 else Cell(f"{value:.2f}x "))
        rows.append(cells)
    title = "predicted speed-up over plain decoding (* best, - slower)"
    return ResultTable(title, columns, rows)
