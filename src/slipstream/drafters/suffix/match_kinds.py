"""Kinds of retrieved tokens, and how often tokens of each kind are accepted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from math import exp

from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters.suffix.automaton import Step

SEEN = (2, 3, 4, 6, 10, 16, 32)  # kinds of tokens: by the length of their context, from 1 to these
AGREED = 7  # and by how far its occurrences agree, see `kind_of`
# log-odds of a token by both, chosen for texts of a 135M chat model and a 1.5B code model, whose recordings are gone.
# benchmarks/fit_match_kinds.py fits them from runs.jsonl of `slipstream bench` or from text files, and judges both: on
# README.md and docs/*.md (11 texts, 7,987 tokens) a fit has a log-loss of 0.493 per token, these have 0.515; such texts
# are no model's outputs, so these stayed. benchmarks/policy_replay.py measures what drafts gain with them
BY_LENGTH = (-0.75, 0.04, 0.42, 0.7, 1.1, 1.5, 2.3, 3.2)
BY_AGREEMENT = (-1.7, -1.2, -0.25, 0.2, 0.3, 1.0, 2.0)
UNLIKELY = 0.01  # a path less likely than this is not followed


def prior() -> list[float]:
    """The chance of a token of each kind, before anything is known about the text."""
    return [1 / (1 + exp(-a - b)) for a in BY_LENGTH for b in BY_AGREEMENT]


def kind_of(step: Step) -> int:
    """Of a token. Its context's occurrences agree about it in less than a third, a half, four fifths, nearly all.

    Or in all: there is just one, there are two or three, or more.
    """
    share = step.followed / step.occurrences
    agreed = bisect_right((0.3, 0.55, 0.8), share) if share < 1 else 4 + bisect_right((2, 4), step.followed)
    return AGREED * bisect_right(SEEN, step.known) + agreed


def likely_path(
    acceptance_model: AcceptanceModel, row: Row, steps: Iterator[Step], length: int, acceptance_prob: float
) -> tuple[list[int], list[int], list[float]]:
    """Up to `length` tokens of a walk, their kinds, and the probabilities that all up to each are accepted.

    acceptance_prob: that of what comes before them.
    """
    tokens, kinds, acceptance_probs = list[int](), list[int](), list[float]()
    for step in islice(steps, length):
        kind = kind_of(step)
        acceptance_prob *= acceptance_model.chance(row, kind)
        if acceptance_prob < UNLIKELY:
            break
        tokens.append(step.token)
        kinds.append(kind)
        acceptance_probs.append(acceptance_prob)
    return tokens, kinds, acceptance_probs
