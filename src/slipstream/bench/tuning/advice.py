"""From the runs of one batch size to advice: what to use, what to expect of it, and why the others lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from slipstream import drafters
from slipstream.bench.arms import PLAIN
from slipstream.bench.bootstrap import Estimate
from slipstream.bench.records import Run
from slipstream.bench.summary import ArmSummary, summarise
from slipstream.bench.tuning.candidates import Candidate
from slipstream.bench.tuning.screen import Entry
from slipstream.bench.tuning.selection_bias import log_speed_ups, optimism, without
from slipstream.errors import SlipstreamError

LEAST = 1.02  # a smaller gain is not worth the trouble
DEAR = 0.1  # the share of its time from which drafting may be what an arm lost by


@dataclass(frozen=True)
class Standing:
    """How a candidate did. measured: against plain decoding, None if it was not run to the end or not at all.

    units: how often it ran on a group of prompts; predicted: prompts left out; lost: why it is not the advice;
    failed: it broke down, or its text is not plain decoding's.
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
    """What to do at a batch size. best: None where the answer is not to speculate.

    expected: the speed-up of `best` with the gain from being chosen taken off (docs/tune.md). others: best first.
    """

    batch: int
    best: Standing | None
    expected: Estimate | None
    optimism: float
    others: tuple[Standing, ...]
    units: int
    plain: Estimate

    @property
    def sentence(self) -> str:
        """The advice in words."""
        if self.best is None or self.expected is None:
            text = f"batch {self.batch}: do not speculate (plain decoding, {self.plain.value:.1f} tok/s)"
            first = next((one for one in self.others if one.measured is not None and not one.failed), None)
            if first is None or first.measured is None or first.measured.value < LEAST:
                return text
            return f"{text}; {first.name} at {first.measured.value:.2f}x may be chance: more prompts or time would tell"
        low, high = self.expected.low, self.expected.high
        interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        draft = f" with draft model {self.best.candidate.draft}" if needs_draft(self.best.candidate) else ""
        setting = self.best.candidate.setting
        return f"batch {self.batch}: {setting}{draft}, {self.expected.value:.2f}x plain decoding{interval}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"sentence": self.sentence, "speculate": self.best is not None}


def needs_draft(candidate: Candidate) -> bool:
    """Whether the candidate uses a draft model."""
    return drafters.traits(candidate.kind).needs_draft_model


def advise(batch: int, entries: Mapping[str, Entry], runs: Sequence[Run]) -> Advice:
    """entries: by arm name, the simplest first, which wins among equals. runs: whole units of this batch size."""
    summaries = {one.arm: one for one in summarise(runs, PLAIN)}
    plain = summaries.get(PLAIN)
    if plain is None or plain.speed is None:
        raise SlipstreamError(
            f"plain decoding failed, so nothing can be compared: {plain.error if plain else 'no run'}"
        )
    standings = [_standing(name, entry, summaries.get(name), runs) for name, entry in entries.items()]
    units = sum(run.arm == PLAIN for run in runs)
    best, expected, flattery = _choose(standings, runs, units)
    rival = {one.arm: one.speed.speed_up for one in summarise(runs, PLAIN if best is None else best.name) if one.speed}
    others = [replace(one, lost=one.lost or _lost(one, best, rival[one.name])) for one in standings if one is not best]
    others.sort(key=lambda one: -(one.measured.value if one.measured else 0.0))
    return Advice(batch, best, expected, flattery, tuple(others), units, plain.speed.tokens_per_second)


def _standing(name: str, entry: Entry, one: ArmSummary | None, runs: Sequence[Run]) -> Standing:
    standing = Standing(name, entry.candidate, predicted=entry.predicted, lost=entry.out or "", failed=entry.failed)
    if one is None:
        return replace(standing, lost=standing.lost or "not measured")
    lost = f"failed: {one.error}" if one.failed else ""
    if one.verdicts.get("different"):
        wrong, texts = one.verdicts["different"], sum(one.verdicts.values())
        lost = f"{wrong} of {texts} texts differ from plain decoding and are no ties"
    stats, units = one.stats, sum(run.arm == name for run in runs)
    return replace(
        standing,
        measured=None if one.speed is None else one.speed.speed_up,
        texts=one.verdicts,
        acceptance_rate=None if stats is None else stats.acceptance_rate,
        acceptance_by_position=tuple(one.acceptance_by_position),
        tokens_per_round=None if stats is None else stats.block_efficiency,
        draft_share=None if one.time_split is None else one.time_split["draft"],
        units=units,
        lost=lost,
        failed=bool(lost),
    )


def _choose(
    standings: Sequence[Standing], runs: Sequence[Run], units: int
) -> tuple[Standing | None, Estimate | None, float]:
    """The best arm that certainly pays; of equals the first. Only arms that ran all units take part."""
    able = [one for one in standings if not one.lost and one.measured is not None and one.units == units]
    if not able:
        return None, None, 0.0
    flattery = optimism(log_speed_ups(runs, [one.name for one in able], PLAIN))
    for one in sorted(able, key=lambda one: -one.measured.value if one.measured else 0.0):
        assert one.measured is not None
        expected = without(one.measured, flattery)
        if expected.low is not None and expected.low >= 1 and expected.value >= LEAST:
            return one, expected, flattery
    return None, None, flattery


def _lost(one: Standing, best: Standing | None, ratio: Estimate | None) -> str:
    """Why a candidate is not the advice. ratio: its speed relative to the best arm's, or to plain decoding's."""
    if one.measured is None or ratio is None or ratio.high is None or ratio.high >= 1:
        gains = best is None and one.measured is not None and one.measured.low is not None and one.measured.low > 1
        return f"gains less than {LEAST - 1:.0%}" if gains else "no difference beyond the noise"
    to_beat = 1.0 if best is None or best.measured is None else best.measured.value
    share = one.draft_share or 0.0
    if DEAR < share < 1 and one.measured.value / (1 - share) >= to_beat:
        return f"draft steps too dear ({share:.0%} of the time)"
    return "drafts too rarely accepted"
