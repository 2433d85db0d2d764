"""The arms of a benchmark predicted and simulated: round costs are measured after the runs and saved beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any

from slipstream.bench.arms import PLAIN
from slipstream.bench.lineup import Lineup
from slipstream.bench.speed_model.accepted_lengths import Acceptance, LevelCounts
from slipstream.bench.speed_model.formula import Simulation, predict_from_stats, simulate
from slipstream.bench.speed_model.probe import measure_costs, tree_siblings
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.bench.summary import ArmSummary, total_stats
from slipstream.errors import UsageError

FILE = "predictions.json"
VERSION = 2  # of what costs hold; files of another are measured again
_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "version": int,
    "seconds": (int, float),
    "simulated": bool,
    "predictions": dict,
    "costs": dict,
}


log = logging.getLogger("slipstream")


def measured_costs(
    summaries: Sequence[ArmSummary], lineup: Lineup, seconds: float, batches: Sequence[int] = ()
) -> dict[str, Costs]:
    """The costs of every arm that drafted, measured once for each drafter, kind of weights and width of trees.

    seconds: for each of these, or as long as three turns take. batches: measured besides those of the runs.
    """
    drafted = [one for one in summaries if one.stats is not None and one.stats.num_draft_tokens]
    kinds: dict[tuple[str, bool, int], list[ArmSummary]] = {}
    for one in drafted:
        kinds.setdefault(_kind(one, lineup), []).append(one)
    found: dict[str, Costs] = {}
    for (_, _, siblings), own in kinds.items():
        longest = max(_levels(one, siblings) for one in own)
        sizes = sorted({one.batch for one in own} | set(batches))
        try:
            costs = measure_costs(lineup.decoders[own[0].arm], sizes, range(1, longest + 2), seconds=seconds)
        except UsageError as error:
            log.warning("no prediction for %s: %s", own[0].arm, error)
            continue
        found |= dict.fromkeys((one.arm for one in own), costs)
    return {one.arm: found[one.arm] for one in drafted if one.arm in found}  # in the order of the arms


def with_predictions(summaries: Sequence[ArmSummary], lineup: Lineup, costs: Mapping[str, Costs]) -> list[ArmSummary]:
    """The summaries with predictions for arms whose costs are known, prompt processing left out."""
    return [replace(one, prediction=_predicted(one, summaries, lineup, costs.get(one.arm))) for one in summaries]


def _levels(one: ArmSummary, siblings: int) -> int:
    """The levels of the arm's drafts, or of combs that have as many tokens if these are more."""
    known = Acceptance.from_stats(one.counts or {})
    return max(known.longest, ceil(round(known.num_nodes(known.longest) / (1 + siblings), 9)))


def _kind(one: ArmSummary, lineup: Lineup) -> tuple[str, bool, int]:
    decoder = lineup.decoders[one.arm]
    return decoder.drafter_name, decoder.target.packed, tree_siblings(decoder)


def _predicted(
    one: ArmSummary, summaries: Sequence[ArmSummary], lineup: Lineup, costs: Costs | None
) -> dict[str, float] | None:
    counts = one.counts
    if costs is None or counts is None or not counts["num_draft_tokens"]:
        return None
    plain = next((s.stats.to_dict() for s in summaries if s.stats is not None and _is_plain(s, one, lineup)), None)
    try:
        return predict_from_stats(counts, costs, plain=plain).to_dict()
    except UsageError as error:
        log.warning("no prediction for %s: %s", one.arm, error)
        return None


def _is_plain(candidate: ArmSummary, one: ArmSummary, lineup: Lineup) -> bool:
    """Plain decoding at the same batch size and temperature on the same weights."""
    mine, theirs = lineup.decoders.get(candidate.arm), lineup.decoders[one.arm]
    if mine is None or mine.drafter_name != PLAIN or mine.target is not theirs.target:
        return False
    temperatures = [lineup.temperature(name) for name in (candidate.arm, one.arm)]
    return candidate.batch == one.batch and temperatures[0] == temperatures[1]


