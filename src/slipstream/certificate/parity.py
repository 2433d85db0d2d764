"""Whether two texts are the same, and if not, whether the difference is a tie or a bug.

Two forwards of different shapes round differently, so a near-tie between two tokens can flip. At the first mismatch
both candidates are looked up in one full-precision forward: both within rounding of the maximum is a tie, anything
else a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Logits = Callable[[list[int]], Tensor]
LastLogits = Callable[[list[int], int], Tensor]

# no rounding explains a larger gap than this, whatever was measured
CEILING = {torch.float32: 1e-2, torch.float16: 0.25, torch.bfloat16: 1.5}
NEIGHBOURS = 10
POSITIONS = 12  # at which rounding is measured: a few alone may have been lucky


@dataclass(frozen=True)
class Difference:
    """Where two texts part. Gaps are distances of the two candidates' logits from the full-precision maximum.

    noise: how far working precision was from full precision among the leading tokens, here or just before.
    """

    position: int
    expected: int | None
    got: int | None
    expected_gap: float = 0.0
    got_gap: float = 0.0
    noise: float = 0.0
    tie: bool = False


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first mismatch, the shorter length if one is a prefix of the other, None if equal."""
    for at, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return at
    return None if len(expected) == len(got) else min(len(expected), len(got))


def explain(
    prompt: Sequence[int],
    expected: Sequence[int],
    got: Sequence[int],
    full: LastLogits,
    working: Logits,
    dtype: torch.dtype,
) -> Difference | None:
    """The first difference between two greedy texts and what full precision says about it; None if they are equal.

    full(ids, n): [n, V] float32 logits that follow the last n beginnings of the token ids, the whole one last.
    working(ids): [V] logits that follow them, in the precision that was used.
    """
    at = first_difference(expected, got)
    if at is None:
        return None
    if at >= min(len(expected), len(got)):
        ended = [ids[at] if at < len(ids) else None for ids in (expected, got)]
        return Difference(at, ended[0], ended[1])
    context = [*prompt, *expected[:at]]
    count = min(POSITIONS, len(context))
    exact = full(context, count).double().cpu()
    beginnings = [context[: len(context) - back] for back in range(count - 1, -1, -1)]
    pair = torch.tensor([expected[at], got[at]])
    noise = max(_noise(one, working(ids).double().cpu(), pair) for one, ids in zip(exact, beginnings, strict=True))
    gaps = [float(exact[-1].max() - exact[-1, token]) for token in pair]
    tie = max(gaps) <= min(2 * noise, CEILING.get(dtype, 0.0))
    return Difference(at, expected[at], got[at], gaps[0], gaps[1], noise, tie)


def _noise(exact: Tensor, rounded: Tensor, pair: Tensor) -> float:
    """The largest error among the leading tokens and the two candidates; a common shift changes nothing."""
    leading = torch.cat([exact.topk(min(NEIGHBOURS, len(exact))).indices, pair])
    error = (rounded - exact)[leading]
    return float((error - error.mean()).abs().max())
