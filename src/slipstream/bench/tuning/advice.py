"""Both stages of a tuning for every batch size, and what they advise: what to use, and why the others lost.

    space = SearchSpace(decoder, drafts, params)
    meter = Meter(space.lineup, folder, Budget(300), print)
    result = tune(space, meter, prompts, batches=[1, 4], longest=8)
    [advice.sentence for advice in result.advice]

The best arm of a run looks better than it is, because it was chosen for its result in that very run. This selection
bias is estimated as Efron's optimism ("Estimating the Error Rate of a Prediction Rule", JASA 1983): choose again on
bootstrap resamples, and see how much better each choice looks on its resample than on all the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream import drafters
from slipstream.bench.arms import PLAIN
from slipstream.bench.plan import BenchPrompt, Group, groups
from slipstream.bench.records import Run
from slipstream.bench.result_tables import Cell, Table, cell, verdict_cell
from slipstream.bench.summary import RESAMPLES, SEED, ArmSummary, Estimate, summarise
from slipstream.bench.tuning.search import (
    Candidate,
    Entry,
    Meter,
    Screened,
    SearchSpace,
    in_turn,
    screen,
    search,
    shortlist,
    too_little,
)
from slipstream.errors import SlipstreamError
from slipstream.text.round_view import percent

MIN_SPEED_UP = 1.02  # a smaller gain is not worth the trouble
COSTLY_DRAFT_SHARE = 0.1  # of an arm's time; a larger share may be why it lost
MIN_UNITS = 2  # that an interval needs

Floats = NDArray[np.float64]


def optimism(logs: Floats) -> float:
    """What the best mean gains from being chosen; >= 0. logs: [A, U], log speed-ups of A arms on U prompts."""
    if logs.shape[0] < 2 or logs.shape[1] < 2:
        return 0.0
    sampled = np.random.default_rng(SEED).integers(0, logs.shape[1], (RESAMPLES, logs.shape[1]))
    means = logs[:, sampled].mean(axis=2)
    chosen = means.argmax(axis=0)
    gained = means[chosen, np.arange(RESAMPLES)] - logs.mean(axis=1)[chosen]
    return max(0.0, float(gained.mean()))


def log_speed_ups(runs: Sequence[Run], arms: Sequence[str], reference: str) -> Floats:
    """[A, U] log speed-ups over `reference`, one for each arm and unit.

    A unit is a group of prompts (its median over repeats), or a single repeat if there is only one group. Groups that
    not all arms have run are left out.
    """
    names = [reference, *arms]
    by_group: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}  # seconds per token, by repeat and arm
    for run in runs:
        if run.error is None and run.arm in names:
            repeats = by_group.setdefault(tuple(run.prompts), {})
            repeats.setdefault(run.repeat, {})[run.arm] = run.seconds / run.num_output_tokens
    complete = [[costs for costs in repeats.values() if len(costs) == len(names)] for repeats in by_group.values()]
    shared = [repeats for repeats in complete if repeats]
    units = [[costs] for costs in shared[0]] if len(shared) == 1 else shared
    medians = np.array([[np.median([costs[name] for costs in unit]) for unit in units] for name in names])
    logs: Floats = np.log(medians[0]) - np.log(medians[1:])
    return logs


def lowered_by_selection_bias(estimate: Estimate, bias: float) -> Estimate:
    """The estimate and its interval, lowered by `bias`, which is that of the logarithm."""
    share = exp(-bias)
    low, high = (None if end is None else end * share for end in (estimate.low, estimate.high))
    return replace(estimate, value=estimate.value * share, low=low, high=high)


@dataclass(frozen=True)
class CandidateResult:
    """The results of a candidate. measured: its speed-up over plain decoding, None if it was not run to the end.

    units: how often it ran on a group of prompts; predicted: its predicted speed-up, prompt processing left out; lost:
    why it is not the advice; failed: whether it raised an error, or its text is not plain decoding's.
    """

    name: str
    candidate: Candidate
    measured: Estimate | None = None
    predicted: float | None = None
    texts: Mapping[str, int] | None = None
    acceptance_rate: float | None = None
    acceptance_by_position: tuple[float, ...] = ()
    tokens_per_round: float | None = None
    draft_share: float | None = None
    units: int = 0
    lost: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Advice:
    """What to do at a batch size. best: None if the answer is not to speculate.

    expected: the speed-up of `best` with the gain from being chosen taken off (docs/tune.md). others: best first.
    """

    batch: int
    best: CandidateResult | None
    expected: Estimate | None
    optimism: float
    others: tuple[CandidateResult, ...]
    units: int
    plain: Estimate

    @property
    def sentence(self) -> str:
        if self.best is None or self.expected is None:
            text = f"batch {self.batch}: do not speculate (plain decoding, {self.plain.value:.1f} tok/s)"
            first = next((other for other in self.others if other.measured is not None and not other.failed), None)
            if first is None or first.measured is None or first.measured.value < MIN_SPEED_UP:
                return text
            return f"{text}; {first.name} at {first.measured.value:.2f}x may be chance: more prompts or time would tell"
        low, high = self.expected.low, self.expected.high
        interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        draft = f" with draft model {self.best.candidate.draft}" if needs_draft(self.best.candidate) else ""
        setting = self.best.candidate.setting
        return f"batch {self.batch}: {setting}{draft}, {self.expected.value:.2f}x plain decoding{interval}"

    def to_dict(self) -> dict[str, Any]:
        """The advice as JSON has it, with its sentence and whether to speculate at all."""
        return asdict(self) | {"sentence": self.sentence, "speculate": self.best is not None}


def needs_draft(candidate: Candidate) -> bool:
    """Whether the candidate uses a draft model."""
    return drafters.traits(candidate.kind).needs_draft_model


def advise(batch: int, entries: Mapping[str, Entry], runs: Sequence[Run]) -> Advice:
    """The advice for a batch size. entries: by arm name, the simplest first, as the first of equals wins. runs: whole
    units of this batch size.
    """
    summaries = {summary.arm: summary for summary in summarise(runs, PLAIN)}
    plain = summaries.get(PLAIN)
    if plain is None or plain.speed is None:
        raise SlipstreamError(
            f"plain decoding failed, so nothing can be compared: {plain.error if plain else 'no run'}"
        )
    results = [_result(name, entry, summaries.get(name), runs) for name, entry in entries.items()]
    units = sum(run.arm == PLAIN for run in runs)
    best, expected, bias = _choose(results, runs, units)
    against_best = summarise(runs, PLAIN if best is None else best.name)
    ratios = {summary.arm: summary.speed_up for summary in against_best}
    others = [
        replace(result, lost=result.lost or _reason_not_chosen(result, best, ratios[result.name]))
        for result in results
        if result is not best
    ]
    others.sort(key=lambda result: -(result.measured.value if result.measured else 0.0))
    return Advice(batch, best, expected, bias, tuple(others), units, plain.speed.tokens_per_second)


def _result(name: str, entry: Entry, summary: ArmSummary | None, runs: Sequence[Run]) -> CandidateResult:
    result = CandidateResult(
        name, entry.candidate, predicted=entry.predicted, lost=entry.out or "", failed=entry.failed
    )
    if summary is None:
        return replace(result, lost=result.lost or "not measured")
    lost = f"failed: {summary.error}" if summary.failed else ""
    if summary.verdicts.get("different"):
        wrong, texts = summary.verdicts["different"], sum(summary.verdicts.values())
        lost = f"{wrong} of {texts} texts differ from plain decoding and are no ties"
    stats, units = summary.stats, sum(run.arm == name for run in runs)
    return replace(
        result,
        measured=summary.speed_up,
        texts=summary.verdicts,
        acceptance_rate=None if stats is None else stats.acceptance_rate,
        acceptance_by_position=tuple(summary.acceptance_by_position),
        tokens_per_round=None if stats is None else stats.block_efficiency,
        draft_share=None if summary.time_split is None else summary.time_split["draft"],
        units=units,
        lost=lost,
        failed=bool(lost),
    )


def _choose(
    results: Sequence[CandidateResult], runs: Sequence[Run], units: int
) -> tuple[CandidateResult | None, Estimate | None, float]:
    """The best arm that certainly pays; of equals the first. Only arms that ran all units take part."""
    able = [result for result in results if not result.lost and result.measured is not None and result.units == units]
    if not able:
        return None, None, 0.0
    bias = optimism(log_speed_ups(runs, [result.name for result in able], PLAIN))
    for result in sorted(able, key=lambda result: -result.measured.value if result.measured else 0.0):
        assert result.measured is not None
        expected = lowered_by_selection_bias(result.measured, bias)
        if expected.low is not None and expected.low >= 1 and expected.value >= MIN_SPEED_UP:
            return result, expected, bias
    return None, None, bias


def _reason_not_chosen(result: CandidateResult, best: CandidateResult | None, ratio: Estimate | None) -> str:
    """Why a candidate is not the advice. ratio: its speed relative to the best arm's, or to plain decoding's."""
    if result.measured is None or ratio is None or ratio.high is None or ratio.high >= 1:
        gains = best is None and result.measured is not None and result.measured.is_above_one
        return f"gains less than {MIN_SPEED_UP - 1:.0%}" if gains else "no difference beyond the noise"
    to_beat = 1.0 if best is None or best.measured is None else best.measured.value
    share = result.draft_share or 0.0
    if COSTLY_DRAFT_SHARE < share < 1 and result.measured.value / (1 - share) >= to_beat:
        return f"drafting costs too much ({share:.0%} of the time)"
    return "drafts too rarely accepted"


def advice_table(advice: Advice) -> Table:
    """A line per candidate, the advised one first: speed-ups, parity, acceptance, and why the others lost."""
    title = f"batch size {advice.batch}: speed-up over plain decoding, 95 % intervals; measured {advice.units} times"
    columns = ("candidate", "speed-up", "predicted", "same\ntexts", "acceptance\nrate", "tokens per\nforward", "why")
    rows = [[*_cells(result, result.measured), result.lost] for result in advice.others]
    if advice.best is not None:
        rows.insert(0, [*_cells(advice.best, advice.expected), Cell("use this", tone="good")])
    optional = ("predicted", "tokens per\nforward", "acceptance\nrate")
    return Table(title, columns, rows, words=("same\ntexts", "why"), optional=optional)


def _cells(result: CandidateResult, speed_up: Estimate | None) -> list[Cell | str]:
    return [
        result.name,
        cell(speed_up, unit="x"),
        "-" if result.predicted is None else f"{result.predicted:.2f}x",
        _same_texts(result.texts or {}),
        percent(result.acceptance_rate),
        "-" if result.tokens_per_round is None else f"{result.tokens_per_round:.2f}",
    ]


def _same_texts(texts: Mapping[str, int]) -> Cell:
    """How many of a candidate's texts are plain decoding's, and of how many: not all candidates finish all texts."""
    same, total = texts.get("identical", 0) + texts.get("reference", 0), sum(texts.values())
    if not total:
        return Cell("-")
    others = {name: count for name, count in texts.items() if count and name not in ("identical", "reference")}
    return Cell(", ".join([f"{same} of {total}", str(verdict_cell(others))] if others else [f"{same} of {total}"]))


def positions(advice: Advice) -> str:
    """The acceptance of the advised drafts, position by position."""
    shares = () if advice.best is None else advice.best.acceptance_by_position
    return f"accepted at position 1, 2, ...: {' '.join(map(percent, shares))}" if shares else ""


@dataclass(frozen=True)
class Tuned:
    """The results of stage one, and the advice by batch size. unmeasured: batch sizes for which no time was left."""

    screened: tuple[Screened, ...]
    advice: tuple[Advice, ...]
    unmeasured: tuple[int, ...]

    @property
    def wrong(self) -> list[tuple[Advice, CandidateResult]]:
        """Candidates that failed, or whose text is not plain decoding's."""
        return [(advice, result) for advice in self.advice for result in advice.others if result.failed]

    def to_dict(self) -> dict[str, Any]:
        """Everything that was screened and advised, as JSON has it."""
        return {
            "screened": [screened.to_dict() for screened in self.screened],
            "advice": [advice.to_dict() for advice in self.advice],
            "unmeasured": list(self.unmeasured),
        }


