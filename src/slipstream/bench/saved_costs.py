"""What is measured after the runs and saved beside them: the costs of a round, and predictions made from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.bench.prediction.costs import Costs
from slipstream.bench.summary import ArmSummary
from slipstream.errors import UsageError

log = logging.getLogger("slipstream")

FILE = "predictions.json"
VERSION = 2  # of what costs hold; files of another are measured again
_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "version": int,
    "seconds": (int, float),
    "simulated": bool,
    "predictions": dict,
    "costs": dict,
}


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
