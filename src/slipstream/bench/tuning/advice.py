"""The advice for every batch size, and the results of the other candidates.

space = SearchSpace(decoder, drafts, params)
meter = Meter(space.lineup, folder, Budget(300), print)
result = tune(space, meter, prompts, batches=[1, 4], longest=8)
[advice.sentence for advice in result.advice]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import Any

from slipstream import drafters
from slipstream.bench.arms import PLAIN
from slipstream.bench.plan import BenchPrompt, groups
from slipstream.bench.records import Run
from slipstream.bench.result_tables import Cell, Table, cell, verdict_cell
from slipstream.bench.summary import ArmSummary, Estimate, summarize
from slipstream.bench.tuning.search import (
    MIN_UNITS,
    Candidate,
    Meter,
    Race,
    SearchSpace,
    candidates,
    in_turn,
    num_rounds,
    race,
    seconds_per_token,
)
from slipstream.errors import SlipstreamError, UsageError
from slipstream.text.round_view import percent

MIN_SPEED_UP = 1.02  # a smaller gain is not worth the trouble


@dataclass(frozen=True)
class CandidateResult:
    """The results of a candidate."""

    name: str
    candidate: Candidate
    measured: Estimate | None = None  # speed-up over plain decoding; None if it was not run, or failed
    texts: Mapping[str, int] | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: tuple[float, ...] = ()
    tokens_per_round: float | None = None
    units: int = 0  # how often it ran on a group of prompts
    lost: str = ""  # why it is not the advice
    failed: bool = False  # it raised an error, or an output is not plain decoding's


@dataclass(frozen=True)
class Advice:
    """The advice for a batch size."""

    batch: int
    best: CandidateResult | None  # None: do not speculate; its speed-up is measured in the confirmation
    others: tuple[CandidateResult, ...]  # the one that ran most and fastest first
    plain: Estimate  # tokens per second
    needed_seconds: int | None = None  # a budget that would have confirmed the best; None if it is confirmed

    @property
    def sentence(self) -> str:
        text = f"batch {self.batch}: do not speculate (plain decoding, {self.plain.value:.1f} tok/s)"
        if self.best is not None and (speed_up := self.best.measured) is not None:
            interval = "" if speed_up.low is None else f" ({speed_up.low:.2f} to {speed_up.high:.2f})"
            draft = f" with draft model {self.best.candidate.draft}" if needs_draft(self.best.candidate) else ""
            setting = self.best.candidate.setting
            text = f"batch {self.batch}: {setting}{draft}, {speed_up.value:.2f}x plain decoding{interval}"
        if self.needed_seconds is None:
            return text
        return f"{text}; not confirmed: use --budget {self.needed_seconds} or more to be sure"

    def to_dict(self) -> dict[str, Any]:
        """The advice for JSON, with its sentence and whether to speculate at all."""
        return asdict(self) | {"sentence": self.sentence, "speculate": self.best is not None}


def needs_draft(candidate: Candidate) -> bool:
    """True if the candidate uses a draft model."""
    return drafters.traits(candidate.kind).needs_draft_model


def advise(batch: int, choices: Mapping[str, Candidate], result: Race, needed_seconds: int | None = None) -> Advice:
    """The advice from a race. choices: by arm name; needed_seconds: as in `Advice`."""
    final = result.confirmation if needed_seconds is None else []  # else too few runs to be of use
    raced = {summary.arm: summary for summary in summarize(result.runs, PLAIN)}
    confirmed = {summary.arm: summary for summary in summarize(final, PLAIN)}
    plain = confirmed.get(PLAIN, raced.get(PLAIN))
    if plain is None or plain.speed is None:
        raise SlipstreamError(
            f"plain decoding failed, so nothing can be compared: {plain.error if plain else 'no run'}"
        )
    best, others = None, list[CandidateResult]()
    for name, candidate in choices.items():
        is_winner = result.winner is not None and name == result.winner.name
        runs, summaries = (final, confirmed) if is_winner and final else (result.runs, raced)
        summary = summaries.get(name)
        measured = _result(name, candidate, summary, sum(run.arm == name for run in runs))
        if is_winner and not measured.failed:
            lost = _why_no_gain(measured.measured, is_confirmed=needed_seconds is None)
            best = None if lost else measured
            others += [replace(measured, lost=lost)] if lost else []
        elif measured.lost or result.winner is None:  # without a winner all have failed
            others.append(measured)
        else:
            ratio = _relative_speed(result.runs, name, result.winner.name)
            others.append(replace(measured, lost=f"{ratio:.2f}x the speed of {result.winner.name}"))
    others.sort(key=lambda other: (-other.units, -(other.measured.value if other.measured else 0.0)))
    return Advice(batch, best, tuple(others), plain.speed.tokens_per_second, needed_seconds)


def _relative_speed(runs: Sequence[Run], name: str, winner: str) -> float:
    """An arm's speed relative to the winner's, on the prompts and repeats that the arm ran."""
    of_arm = [run for run in runs if run.arm == name]
    met = {(tuple(run.prompts), run.repeat) for run in of_arm}
    same = [run for run in runs if (tuple(run.prompts), run.repeat) in met]
    return exp(seconds_per_token(same, winner) - seconds_per_token(of_arm, name))


def _why_no_gain(speed_up: Estimate | None, *, is_confirmed: bool) -> str:
    """Reason why the winner is not worth using; "" if it is."""
    if speed_up is None or (is_confirmed and speed_up.low is not None and speed_up.low < 1):
        return "no gain beyond the noise"
    return f"gains less than {MIN_SPEED_UP - 1:.0%}" if speed_up.value < MIN_SPEED_UP else ""


def _result(name: str, candidate: Candidate, summary: ArmSummary | None, units: int) -> CandidateResult:
    if summary is None:
        return CandidateResult(name, candidate, lost="not measured")
    lost = f"failed: {summary.error}" if summary.failed else ""
    if wrong := summary.verdicts.get("different"):
        lost = f"{wrong} of {sum(summary.verdicts.values())} texts differ from plain decoding and are not ties"
    stats = summary.stats
    return CandidateResult(
        name,
        candidate,
        measured=summary.speed_up,
        texts=summary.verdicts,
        acceptance_rate=None if stats is None else stats.acceptance_rate,
        acceptance_by_position=tuple(summary.acceptance_by_position),
        tokens_per_round=None if stats is None else stats.block_efficiency,
        units=units,
        lost=lost,
        failed=bool(lost),
    )


def advice_table(advice: Advice) -> Table:
    """A line per candidate, the recommended one first: speed-ups, parity, acceptance, and why the others lost."""
    title = f"batch size {advice.batch}: speed-up over plain decoding, 95 % intervals"
    columns = ("candidate", "speed-up", "runs", "same\ntexts", "acceptance\nrate", "tokens per\nforward", "why")
    rows: list[list[Cell | str]] = []
    for result in [*([advice.best] if advice.best else []), *advice.others]:
        row: list[Cell | str] = [result.name, cell(result.measured, unit="x"), str(result.units)]
        row += [_same_texts(result.texts or {}), percent(result.acceptance_rate)]
        row.append("-" if result.tokens_per_round is None else f"{result.tokens_per_round:.2f}")
        rows.append([*row, Cell("use this", tone="good") if result is advice.best else result.lost])
    optional = ("runs", "tokens per\nforward", "acceptance\nrate")
    return Table(title, columns, rows, words=("same\ntexts", "why"), optional=optional)


def _same_texts(texts: Mapping[str, int]) -> Cell:
    """Number of outputs equal to plain decoding's, of how many: not all candidates finish all prompts."""
    same, total = texts.get("identical", 0) + texts.get("reference", 0), sum(texts.values())
    if not total:
        return Cell("-")
    others = {name: count for name, count in texts.items() if count and name not in ("identical", "reference")}
    return Cell(", ".join([f"{same} of {total}", str(verdict_cell(others))] if others else [f"{same} of {total}"]))


