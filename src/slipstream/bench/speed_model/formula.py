"""Predicted speed-up: expected tokens of a round over its expected time, relative to plain decoding.

    costs = measure_costs(decoder, batch_sizes=(1, 4))      # of `probe`; or paper_costs(...), or Costs.read(path)
    predicted_speed_up(costs, 0.8, num_draft_tokens=4)      # 0.8: each draft token is accepted with this probability
    best_length(costs, Acceptance.from_stats(stats), batch=4)

docs/speed_model.md has the formulas and what they leave out. This module runs no model. Rows propose and accept
independently of each other, and drafts do not branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import floor
from typing import Any

import numpy as np

from slipstream.bench.speed_model.accepted_lengths import Acceptance, stat
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.checks import is_whole
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError

NEGLIGIBLE = 1e-12  # smaller probabilities are left out
BISECTIONS = 60


def expected_tokens(acceptance: Acceptance | float, num_draft_tokens: int) -> float:
    """Tokens a round commits for each row, the target's own included: 1 + sum_i P(more than i accepted).

    For one alpha this is (1 - alpha^(n + 1)) / (1 - alpha) (Leviathan et al. 2023, equation 1).
    """
    return 1.0 + sum(_checked(acceptance, num_draft_tokens).accepted[:num_draft_tokens])


def round_milliseconds(costs: Costs, acceptance: Acceptance | float, num_draft_tokens: int, batch: float = 1) -> float:
    """Expected milliseconds of a round: its rows share one forward, which waits for the longest draft.

    If rows are not padded, the forward costs what the tokens of all rows cost. batch may be a mean, between two whole
    numbers.
    """
    acceptance = _checked(acceptance, num_draft_tokens)
    if num_draft_tokens == 0:
        return costs.plain(batch, costs.width_for(1, batch))
    low = floor(batch)
    shares = {low: 1.0 - (batch - low), low + 1: batch - low}
    return sum(
        share * _whole_batch_milliseconds(costs, acceptance, num_draft_tokens, rows)
        for rows, share in shares.items()
        if share > 0
    )


def predicted_speed_up(costs: Costs, acceptance: Acceptance | float, num_draft_tokens: int, batch: float = 1) -> float:
    """Tokens per second relative to plain decoding of the same batch, prompt processing not counted.

    acceptance: an `Acceptance`, or the one probability with which each draft token is accepted.
    """
    plain = round_milliseconds(costs, 0.0, 0, batch)
    speculative = round_milliseconds(costs, acceptance, num_draft_tokens, batch)
    return expected_tokens(acceptance, num_draft_tokens) * plain / speculative


def best_length(costs: Costs, acceptance: Acceptance | float, batch: float = 1) -> int:
    """The draft length from 0 to `longest_known` with the highest predicted speed-up, the shortest of equals."""
    return max(
        range(longest_known(costs, acceptance) + 1), key=lambda n: (predicted_speed_up(costs, acceptance, n, batch), -n)
    )


def pays_until(costs: Costs, acceptance: Acceptance | float) -> int | None:
    """Where speculation stops paying: the first batch size whose best draft length is 0; None if it always pays.

    Tries every size from the smallest to the largest batch of the costs.
    """
    batches = range(costs.batches[0], costs.batches[-1] + 1)
    return next((batch for batch in batches if best_length(costs, acceptance, batch) == 0), None)


def break_even_acceptance(costs: Costs, num_draft_tokens: int, batch: float = 1) -> float | None:
    """The acceptance per token from which drafts of this length pay; None if not even 1 is enough.

    Assumes that every row proposes all its tokens.
    """
    _checked(0.0, num_draft_tokens)
    if num_draft_tokens == 0:
        raise UsageError(
            "num_draft_tokens=0; allowed: a whole number >= 1, since plain decoding is what it is compared with"
        )
    plain, speculative = (round_milliseconds(costs, 1.0, n, batch) for n in (0, num_draft_tokens))
    if expected_tokens(1.0, num_draft_tokens) * plain < speculative:
        return None
    low, high = 0.0, 1.0
    if plain >= speculative:
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        pays = expected_tokens(middle, num_draft_tokens) * plain >= speculative
        low, high = (low, middle) if pays else (middle, high)
    return high


def longest_known(costs: Costs, acceptance: Acceptance | float) -> int:
    """The longest draft for which both the costs and the acceptance are known."""
    limit = acceptance.longest if isinstance(acceptance, Acceptance) else MAX_DRAFT_TOKENS
    return max((n for n in range(limit + 1) if costs.width_for(n + 1) <= costs.widest), default=0)


def _whole_batch_milliseconds(costs: Costs, acceptance: Acceptance, num_draft_tokens: int, batch: int) -> float:
    total = 0.0
    for longest, first, shares in _draft_sizes(acceptance.proposed[:num_draft_tokens], batch):
        verifying = costs.verifying(batch, longest, range(first, first + len(shares)))
        total += float(shares @ verifying) + float(shares.sum()) * costs.drafting(batch, longest)
    return total


@lru_cache(maxsize=4096)
def _draft_sizes(proposed: tuple[float, ...], batch: int) -> list[tuple[int, int, Any]]:
    """The distribution of (longest draft, draft tokens in all) over `batch` rows.

    One (longest, first, shares) for each longest draft: shares[i] is the probability of this longest draft together
    with first + i draft tokens in all.
    """
    sizes = []
    reaches = (1.0, *proposed, 0.0)
    row, shorter = np.zeros(1), np.zeros(1)  # by tokens: of a row, and of all rows, with drafts up to this length
    for longest in range(len(proposed) + 1):
        probability = reaches[longest] - reaches[longest + 1]
        if probability <= 0:
            continue
        row = np.pad(row, (0, longest + 1 - len(row)))
        row[longest] = probability
        all_rows = _power(row, batch)
        shares = all_rows - np.pad(shorter, (0, len(all_rows) - len(shorter)))
        possible = np.flatnonzero(shares > NEGLIGIBLE)
        if len(possible):
            sizes.append((longest, int(possible[0]), shares[possible[0] : possible[-1] + 1]))
        shorter = all_rows
    return sizes


def _power(row: Any, batch: int) -> Any:
    """The distribution of the sum over `batch` rows, by squaring."""
    total = np.ones(1)
    while batch:
        total = np.convolve(total, row) if batch & 1 else total
        batch >>= 1
        row = np.convolve(row, row) if batch else row
    return total


def _checked(acceptance: Acceptance | float, num_draft_tokens: int) -> Acceptance:
    if not is_whole(num_draft_tokens):
        raise UsageError(f"num_draft_tokens={num_draft_tokens!r}; allowed: a whole number >= 0")
    if not isinstance(acceptance, Acceptance):
        acceptance = Acceptance.constant(acceptance)
    if num_draft_tokens > acceptance.longest:
        raise UsageError(
            f"num_draft_tokens={num_draft_tokens}; allowed: at most {acceptance.longest}, the longest known draft"
        )
    return acceptance


@dataclass(frozen=True)
class Prediction:
    """A predicted speed-up beside the observed one, prompt processing excluded.

    observed: against the plain arm if its statistics were given, else against a plain round of the costs. Milliseconds
    are those of a round (a step of the whole batch); tokens are per row and round.
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
        """The two figures and their deviation, as JSON has them."""
        return asdict(self) | {"deviation": self.deviation}


