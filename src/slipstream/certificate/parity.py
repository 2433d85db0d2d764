"""Whether two texts are the same, and if not, whether the difference is a tie or a bug.

Two forwards of different shapes round differently, so a near-tie between two tokens can flip. At the first mismatch
one full-precision forward scores both candidates: both within rounding of the maximum is a tie, anything else a bug.
Scores are what a token is chosen by: logits after penalties and the other processors, and after temperature, cuts and
the seed's noise where text is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

Scores = Callable[[list[int]], Tensor]
LastScores = Callable[[list[int], int], Tensor]

# no rounding explains a larger gap than this, whatever was measured
CEILING = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 1.5}
NEIGHBOURS = 10
POSITIONS = 12  # at which rounding is measured: at a few alone it may happen to be small


@dataclass(frozen=True)
class Difference:
    """Where two texts part. Gaps are distances of the two candidates' scores from the full-precision maximum.

    noise: how far working precision was from full precision among the leading tokens, here or just before.
    compared: False where the texts may differ: sampled texts of a rule that does not couple draws, or a rounding
    error that moves a token across the edge of top-k, top-p or min-p.
    """

    position: int
    expected: int | None
    got: int | None
    expected_gap: float = 0.0
    got_gap: float = 0.0
    noise: float = 0.0
    tie: bool = False
    compared: bool = True


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first mismatch, the shorter length if one is a prefix of the other, None if equal."""
    for at, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def count_differences(differences: Sequence[Difference | None]) -> dict[str, Any]:
    """How many texts are identical, ties, different or not compared; and the details of those that differ."""
    found = [d for d in differences if d is not None]
    ties, compared = sum(d.tie for d in found), sum(d.compared for d in found)
    return {
        "identical": len(differences) - len(found),
        "ties": ties,
        "different": compared - ties,
        "not_compared": len(found) - compared,
        "differences": [{"prompt": i, **asdict(d)} for i, d in enumerate(differences) if d is not None],
    }


def plain_difference(expected: Sequence[int], got: Sequence[int]) -> Difference | None:
    """The first difference between two texts, unexplained; None if they are equal."""
    at = first_difference(expected, got)
    if at is None:
        return None
    a, b = (ids[at] if at < len(ids) else None for ids in (expected, got))
    return Difference(at, a, b)


def explain(
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    full: LastScores,
    working: Scores,
    dtype: torch.dtype,
) -> Difference | None:
    """The first difference between two texts and what full precision says about it; None if they are equal.

    full(ids, n): [n, V] float32 scores that follow the last n prefixes of the token ids, the whole one last.
    working(ids): [V] scores that follow them, in the precision that was used. A forbidden token has score -inf.
    """
    found = plain_difference(expected, got)
    if found is None or found.expected is None or found.got is None:
        return found
    context = [*prompt, *expected[: found.position]]
    count = min(POSITIONS, len(context))
    exact = full(context, count).double().cpu()
    prefixes = [context[: len(context) - back] for back in range(count - 1, -1, -1)]
    pair = torch.tensor([found.expected, found.got])
    noise = max(_noise(one, working(ids).double().cpu(), pair) for one, ids in zip(exact, prefixes, strict=True))
    gaps = [float(exact[-1].max() - exact[-1, token]) for token in pair]
    tie = max(gaps) <= min(2 * noise, CEILING.get(dtype, 0.0))
    return Difference(found.position, found.expected, found.got, gaps[0], gaps[1], noise, tie)


def _noise(exact: Tensor, rounded: Tensor, pair: Tensor) -> float:
    """The largest error among the leading tokens and the two candidates; a common shift changes nothing.

    Tokens forbidden in either precision are left out.
    """
    leading = torch.cat([exact.topk(min(NEIGHBOURS, len(exact))).indices, pair])
    error = (rounded - exact)[leading]
    error = error[error.isfinite()]
    return float((error - error.mean()).abs().max()) if len(error) else 0.0
