"""Predicted speed-up: expected tokens of a round over its expected time, relative to plain decoding.

    costs = measure_costs(decoder, batch_sizes=(1, 4))      # or paper_costs(...), or Costs.read(path)
    predicted_speed_up(costs, 0.8, num_draft_tokens=4)      # 0.8: each draft token is accepted with this probability
    best_length(costs, Acceptance.from_stats(stats), batch=4)

Names other modules may rely on: `Costs`, `measure_costs`, `paper_costs`, `Machine`, `Acceptance`,
`expected_tokens`, `predicted_speed_up`, `best_length`, `pays_until`, `break_even_acceptance`, `predict_from_stats`.
docs/prediction.md has the formulas and what they leave out. This module runs no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from slipstream.bench.prediction.accepted_lengths import Acceptance, stat
from slipstream.bench.prediction.costs import Costs
from slipstream.bench.prediction.paper_costs import Machine, paper_costs
from slipstream.bench.prediction.probe import measure_costs
from slipstream.bench.prediction.round_time import Pad, expected_milliseconds, taken_by
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError

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

BISECTIONS = 60


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
