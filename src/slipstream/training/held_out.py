"""Estimates the speed that a head gives its target, on texts that it has not learned from.

Their answers are drafted round by round with drafts of each length, as in greedy decoding: the answers are the target's
own, so draft tokens that agree with them are accepted. Speeds come from the calibrated costs of rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.bench.speed_formula import Accepted, expected_tokens, round_seconds
from slipstream.draft_length.costs import CostModel
from slipstream.training.trainable_head import STEPS, Batch, TrainableHead


@dataclass(frozen=True)
class Judgment:
    """The speed of a head at its fastest draft length."""

    tokens_per_round: float  # with drafts of STEPS tokens
    accepted: tuple[float, ...]  # accepted[i]: share of rounds that accept more than i draft tokens
    num_draft_tokens: int
    tokens_per_second: float  # estimated
    plain: float  # tokens per second without drafts


def judged(head: TrainableHead, batches: Sequence[Batch], costs: CostModel) -> Judgment:
    """The head's speed on these texts."""
    answers = [answer for batch in batches for answer in _answers(head, batch)]
    by_length = [acceptance(answers, length) for length in range(1, STEPS + 1)]
    rates = [1 / round_seconds(costs, 0)]
    for length, accepted in enumerate(by_length, 1):
        rates.append(expected_tokens(accepted, length) / round_seconds(costs, length))
    best = max(range(len(rates)), key=lambda length: rates[length])
    longest = by_length[-1]
    return Judgment(expected_tokens(longest, STEPS), tuple(longest), best, rates[best], rates[0])


def acceptance(answers: Sequence[Sequence[int]], length: int) -> Accepted:
    """Share of rounds that accept more than i draft tokens, for each i below `length`.

    answers[i][j]: number of agreeing tokens in a draft that begins at token j of answer i.
    """
    rounds, counts = 0, [0] * length
    for agreeing in answers:
        place = 0
        while place < len(agreeing):
            accepted = min(agreeing[place], length, len(agreeing) - place)
            rounds += 1
            for i in range(accepted):
                counts[i] += 1
            place += accepted + 1
    return [count / max(1, rounds) for count in counts]


def _answers(head: TrainableHead, batch: Batch) -> list[list[int]]:
    """For each text and each of its tokens that count: number of agreeing tokens in a draft that begins there."""
    agreeing: Tensor = head.hits(batch).long().cumprod(-1).sum(-1)
    counted = batch.learned[:, batch.predicted(0)]
    return [agreeing[i][counted[i]].tolist() for i in range(len(agreeing))]