@dataclass(frozen=True)
class SavedCosts:
    """seconds: measured per drafter; simulated: whether the costs cover a simulation; costs: by arm.

    predictions: by "ARM batch SIZE", see `Prediction.to_dict`.
    """

    seconds: float
    simulated: bool = False
    predictions: dict[str, dict[str, float]] = field(default_factory=dict)
    costs: dict[str, Costs] = field(default_factory=dict)

    @classmethod
    def of(
        cls, summaries: Sequence[ArmSummary], costs: Mapping[str, Costs], seconds: float, simulated: bool
    ) -> SavedCosts:
        """What there is to save of summaries with predictions."""
        known = {_name(one): one.prediction for one in summaries if one.prediction is not None}
        return cls(seconds, simulated, known, dict(costs))

    def beside(self, summaries: Sequence[ArmSummary]) -> list[ArmSummary]:
        """The summaries with their predictions."""
        return [replace(one, prediction=self.predictions.get(_name(one))) for one in summaries]

    def answers(self, seconds: float, simulated: bool) -> bool:
        """Whether nothing need be measured again for these settings."""
        return self.seconds == seconds and (self.simulated or not simulated)

    def save(self, folder: Path) -> None:
        """Write into a folder of runs."""
        costs = {arm: known.to_dict() for arm, known in self.costs.items()}
        values = {"version": VERSION} | vars(self) | {"costs": costs}
        try:
            (folder / FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{str(folder / FILE)!r} cannot be written: {error.strerror}") from error


def read_saved(folder: Path) -> SavedCosts | None:
    """What was saved in a folder of runs; None where nothing was measured, or by a version that measured otherwise."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error
    if isinstance(found, dict) and {*found, "version"} == _FIELDS.keys() and found.get("version") != VERSION:
        log.warning("%s is of another version of Slipstream and left out", path)
        return None
    if not _is_saved(found):
        raise UsageError(f"{str(path)!r} holds no predictions; allowed: what a benchmark wrote, or no such file")
    costs = {arm: Costs.from_dict(values) for arm, values in found["costs"].items()}
    return SavedCosts(found["seconds"], found["simulated"], found["predictions"], costs)


def _is_saved(found: Any) -> bool:
    if not isinstance(found, dict) or found.keys() != _FIELDS.keys():
        return False
    if not all(isinstance(found[name], kind) for name, kind in _FIELDS.items()):
        return False
    return all(isinstance(p, dict) and {"predicted", "observed"} <= p.keys() for p in found["predictions"].values())


def _name(one: ArmSummary) -> str:
    return f"{one.arm} batch {one.batch}"


@dataclass(frozen=True)
class ArmSimulation:
    """The predicted speed-ups of one arm over draft length and batch, and what they follow from."""

    arm: str
    costs: Costs
    acceptance: Acceptance
    simulation: Simulation

    def to_dict(self) -> dict[str, Any]:
        """For JSON, as `slipstream simulate` writes it."""
        inputs = {"costs": self.costs.to_dict(), "acceptance": vars(self.acceptance)}
        return inputs | {"simulation": self.simulation.to_dict()}


def simulate_arms(summaries: Sequence[ArmSummary], costs: Mapping[str, Costs]) -> list[ArmSimulation]:
    """One per arm whose costs are known, its acceptance taken over all batch sizes.

    Draft lengths go as far as the arm has drafted.
    """
    made = []
    for arm, known in costs.items():
        own = [one for one in summaries if one.arm == arm and one.stats is not None]
        levels = LevelCounts.total([one.levels for one in own if one.levels is not None])
        counted = total_stats([one.stats.to_dict() for one in own if one.stats is not None]).to_dict()
        try:
            acceptance = Acceptance.from_stats(counted | levels.to_dict())
        except UsageError as error:
            log.warning("no simulation for %s: %s", arm, error)
            continue
        made.append(ArmSimulation(arm, known, acceptance, simulate(known, acceptance)))
    return made


def simulated_batches(max_batch_size: int) -> list[int]:
    """The batches at which costs are measured for a simulation: powers of 4, and the largest allowed."""
    batches = [1]
    while batches[-1] * 4 < max_batch_size:
        batches.append(batches[-1] * 4)
    return sorted({*batches, max_batch_size})
