"""The settings worth measuring, and a race between them within a time limit.

All candidates run the same prompts in turn; after each round the slower half drops out (successive halving: Jamieson
and Talwalkar, AISTATS 2016). The last one then runs against plain decoding once more: it was not chosen for these runs,
so they show its speed without bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from math import ceil, log, log2
from pathlib import Path
from statistics import fmean
from time import perf_counter

from slipstream import drafters
from slipstream.bench.arms import PLAIN, Arm
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import Group, Measurement
from slipstream.bench.records import Run
from slipstream.bench.summary import summarize
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

LENGTHS = (2, 4, 8, 16, 32, 64)  # tried up to --longest; speeds of neighbors differ by a few percent
FEWEST_UNITS = 6  # units (all arms once on one group) after which a round may end early
MIN_UNITS = 2  # needed for an interval
NARROW = 0.03  # an interval within this share of its value is good enough
MARGIN = 1.3  # advised budget relative to the estimate

Clock = Callable[[], float]
ShowProgress = Callable[[str, str], None]


@dataclass(frozen=True)
class Candidate:
    """One way to speculate."""

    drafter: str
    length: int | None = None  # None: the drafter chooses
    draft: str | None = None  # name of the draft model, as given by the user

    @property
    def kind(self) -> str:
        """The drafter, with "auto" resolved."""
        if self.drafter != "auto":
            return self.drafter
        return drafters.preferred(draft_model=self.draft is not None, costs=True)

    @property
    def tokens(self) -> int:
        """Draft tokens asked for in a round."""
        return drafters.traits(self.kind).default_length if self.length is None else self.length

    @property
    def setting(self) -> str:
        """The form of a benchmark's arm, without the draft model."""
        return self.drafter if self.length is None else f"{self.drafter}@{self.length}"


def candidates(drafts: Sequence[str], longest: int) -> list[Candidate]:
    """Every drafter that other engines have too, at a few lengths up to `longest`, and those that choose lengths."""
    lengths = [*(n for n in LENGTHS if n < longest), longest]
    choices: list[Candidate] = []
    for name in drafters.names():
        traits = drafters.traits(name)
        if traits.in_other_engines:
            models = drafts if traits.needs_draft_model else [None]
            choices += [Candidate(name, length, model) for model in models for length in lengths]
    if not drafts:
        return [*choices, Candidate("auto")]
    return [*choices, *(Candidate(name, draft=draft) for draft in drafts for name in ("auto", "model"))]


class SearchSpace:
    """One target, any number of draft models, and a lineup that arms join when they are first requested.

    decoder: has the first of `drafts` as its draft model, or none.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, drafts: Sequence[str], params: SamplingParams, *, chat: bool = True
    ) -> None:
        if twice := [draft for draft in drafts if drafts.count(draft) > 1]:
            raise UsageError(f"draft {twice[0]!r} is given twice; allowed: each draft model once")
        self.drafts = list(drafts)
        self.plain = Arm(PLAIN, PLAIN)
        self.lineup = Lineup(decoder, [self.plain], params, chat=chat)
        self._decoders = {draft: decoder.with_draft(draft) for draft in self.drafts[1:]}

    def name(self, candidate: Candidate) -> str:
        """The arm's name, with its draft model if there are several."""
        shown = candidate.draft is not None and len(self.drafts) > 1
        return f"{candidate.setting} {candidate.draft}" if shown else candidate.setting

    def arm(self, candidate: Candidate) -> Arm:
        """The arm of a candidate, added to the lineup if it is new."""
        arm = Arm(self.name(candidate), candidate.drafter, candidate.length)
        if arm.name not in self.lineup.decoders:
            self.lineup.decoders[arm.name] = self.decoder(candidate)
            self.lineup.arms.append(arm)
        return arm

    def decoder(self, candidate: Candidate) -> SpeculativeDecoder:
        """The loaded models with a candidate's settings."""
        base = self._decoders.get(candidate.draft or "", self.lineup.decoder)
        return base.using(candidate.drafter, num_draft_tokens=candidate.length)

    def stops_early(self, candidate: Candidate) -> bool:
        """True if the candidate's draft model ends a draft once it is unsure."""
        on_cpu = self.lineup.decoder.target.backend.device.type == "cpu"
        return on_cpu and candidate.length is None and drafters.traits(candidate.kind).needs_draft_model


class Budget:
    """A time limit in seconds, starting now."""

    def __init__(self, seconds: float, clock: Clock = perf_counter) -> None:
        self.seconds, self.clock = seconds, clock
        self.begin = clock()

    @property
    def now(self) -> float:
        return self.clock() - self.begin


