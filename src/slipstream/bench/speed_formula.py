"""The expected speed-up of drafts of one length: a round's expected tokens over its seconds.

    accepted = independent(0.8)                       # each draft token is accepted with probability 0.8
    simulation = simulate(decoder.costs, accepted, lengths=range(1, 9), batches=(1, 4, 8))

Tokens follow Leviathan et al. (2023, section 3.1). Seconds come from the table by which `auto` chooses draft lengths,
or from the roofline of a machine. Every row drafts the same number of tokens, and prompt processing is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.draft_length.costs import CostModel
from slipstream.errors import UsageError
from slipstream.text.results import Stats

BYTES_PER_PARAM = 2  # bf16
LARGEST_ON_PAPER, LONGEST_ON_PAPER = 64, 16  # rows and draft tokens of a roofline's table
BISECTIONS = 40

Accepted = Sequence[float]  # [i]: the probability that a round accepts more than i draft tokens


def independent(alpha: float) -> Accepted:
    """Acceptance where every draft token is accepted with probability alpha, whatever came before it."""
    return [alpha**n for n in range(1, MAX_DRAFT_TOKENS + 1)]


def recorded(stats: Stats) -> Accepted:
    """The acceptance of a run, up to its longest draft."""
    if not stats.num_rounds or not stats.num_draft_tokens:
        raise UsageError(
            f"stats of {stats.num_rounds} rounds without drafts; allowed: statistics of a run that drafted"
        )
    if stats.num_draft_tokens > sum(stats.drafted_per_position):
        raise UsageError("stats of draft trees; allowed: drafts without branches, as of the arm auto@chain")
    return [count / stats.num_rounds for count in stats.accepted_per_position]


def expected_tokens(accepted: Accepted, length: int) -> float:
    """Expected tokens that a round commits for a row, including the target's own.

    With independent acceptance this is (1 - alpha^(n + 1)) / (1 - alpha) (Leviathan et al. 2023, equation 1).
    """
    return 1.0 + sum(accepted[:length])


def round_seconds(costs: CostModel, length: int, rows: int = 1) -> float:
    """Seconds of a round in which every row drafts `length` tokens."""
    return length * costs.step(rows) + costs.verify(rows, length)


def speed_up(costs: CostModel, accepted: Accepted, length: int, rows: int = 1) -> float:
    """Tokens per second relative to plain decoding of the same number of rows."""
    return expected_tokens(accepted, length) * round_seconds(costs, 0, rows) / round_seconds(costs, length, rows)


def best_length(costs: CostModel, accepted: Accepted, lengths: Sequence[int], rows: int = 1) -> int:
    """The length with the highest speed-up; ties go to the shortest. 0 if none beats plain decoding."""
    return max((0, *lengths), key=lambda n: (speed_up(costs, accepted, n, rows), -n))


def break_even(costs: CostModel, length: int, rows: int = 1) -> float | None:
    """The acceptance per token above which drafts of this length pay off; None if not even 1 is enough."""
    low, high = 0.0, 1.0
    if speed_up(costs, independent(high), length, rows) < 1:
        return None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        pays = speed_up(costs, independent(middle), length, rows) >= 1
        low, high = (low, middle) if pays else (middle, high)
    return high


@dataclass(frozen=True)
class Simulation:
    """Predicted speed-ups over plain decoding."""

    tokens: dict[int, float]  # of a round and row, by draft length
    speed_ups: dict[int, dict[int, float]]  # by batch size, then by draft length
    best: dict[int, int]  # draft length by batch size; 0: do not speculate
    break_even: dict[int, float | None]  # acceptance from which the best length pays, by batch size
    stops_at: int | None  # the first batch size at which plain decoding is best; None if there is none

    @property
    def conclusions(self) -> list[str]:
        """The best length of each batch size, and where speculation stops paying off, in sentences."""
        lines = []
        for batch, length in self.best.items():
            alpha = self.break_even[batch]
            setting = f"best draft length {length}" if length else "plain decoding is best"
            condition = "" if alpha is None else f", which pays from an acceptance of {alpha:.0%} per token"
            lines.append(f"batch {batch}: {setting}{condition}")
        if self.stops_at is None:
            return [*lines, f"speculation pays up to a batch size of {max(self.best)}"]
        return [*lines, f"speculation stops paying at a batch size of {self.stops_at}"]


def simulate(costs: CostModel, accepted: Accepted, lengths: Sequence[int], batches: Sequence[int]) -> Simulation:
    """Predict the speed-up of every draft length and batch size."""
    if (longest := max(lengths)) > len(accepted):
        raise UsageError(f"draft length {longest}; allowed: up to {len(accepted)}, the longest draft of the run")
    if (largest := max(batches)) > costs.max_batch_size:
        raise UsageError(f"batch size {largest}; allowed: up to {costs.max_batch_size}, which the costs cover")
    best = {rows: best_length(costs, accepted, lengths, rows) for rows in range(1, largest + 1)}
    return Simulation(
        tokens={n: expected_tokens(accepted, n) for n in lengths},
        speed_ups={rows: {n: speed_up(costs, accepted, n, rows) for n in lengths} for rows in batches},
        best={rows: best[rows] for rows in batches},
        break_even={rows: break_even(costs, best[rows], rows) if best[rows] else None for rows in batches},
        stops_at=next((rows for rows, length in best.items() if not length), None),
    )


def roofline(target_params: float, draft_params: float, bandwidth: float, flops: float) -> CostModel:
    """Costs on paper; bandwidth in bytes/s, draft_params=0 for drafts that cost nothing.

    A forward takes as long as reading the weights or computing, whichever is longer (the roofline of Williams, Waterman
    and Patterson 2009), with 2 FLOPs per parameter and token (Kaplan et al. 2020, section 2.1). Attention and reads of
    the KV cache are left out.
    """

    def milliseconds(params: float, tokens: int) -> float:
        return 1e3 * max(params * BYTES_PER_PARAM / bandwidth, 2 * params * tokens / flops)

    tokens = range(1, LARGEST_ON_PAPER * (LONGEST_ON_PAPER + 1) + 1)
    forwards = {count: milliseconds(target_params, count) for count in tokens}
    return CostModel(
        ragged=lambda rows, drafted: rows + drafted,
        measured=forwards,
        together=forwards,
        max_batch_size=LARGEST_ON_PAPER,
        steps={rows: milliseconds(draft_params, rows) for rows in range(1, LARGEST_ON_PAPER + 1)},
    )


def table_of(costs: CostModel) -> dict[str, Any]:
    """The measured milliseconds, for JSON."""
    table = {name: getattr(costs, name) for name in ("measured", "together", "max_batch_size", "steps", "token")}
    return table if costs.experts is None else table | {"experts": asdict(costs.experts)}
