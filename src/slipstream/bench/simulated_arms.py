"""A benchmark's arms simulated: from the costs of a round and the acceptance each arm was observed to have."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.prediction.accepted_lengths import Acceptance
from slipstream.bench.prediction.costs import Costs
from slipstream.bench.prediction.level_counts import LevelCounts
from slipstream.bench.prediction.simulation import Simulation, simulate
from slipstream.bench.summary import ArmSummary, total_stats
from slipstream.errors import UsageError

log = logging.getLogger("slipstream")


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