class Meter:
    """Makes measurements through one `Runner`, so that arms stay warm and reference outputs are known."""

    def __init__(self, lineup: Lineup, folder: Path, budget: Budget, show_progress: ShowProgress) -> None:
        self.budget = budget
        self.show_progress = show_progress  # called before every run with the stage and what is being done
        self._plan: list[Measurement] = []  # grows while the runner goes through it
        self._runs = Runner(lineup, self._plan, folder).run([])
        self._seen: dict[int, dict[str, list[float]]] = {}  # seconds of runs, by batch size and arm

    @property
    def now(self) -> float:
        return self.budget.now

    def unit(self, arms: Sequence[Arm], measured: tuple[int, Group], stage: str, deadline: float) -> list[Run] | None:
        """All arms in turn on one group of prompts; None if they did not, or would not, end by the deadline.

        measured: number of the repeat, and the group. deadline: in seconds of the budget. Runs of a unit that was cut
        short are saved, but not compared.
        """
        (repeat, group), runs = measured, []
        batch = len(group.prompts)
        for number, arm in enumerate(arms):
            if self.now + self.expected(arms[number:], batch) > deadline:
                return None
            self.show_progress(stage, f"{group.ids[0]} {arm.name}")
            begun = self.now
            self._plan.append(Measurement(arm, group, batch, repeat))
            runs.append(next(self._runs))
            self._seen.setdefault(batch, {}).setdefault(arm.name, []).append(self.now - begun)
        return runs

    def expected(self, arms: Sequence[Arm], batch: int) -> float:
        """Expected seconds of these arms, judging by their runs; an arm without runs counts as the slowest."""
        seconds_of = self._seen.get(batch) or {name: t for seen in self._seen.values() for name, t in seen.items()}
        longest = max((fmean(times) for times in seconds_of.values()), default=0.0)
        return sum(fmean(seconds_of[arm.name]) if arm.name in seconds_of else longest for arm in arms)

    def enough(self, more_seconds: float) -> int:
        """A budget, in round figures, that covers everything so far and this many more seconds."""
        return 10 * ceil(MARGIN * (self.now + more_seconds) / 10)


@dataclass
class Race:
    """The runs of a race between arms, in whole units."""

    runs: list[Run] = field(default_factory=list)
    winner: Arm | None = None  # None: all arms failed, or there was no time for a single unit
    confirmation: list[Run] = field(default_factory=list)  # of plain decoding and the winner, after it was chosen


def race(meter: Meter, arms: Sequence[Arm], groups: Sequence[Group], deadline: float) -> Race:
    """Halve the arms until one is left, then run it against plain decoding, the first arm, until the deadline.

    The rounds and the confirmation have equal shares of the time. An arm that fails or changes an output drops out at
    once. deadline: in seconds of the budget.
    """
    plain, *active = arms
    result = Race()
    order = ((repeat, group) for repeat in count(1) for group in groups)
    batch = len(groups[0].prompts)
    rounds = total = num_rounds(len(active))
    while active:
        stage = f"batch size {batch}, {f'round {total - rounds + 1} of {total}' if rounds else 'confirmation'}"
        until = meter.now + (deadline - meter.now) / (rounds + 1)
        for units in count():
            is_over = units >= max(len(groups), FEWEST_UNITS)
            if is_over and (rounds or is_settled(result.confirmation)):
                break
            unit_end = until if result.runs else deadline  # all candidates run once at least
            runs = meter.unit([plain, *active], next(order), stage, unit_end)
            if runs is None:
                break
            (result.runs if rounds else result.confirmation).extend(runs)
            wrong = {run.arm for run in runs if run.error is not None or "different" in run.verdicts}
            active = [arm for arm in active if arm.name not in wrong]
            if not active or plain.name in wrong:
                return result
        if not result.runs or not rounds:
            break
        rounds -= 1
        active = sorted(active, key=lambda arm: seconds_per_token(result.runs, arm.name))
        active = active[: 1 if not rounds else ceil(len(active) / 2)]
        result.winner = None if rounds else active[0]
    return result


def num_rounds(arms: int) -> int:
    """Number of halvings until one of these arms is left."""
    return ceil(log2(arms))


def in_turn(groups: Sequence[Group]) -> list[Group]:
    """The groups, ordered so that every family comes early."""
    families: dict[str, list[Group]] = {}
    for group in groups:
        families.setdefault(group.family, []).append(group)
    return [group for line in zip_longest(*families.values()) for group in line if group is not None]


def seconds_per_token(runs: Sequence[Run], arm: str) -> float:
    """The logarithm of an arm's seconds per output token, averaged over its runs."""
    return fmean(log(run.seconds / run.num_output_tokens) for run in runs if run.arm == arm)


def is_settled(runs: Sequence[Run]) -> bool:
    """True if the interval of the arm that runs against plain decoding is narrow."""
    for summary in summarize(runs, PLAIN):
        ratio = summary.speed_up
        if summary.arm != PLAIN and ratio is not None and ratio.low is not None and ratio.high is not None:
            return ratio.high - ratio.low <= 2 * NARROW * ratio.value
    return False
