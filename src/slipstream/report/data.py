"""What a report is made from: a folder of runs, their summaries, and predictions where they were made."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.bench.records import Header, Run, read_records
from slipstream.bench.summary import ArmSummary
from slipstream.sweep import references, summarise_by_temperature
from slipstream.types import UsageError

PREDICTIONS = "predictions.json"


@dataclass(frozen=True)
class Data:
    """A folder of runs.

    references: what each arm's speed-up refers to. summaries: with predictions, if there are any.
    """

    header: Header
    runs: list[Run]
    summaries: list[ArmSummary]
    references: dict[str, str]

    def runs_of(self, arm: str, batch: int) -> list[Run]:
        """The finished runs of an arm at a batch size that did not fail."""
        return [run for run in self.runs if run.arm == arm and run.batch == batch and run.error is None]


def load(folder: Path) -> Data:
    """Read a folder that `slipstream bench` or `slipstream sweep` has written."""
    header, runs = read_records(folder)
    names, default = header.settings.get("arms"), header.settings.get("reference")
    if not isinstance(names, list) or not isinstance(default, str):
        raise UsageError(
            f"the header in {str(folder)!r} names no arms or no reference; allowed: a folder of a benchmark"
        )
    if not runs:
        raise UsageError(f"folder {str(folder)!r} holds no runs yet; allowed: at least one finished run")
    predictions = read_predictions(folder)
    summaries = [
        replace(one, prediction=predictions.get(f"{one.arm} batch {one.batch}"))
        for one in summarise_by_temperature(runs, default)
    ]
    return Data(header, runs, summaries, references(names, default))


def write_predictions(folder: Path, summaries: Sequence[ArmSummary]) -> None:
    """Keep the predictions beside the runs, since the costs they are made from are measured only once."""
    kept = {f"{one.arm} batch {one.batch}": one.prediction for one in summaries if one.prediction is not None}
    try:
        (folder / PREDICTIONS).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{str(folder / PREDICTIONS)!r} cannot be written: {error.strerror}") from error


def read_predictions(folder: Path) -> dict[str, dict[str, float]]:
    """Predictions by "ARM batch SIZE"; empty where none were made."""
    path = folder / PREDICTIONS
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error
    wanted = {"predicted", "observed"}
    if not isinstance(found, dict) or not all(isinstance(p, dict) and wanted <= p.keys() for p in found.values()):
        raise UsageError(f"{str(path)!r} holds no predictions; allowed: what a benchmark wrote, or no such file")
    return found
