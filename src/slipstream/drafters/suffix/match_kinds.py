"""Kinds of retrieved tokens, how often tokens of each kind are accepted, and the drafts that are likely by that."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from math import exp

from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.draft_length.best_first import UNLIKELY, Node
from slipstream.drafters.suffix.automaton import Match, Step, SuffixAutomaton

SEEN = (2, 3, 4, 6, 10, 16, 32)  # kinds of tokens: by the length of their context, from 1 to these
AGREED = 7  # and by how far its occurrences agree, see `kind_of`
# log-odds of a token by both, chosen for texts of a 135M chat model and a 1.5B code model.
# benchmarks/fit_match_kinds.py fits such numbers from runs.jsonl of `slipstream bench` or from text files, and judges
# both: on README.md and docs/*.md (11 texts, 7,987 tokens) a fit has a log-loss of 0.493 per token, these have 0.515;
# such texts are no model's outputs, so these stayed. benchmarks/policy_replay.py measures what drafts gain with them
BY_LENGTH = (-0.75, 0.04, 0.42, 0.7, 1.1, 1.5, 2.3, 3.2)
BY_AGREEMENT = (-1.7, -1.2, -0.25, 0.2, 0.3, 1.0, 2.0)
# the same of a runner-up, given that the tokens before it for its place are wrong, from such a fit of 80 answers
# of a 135M and a 0.5B chat model, where 11 % of 1,712 runners-up came true; behind more than two tokens they are few
BESIDE_BY_LENGTH = (-1.7, -1.5, *(-0.6,) * 6)
BESIDE_BY_AGREEMENT = (-0.6, -0.6, 0.6, 0.0, -0.3, 0.6, 0.5)
KINDS = len(BY_LENGTH) * AGREED  # of first choices; as many of runners-up follow
Place = tuple[Match, int]  # where a text stands, and how often that is taken to occur


def prior() -> list[float]:
    """The chance of a token of each kind, before anything is known about the text."""
    return [_sigmoid(a + b) for a in BY_LENGTH for b in BY_AGREEMENT]


def prior_beside() -> list[float]:
    """The same of runners-up."""
    return [_sigmoid(a + b) for a in BESIDE_BY_LENGTH for b in BESIDE_BY_AGREEMENT]


def _sigmoid(log_odds: float) -> float:
    return 1 / (1 + exp(-log_odds))


def kind_of(step: Step) -> int:
    """Of a token. Its context's occurrences agree about it in less than a third, a half, four fifths, nearly all.

    Or in all: there is just one, there are two or three, or more.
    """
    share = step.followed / step.occurrences
    agreed = bisect_right((0.3, 0.55, 0.8), share) if share < 1 else 4 + bisect_right((2, 4), step.followed)
    return AGREED * bisect_right(SEEN, step.known) + agreed


def likely_chain(
    acceptance_model: AcceptanceModel,
    row: Row,
    steps: Iterator[Step],
    length: int,
    *,
    prob: float = 1.0,
    least: float = UNLIKELY,
) -> list[Node]:
    """Up to `length` tokens of a walk. prob: that what comes before them is accepted.

    least: the chain ends with the first token less likely to be accepted; none less likely than UNLIKELY is in it.
    """
    nodes, chance = list[Node](), acceptance_model.chances(row)
    for step in islice(steps, length):
        kind = kind_of(step)
        prob *= chance(kind)
        if prob < UNLIKELY:
            break
        nodes.append(Node(len(nodes) - 1, step.token, kind, prob))
        if prob < least:
            break
    return nodes


def known_after(automaton: SuffixAutomaton, place: Place) -> Iterator[tuple[int, int, Place]]:
    """What followed at a place, for `Alternatives`."""
    for step, match in automaton.alternatives(*place):
        yield step.token, kind_of(step), (match, automaton.count(match))
