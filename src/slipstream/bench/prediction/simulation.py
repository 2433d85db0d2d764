"""Speed-ups over draft lengths and batches, by formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.bench.prediction.accepted_lengths import Acceptance
from slipstream.bench.prediction.costs import Costs
from slipstream.bench.prediction.formula import (
    Pad,
    best_length,
    break_even_acceptance,
    expected_tokens,
    longest_known,
    pays_until,
    predicted_speed_up,
)
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Simulation:
    """Predicted speed-ups. speed_ups[batch][length]; best[batch]: the best length from 0 on, not only of those shown.

    Lengths of trees are their levels. tokens[length]: expected tokens per round; nodes[length]: draft tokens of a row;
    break_even[batch][length]: the acceptance per token from which chains of that length pay, None if none is enough;
    stops: the first batch at which plain decoding is best, None if there is none. chains[batch]: of trees, the best
    speed-up of their main chains alone; empty for chains.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    speed_ups: dict[int, dict[int, float]]
    best: dict[int, int]
    tokens: dict[int, float]
    break_even: dict[int, dict[int, float | None]]
    stops: int | None
    nodes: dict[int, float]
    chains: dict[int, float]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**vars(self), "lengths": list(self.lengths), "batches": list(self.batches)}

    def marked(self, batch: int, length: int) -> str:
        """One speed-up as text: `*` behind the best of its batch, `-` behind what is slower than plain decoding."""
        speed_up = self.speed_ups[batch][length]
        return f"{speed_up:.2f}x{'*' if length == self.best[batch] else '-' if speed_up < 1 else ''}"


def conclusions(costs: Costs, simulation: Simulation) -> list[str]:
    """What a simulation comes to, in sentences: the best length of each batch, where speculation stops paying."""
    lines, trees = [], bool(simulation.chains)
    for batch, best in simulation.best.items():
        low = None if trees else simulation.break_even[batch].get(best)
        what = f"best {'tree depth' if trees else 'draft length'} {best}" if best else "plain decoding is best"
        needed = "" if low is None else f", which pays from an acceptance of {low:.0%} per token"
        alone = f"; without branches {simulation.chains[batch]:.2f}x at the best length" if trees else ""
        lines.append(f"batch {batch}: {what}{needed}{alone}")
    if simulation.stops is None:
        lines.append(f"speculation pays in batches up to {costs.batches[-1]} rows")
    else:
        lines.append(f"speculation stops paying at {simulation.stops} rows")
    return [*lines, f"costs: {costs.machine}; drafter {costs.drafter}; prompt processing is not counted"]


def simulate(
    costs: Costs,
    acceptance: Acceptance | float,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    pad: Pad | None = None,
) -> Simulation:
    """Predicted speed-up for every draft length and batch; by default all that the costs and the acceptance cover."""
    known = acceptance if isinstance(acceptance, Acceptance) else Acceptance.constant(acceptance)
    if known.branches and costs.trees is None:
        raise UsageError(
            f"acceptance of trees beside costs of {costs.drafter or 'a drafter'} without them; allowed: costs measured "
            "with --sibling-alpha, of a target that takes trees"
        )
    if lengths is None:
        lengths = range(1, longest_known(costs, acceptance, pad) + 1)
    batches = costs.batches if batches is None else batches
    for name, values in (("lengths", lengths), ("batches", batches)):
        if not values:
            raise UsageError(
                f"{name}={list(values)!r}; allowed: at least one, within what the costs and acceptance cover"
            )
    return Simulation(
        lengths=tuple(lengths),
        batches=tuple(batches),
        speed_ups={b: {n: predicted_speed_up(costs, acceptance, n, b, pad) for n in lengths} for b in batches},
        best={b: best_length(costs, acceptance, None, b, pad) for b in batches},
        tokens={n: expected_tokens(acceptance, n) for n in lengths},
        break_even={b: {n: break_even_acceptance(costs, n, b, pad) if n else None for n in lengths} for b in batches},
        stops=pays_until(costs, acceptance, None, pad),
        nodes={n: known.num_nodes(n) for n in lengths},
        chains=_best_chains(costs, known, batches, pad),
    )


def _best_chains(costs: Costs, known: Acceptance, batches: Sequence[int], pad: Pad | None) -> dict[int, float]:
    if not known.branches:
        return {}
    chain = known.main_chain
    best = {batch: best_length(costs, chain, None, batch, pad) for batch in batches}
    return {batch: predicted_speed_up(costs, chain, length, batch, pad) for batch, length in best.items()}