def tune(
    space: SearchSpace, meter: Meter, prompts: Sequence[BenchPrompt], batches: Sequence[int], longest: int
) -> Tuned:
    """Screen all drafters, then measure the shortlist of each batch size. longest: the longest draft considered.

    The next batch sizes get what one leaves of its share of the budget. UsageError if no batch size could be measured.
    """
    work = {batch: in_turn(groups(prompts, batch)) for batch in batches}
    screened = screen(space, meter, work[batches[0]], batches, longest)
    by_batch: dict[int, Advice | None] = {}
    for number, batch in enumerate(batches):
        deadline = meter.budget.now + meter.budget.left / (len(batches) - number)
        by_batch[batch] = _batch(space, meter, shortlist(screened, space.drafts, batch, longest), work[batch], deadline)
    advice = tuple(of_batch for of_batch in by_batch.values() if of_batch is not None)
    if not advice:
        raise too_little(meter)
    return Tuned(tuple(screened), advice, tuple(batch for batch, of_batch in by_batch.items() if of_batch is None))


def _batch(
    space: SearchSpace, meter: Meter, entries: Sequence[Entry], work: Sequence[Group], deadline: float
) -> Advice | None:
    """The advice for one batch size; None if there was no time for the units that an interval needs."""
    named, batch = {space.name(entry.candidate): entry for entry in entries}, len(work[0].prompts)
    arms = [space.plain, *(space.arm(entry.candidate) for entry in entries if entry.out is None)]
    runs: list[Run] = search(meter, arms, work, batch, deadline)
    if sum(run.arm == PLAIN for run in runs) < MIN_UNITS and all(run.error is None for run in runs):
        return None
    return advise(batch, named, runs)