def predict_from_stats(
    stats: Mapping[str, Any],
    costs: Costs,
    *,
    plain: Mapping[str, Any] | None = None,
) -> Prediction:
    """The prediction for a run, from how much it accepted, beside what the run took.

    stats, plain: `Stats.to_dict()` of the speculative and of the plain arm, each folded over all rows of the batch.
    """
    acceptance = Acceptance.from_stats(stats)
    rows = stat(stats, "num_rounds") / stat(stats, "num_steps")
    length = acceptance.longest
    observed_ms = _step_milliseconds(stats)
    observed_tokens = stat(stats, "num_output_tokens") / stat(stats, "num_rounds")
    plain_ms = round_milliseconds(costs, 0.0, 0, rows)
    if plain is not None:
        plain_ms = _step_milliseconds(plain) * stat(plain, "num_rounds") / stat(plain, "num_output_tokens")
    return Prediction(
        predicted=predicted_speed_up(costs, acceptance, length, rows),
        observed=observed_tokens * plain_ms / observed_ms,
        predicted_ms=round_milliseconds(costs, acceptance, length, rows),
        observed_ms=observed_ms,
        predicted_tokens=expected_tokens(acceptance, length),
        observed_tokens=observed_tokens,
    )


def _step_milliseconds(stats: Mapping[str, Any]) -> float:
    seconds, steps = stat(stats, "total_seconds") - stat(stats, "prefill_seconds"), stat(stats, "num_steps")
    if not steps or seconds <= 0:
        raise UsageError(f"stats: {steps} steps in {seconds:g} s without prefill; allowed: more than 0 of both")
    return float(1e3 * seconds / steps)


@dataclass(frozen=True)
class Simulation:
    """Predicted speed-ups. speed_ups[batch][length]; best[batch]: the best length from 0 on, also beyond `lengths`.

    tokens[length]: expected tokens per round; break_even[batch][length]: the acceptance per token from which drafts of
    that length pay, None if none is enough; stops: the first batch at which plain decoding is best, None if there is
    none.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    speed_ups: dict[int, dict[int, float]]
    best: dict[int, int]
    tokens: dict[int, float]
    break_even: dict[int, dict[int, float | None]]
    stops: int | None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them, tuples as lists."""
        return {**vars(self), "lengths": list(self.lengths), "batches": list(self.batches)}


def simulate(
    costs: Costs,
    acceptance: Acceptance | float,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
) -> Simulation:
    """Predicted speed-up for every draft length and batch; by default all that the costs and the acceptance cover."""
    if lengths is None:
        lengths = range(1, longest_known(costs, acceptance) + 1)
    batches = costs.batches if batches is None else batches
    for name, values in (("lengths", lengths), ("batches", batches)):
        if not values:
            raise UsageError(
                f"{name}={list(values)!r}; allowed: at least one, within what the costs and acceptance cover"
            )
    return Simulation(
        lengths=tuple(lengths),
        batches=tuple(batches),
        speed_ups={b: {n: predicted_speed_up(costs, acceptance, n, b) for n in lengths} for b in batches},
        best={b: best_length(costs, acceptance, b) for b in batches},
        tokens={n: expected_tokens(acceptance, n) for n in lengths},
        break_even={b: {n: break_even_acceptance(costs, n, b) if n else None for n in lengths} for b in batches},
        stops=pays_until(costs, acceptance),
    )


def conclusions(costs: Costs, simulation: Simulation) -> list[str]:
    """The results of a simulation in sentences: the best length of each batch, and where speculation stops paying."""
    lines = []
    for batch, best in simulation.best.items():
        alpha = simulation.break_even[batch].get(best)
        setting = f"best draft length {best}" if best else "plain decoding is best"
        condition = "" if alpha is None else f", which pays from an acceptance of {alpha:.0%} per token"
        lines.append(f"batch {batch}: {setting}{condition}")
    if simulation.stops is None:
        lines.append(f"speculation pays in batches up to {costs.batches[-1]} rows")
    else:
        lines.append(f"speculation stops paying at {simulation.stops} rows")
    return [*lines, f"costs: {costs.machine}; drafter {costs.drafter}; prompt processing is not counted"]