def positions(advice: Advice) -> str:
    """The acceptance of the recommended drafts, position by position."""
    shares = () if advice.best is None else advice.best.acceptance_by_position
    return f"accepted at position 1, 2, ...: {' '.join(map(percent, shares))}" if shares else ""


@dataclass(frozen=True)
class Tuned:
    """The advice by batch size."""

    advice: tuple[Advice, ...]
    unmeasured: tuple[int, ...]  # batch sizes for which no time was left

    @property
    def wrong(self) -> list[tuple[Advice, CandidateResult]]:
        """Candidates that failed or whose output is not plain decoding's."""
        return [(advice, result) for advice in self.advice for result in advice.others if result.failed]

    def to_dict(self) -> dict[str, Any]:
        return {"advice": [advice.to_dict() for advice in self.advice], "unmeasured": list(self.unmeasured)}


def tune(
    space: SearchSpace, meter: Meter, prompts: Sequence[BenchPrompt], batches: Sequence[int], longest: int
) -> Tuned:
    """Race the candidates at each batch size. longest: the longest draft considered.

    Time that one batch size leaves of its share of the budget goes to the next ones.
    """
    choices = {space.name(candidate): candidate for candidate in candidates(space.drafts, longest)}
    arms = [space.plain, *map(space.arm, choices.values())]
    advice, unmeasured = list[Advice](), list[int]()
    for number, batch in enumerate(batches):
        shares = len(batches) - number
        deadline = meter.now + (meter.budget.seconds - meter.now) / shares
        result = race(meter, arms, in_turn(groups(prompts, batch)), deadline)
        if not result.runs and number:
            unmeasured.append(batch)
            continue
        confirming = (num_rounds(len(choices)) + 1) * MIN_UNITS * meter.expected(arms[:2], batch)
        needed = meter.enough(shares * (meter.expected(arms, batch) + confirming))
        if not result.runs:
            raise UsageError(
                f"--budget {meter.budget.seconds:g} is too small to run every candidate once; allowed: about {needed} "
                "s here, or fewer --draft or --max-tokens"
            )
        last = result.confirmation
        is_wrong = any(run.error is not None or "different" in run.verdicts for run in last)
        is_confirmed = result.winner is None or is_wrong or sum(run.arm == PLAIN for run in last) >= MIN_UNITS
        advice.append(advise(batch, choices, result, None if is_confirmed else needed))
    return Tuned(tuple(advice), tuple(unmeasured))
