"""Predicted speed-up: expected tokens of a round over its expected time, relative to plain decoding.

    costs = measure_costs(decoder, batch_sizes=(1, 4))      # or paper_costs(...), or Costs.read(path)
    predicted_speed_up(costs, 0.8, num_draft_tokens=4)      # 0.8: each draft token is accepted with this probability
    best_length(costs, Acceptance.from_stats(stats), batch=4)

Names other modules may rely on: `Costs`, `measure_costs`, `paper_costs`, `Machine`, `Acceptance`,
`expected_tokens`, `predicted_speed_up`, `best_length`, `pays_until`, `break_even_acceptance`, `predict_from_stats`.
docs/prediction.md has the formulas and what they leave out. This module runs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import ceil, floor
from typing import Any

import numpy as np

from slipstream.bench.speed_model.accepted_lengths import Acceptance, stat
from slipstream.bench.speed_model.probe import measure_costs
from slipstream.bench.speed_model.round_costs import Costs, Machine, paper_costs
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError

LEAST = 1e-12  # a probability that is left out
BISECTIONS = 60


Pad = Callable[[int], int]  # tokens per row -> width of the forward that takes them


def expected_milliseconds(costs: Costs, known: Acceptance, levels: int, batch: float, pad: Pad | None) -> float:
    """Of a round in which each of `batch` rows asks for drafts of so many tokens, of trees so many levels.

    Rows propose independently. batch may be a mean, between the whole numbers beside it. pad: another padding of
    widths than the one the costs know of; rows are padded then.
    """
    if levels == 0:
        return costs.plain(batch, costs.pad(1, batch) if pad is None else pad(1))
    low = floor(batch)
    whole = [(low, 1.0 - (batch - low)), (low + 1, batch - low)]
    return sum(share * _milliseconds(costs, known, levels, rows, pad) for rows, share in whole if share > 0)


def taken_by(costs: Costs, known: Acceptance, levels: int, batch: int) -> Acceptance:
    """The drafts that are verified: main chains, where a whole tree of each row fits no allowed shape."""
    nodes = ceil(round(batch * known.num_nodes(levels), 9))
    return known if not known.branches or costs.takes_tree(batch, nodes) else known.main_chain


def _milliseconds(costs: Costs, known: Acceptance, levels: int, batch: int, pad: Pad | None) -> float:
    known, total = taken_by(costs, known, levels, batch), 0.0
    sizes = tuple(known.nodes[:levels])
    for longest, first, shares in _drafts(known.proposed[:levels], sizes, batch):
        drafted = range(first, first + len(shares))
        if pad is None:
            verifying = verifying_milliseconds(costs, known, batch, longest, drafted)
        else:
            verifying = np.full(len(shares), costs.plain(batch, pad(longest + 1)))
        total += float(shares @ verifying) + float(shares.sum()) * costs.drafting(batch, longest)
    return total + costs.move * batch * sum(known.branched[:levels])


def verifying_milliseconds(costs: Costs, known: Acceptance, batch: int, longest: int, drafted: Sequence[int]) -> Any:
    """[len(drafted)] milliseconds of rounds but for drafting, by the draft tokens of all rows."""
    if known.branches and longest:
        return costs.verifying_trees(batch, drafted)
    return costs.verifying(batch, longest, drafted)


@lru_cache(maxsize=4096)
def _drafts(proposed: tuple[float, ...], nodes: tuple[float, ...], batch: int) -> list[tuple[int, int, Any]]:
    """What `batch` rows draft: (longest, first, shares), shares[i] the probability of `longest` levels at the most and
    first + i draft tokens in all.
    """
    before, found = np.zeros(1), []
    reaches = (1.0, *proposed, 0.0)
    row = np.zeros(1)
    for longest in range(len(proposed) + 1):
        chance = reaches[longest] - reaches[longest + 1]
        if chance <= 0:
            continue
        row = _added(row, _of_size(sum(nodes[:longest]) if nodes else longest, chance))
        all_rows = _power(row, batch)
        shares = all_rows - _added(np.zeros(len(all_rows)), before)
        known = np.flatnonzero(shares > LEAST)
        if len(known):
            found.append((longest, int(known[0]), shares[known[0] : known[-1] + 1]))
        before = all_rows
    return found


def _of_size(nodes: float, chance: float) -> Any:
    """A row of `nodes` draft tokens on average, which are a whole number in each round."""
    nodes = round(nodes, 9)
    low = floor(nodes)
    found = np.zeros(low + 2)
    found[low : low + 2] = chance * (1 - (nodes - low)), chance * (nodes - low)
    return found


def _added(one: Any, other: Any) -> Any:
    size = max(len(one), len(other))
    return np.pad(one, (0, size - len(one))) + np.pad(other, (0, size - len(other)))


def _power(row: Any, batch: int) -> Any:
    """The distribution of the sum over `batch` rows, by squaring."""
    found = np.ones(1)
    while batch:
        found = np.convolve(found, row) if batch & 1 else found
        batch >>= 1
        row = np.convolve(row, row) if batch else row
    return found


__all__ = [
    "Acceptance",
    "Costs",
    "Machine",
    "Pad",
    "Prediction",
    "best_length",
    "break_even_acceptance",
    "expected_tokens",
    "measure_costs",
    "paper_costs",
    "pays_until",
    "predict_from_stats",
    "predicted_speed_up",
    "round_milliseconds",
]


def expected_tokens(acceptance: Acceptance | float, num_draft_tokens: int) -> float:
    """Tokens a round commits for each row, the target's own included: 1 + sum_i P(more than i accepted).

    For one alpha this is (1 - alpha^(n + 1)) / (1 - alpha) (Leviathan et al. 2023, equation 1).
    """
    return 1.0 + sum(_known(acceptance, num_draft_tokens).accepted[:num_draft_tokens])


def round_milliseconds(
    costs: Costs, acceptance: Acceptance | float, num_draft_tokens: int, batch: float = 1, pad: Pad | None = None
) -> float:
    """Expected milliseconds of a round: its rows share one forward, which waits for the longest draft.

    Rows propose independently: P(longest of B > i) = 1 - (1 - P(one > i))^B. Where rows are not padded, and for trees,
    the forward costs what the tokens of all rows cost. batch may be a mean. pad: another padding of widths than the one
    the costs know of (`Costs.pad`).
    """
    return expected_milliseconds(costs, _known(acceptance, num_draft_tokens), num_draft_tokens, batch, pad)


def predicted_speed_up(
    costs: Costs, acceptance: Acceptance | float, num_draft_tokens: int, batch: float = 1, pad: Pad | None = None
) -> float:
    """Tokens per second relative to plain decoding of the same batch, prompt processing not counted.

    acceptance: an `Acceptance`, or the one probability of an i.i.d. draft. Of trees num_draft_tokens counts levels.
    """
    known = _known(acceptance, num_draft_tokens)
    acceptance = taken_by(costs, known, num_draft_tokens, ceil(batch))
    plain = round_milliseconds(costs, 0.0, 0, batch, pad)
    taken = round_milliseconds(costs, acceptance, num_draft_tokens, batch, pad)
    return expected_tokens(acceptance, num_draft_tokens) * plain / taken


def best_length(
    costs: Costs,
    acceptance: Acceptance | float,
    longest: int | None = None,
    batch: float = 1,
    pad: Pad | None = None,
) -> int:
    """The draft length from 0 to `longest` with the highest predicted speed-up, the shortest of equals.

    longest: by default as far as both the costs and the acceptance are known.
    """
    if longest is None:
        longest = longest_known(costs, acceptance, pad)
    return max(range(longest + 1), key=lambda n: (predicted_speed_up(costs, acceptance, n, batch, pad), -n))


def pays_until(
    costs: Costs, acceptance: Acceptance | float, batches: Sequence[int] | None = None, pad: Pad | None = None
) -> int | None:
    """Where speculation stops paying: the first of `batches` whose best draft length is 0; None if it always pays.

    batches: by default every whole number between the smallest and the largest batch of the costs.
    """
    if batches is None:
        batches = range(costs.batches[0], costs.batches[-1] + 1)
    return next((batch for batch in batches if best_length(costs, acceptance, None, batch, pad) == 0), None)


def break_even_acceptance(
    costs: Costs, num_draft_tokens: int, batch: float = 1, pad: Pad | None = None
) -> float | None:
    """The acceptance per token from which drafts of this length pay; None if not even 1 is enough.

    Assumes that every row proposes all its tokens and accepts them independently.
    """
    _known(0.0, num_draft_tokens)
    if num_draft_tokens == 0:
        raise UsageError(
            "num_draft_tokens=0; allowed: a whole number >= 1, since plain decoding is what it is compared with"
        )
    plain, taken = (round_milliseconds(costs, 1.0, n, batch, pad) for n in (0, num_draft_tokens))
    if expected_tokens(1.0, num_draft_tokens) * plain < taken:
        return None
    low, high = 0.0, 1.0
    if plain >= taken:
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        pays = expected_tokens(middle, num_draft_tokens) * plain >= taken
        low, high = (low, middle) if pays else (middle, high)
    return high


def longest_known(costs: Costs, acceptance: Acceptance | float, pad: Pad | None = None) -> int:
    """The longest draft for which both the costs and the acceptance are known."""
    pad, limit = pad or costs.pad, acceptance.longest if isinstance(acceptance, Acceptance) else MAX_DRAFT_TOKENS
    known = [n for n in range(limit + 1) if pad(n + 1) <= costs.widest]
    if isinstance(acceptance, Acceptance) and acceptance.branches and costs.trees is not None:
        known = [n for n in known if costs.knows_trees(acceptance.num_nodes(n))]
    return max(known, default=0)


@dataclass(frozen=True)
class Prediction:
    """Predicted and observed, prompt processing excluded.

    observed: against the plain arm where that was given, else against a plain round of the costs. Milliseconds are
    those of a round (a step of the whole batch); tokens are per row and round.
    """

    predicted: float
    observed: float
    predicted_ms: float
    observed_ms: float
    predicted_tokens: float
    observed_tokens: float

    @property
    def deviation(self) -> float:
        """predicted / observed - 1."""
        return self.predicted / self.observed - 1

    def to_dict(self) -> dict[str, float]:
        """For JSON."""
        return asdict(self) | {"deviation": self.deviation}


def predict_from_stats(
    stats: Mapping[str, Any],
    costs: Costs,
    *,
    plain: Mapping[str, Any] | None = None,
    batch: float | None = None,
    pad: Pad | None = None,
) -> Prediction:
    """What the model predicts for a run, from how much it accepted, and what the run took.

    stats, plain: `Stats.to_dict()` of the speculative and of the plain arm, each folded over all rows of the batch.
    batch: rows decoded together; by default the mean rows per step, which is right only for statistics of all rows.
    """
    acceptance = Acceptance.from_stats(stats)
    rows = batch if batch is not None else stat(stats, "num_rounds") / stat(stats, "num_steps")
    length = acceptance.longest
    observed_ms = _step_milliseconds(stats)
    observed_tokens = stat(stats, "num_output_tokens") / stat(stats, "num_rounds")
    reference = round_milliseconds(costs, 0.0, 0, rows, pad)
    if plain is not None:
        reference = _step_milliseconds(plain) * stat(plain, "num_rounds") / stat(plain, "num_output_tokens")
    return Prediction(
        predicted=predicted_speed_up(costs, acceptance, length, rows, pad),
        observed=observed_tokens * reference / observed_ms,
        predicted_ms=round_milliseconds(costs, acceptance, length, rows, pad),
        observed_ms=observed_ms,
        predicted_tokens=expected_tokens(acceptance, length),
        observed_tokens=observed_tokens,
    )


def _step_milliseconds(stats: Mapping[str, Any]) -> float:
    seconds, steps = stat(stats, "total_seconds") - stat(stats, "prefill_seconds"), stat(stats, "num_steps")
    if not steps or seconds <= 0:
        raise UsageError(f"stats: {steps} steps in {seconds:g} s without prefill; allowed: more than 0 of both")
    return float(1e3 * seconds / steps)


def _known(acceptance: Acceptance | float, num_draft_tokens: int) -> Acceptance:
    if isinstance(num_draft_tokens, bool) or not isinstance(num_draft_tokens, int) or num_draft_tokens < 0:
        raise UsageError(f"num_draft_tokens={num_draft_tokens!r}; allowed: a whole number >= 0")
    known = acceptance if isinstance(acceptance, Acceptance) else Acceptance.constant(acceptance)
    if num_draft_tokens > known.longest:
        raise UsageError(
            f"num_draft_tokens={num_draft_tokens}; allowed: at most {known.longest}, as far as it is known"
        )
    return known


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
