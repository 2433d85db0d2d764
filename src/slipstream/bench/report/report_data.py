"""What a report is made from: a folder of runs, their summaries, and predictions where they were made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.bench.arm_labels import label
from slipstream.bench.arms import parse_arm
from slipstream.bench.records import Header, Run, read_records
from slipstream.bench.saved_costs import read_saved
from slipstream.bench.simulated_arms import ArmSimulation, simulate_arms
from slipstream.bench.summary import ArmSummary, summarise
from slipstream.bench.sweep_grid import references, summarise_by_temperature
from slipstream.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class Data:
    """A folder of runs.

    references: what each arm's speed-up refers to. summaries: with predictions, if there are any. simulations: of the
    arms, where the benchmark was asked for them.
    """

    header: Header
    runs: list[Run]
    summaries: list[ArmSummary]
    references: dict[str, str]
    simulations: tuple[ArmSimulation, ...] = ()

    def label(self, name: str) -> str:
        """An arm or a series of arms in words; the temperature is said where the runs have several."""
        several = len({parse_arm(arm).temperature for arm in self.references}) > 1
        return label(name, temperature=several)

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
    saved = read_saved(folder)
    summaries = summarise_by_temperature(runs, default)
    simulations = simulate_arms(summaries, saved.costs) if saved is not None and saved.simulated else []
    return Data(
        header, runs, saved.beside(summaries) if saved else summaries, references(names, default), tuple(simulations)
    )


def against(data: Data, reference: str) -> Data:
    """The same runs with every speed-up referring to one arm."""
    names = list(data.references)
    if reference not in names:
        near = did_you_mean(reference, *names)
        raise UsageError(f"reference {reference!r} is not among the arms; allowed: {', '.join(names)}{near}")
    return replace(data, summaries=summarise(data.runs, reference), references=dict.fromkeys(names, reference))


def efficiency(one: ArmSummary) -> str:
    """Output tokens per forward of the target, where it is known."""
    return "-" if one.block_efficiency is None else f"{one.block_efficiency:.2f}"
