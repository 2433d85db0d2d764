"""A draft model with its own KV cache, and when it stops before it has drafted what was asked for.

Greedy rows get its likeliest tokens, sampled ones the winners of the race that the target will run with the same random
numbers (`match`), or tokens sampled from its own distribution (`block`, `rejection`). A draft may end by anything that
is known when it does, as long as the tokens sampled so far stay in it: which tokens the target is asked about is then
no choice among tokens (docs/exactness.md).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.interfaces import Drafter, DraftScorer, Sampler
from slipstream.core.rng import Stream, argmax
from slipstream.core.types import Draft, Row, Sibling, Traits
from slipstream.draft_length.acceptance_model import DraftNote, bin_of, sibling_bin
from slipstream.draft_length.planner import DraftController
from slipstream.drafters import Setup, load
from slipstream.errors import UsageError

REPRODUCIBLE = 0.4  # least probability of the draft so far, where drafts must depend on nothing but the row
TRAITS = Traits(
    has_own_cache=True,
    knows_confidence=True,
    default_length=6,
    preference=2,
    needs_draft_model=True,
    branches=True,
    in_other_engines=True,
)


class Stop(Protocol):
    """Says which rows' drafts end with the token drafted last."""

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """chances[i]: how sure the draft model is of each token of row i so far; lengths: how many are asked for.

        sampled: the tokens are sampled by random numbers of their own, so that the text depends on the draft.
        """

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float] | None:
        """The probability that the first 1, 2, ... tokens of a row's draft are all accepted, if it is known."""

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float] | None:
        """The probability that the token beside each of a row's draft is accepted, if it may be verified too."""

    def note(self, length: int, chances: Sequence[float], beside: Sequence[tuple[int, float]] = ()) -> DraftNote:
        """What the policy learns from. chances: of the row's draft; length: how many tokens were asked for.

        beside: for each token of the draft the one beside it, and how sure the draft model is of that.
        """


@dataclass(frozen=True)
class Below(ABC):
    """A draft ends, row by row, with the token that makes it less sure than `threshold` (confidence.py)."""

    threshold: float

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """See `Stop`."""
        return [self._chance(own) < self.threshold for own in chances]

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float] | None:
        """Not known."""
        return None

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float] | None:
        """Chains only."""
        return None

    def note(self, length: int, chances: Sequence[float], beside: Sequence[tuple[int, float]] = ()) -> DraftNote:
        """Nothing that the draft itself does not tell."""
        return DraftNote()

    @abstractmethod
    def _chance(self, own: Sequence[float]) -> float:
        """What is compared, of how sure the draft model was of each of a row's tokens so far."""


class PathBelow(Below):
    """Of all the draft's tokens together."""

    def _chance(self, own: Sequence[float]) -> float:
        return prod(own)


class TokenBelow(Below):
    """Of the last token; in greedy rows that is Hugging Face's `assistant_confidence_threshold`."""

    def _chance(self, own: Sequence[float]) -> float:
        return own[-1]


@dataclass(frozen=True)
class WhilePays:
    """All drafts end where another step of the draft model would cost more than it can be expected to bring.

    Rows whose request says how many tokens to draft get them. Where the text depends on the draft costs do not count,
    so that a seed gives the same text again.
    """

    controller: DraftController

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """All rows at once, or row by row."""
        asked = [row.params.num_draft_tokens is not None for row in rows]
        if sampled:
            return [prod(own) < REPRODUCIBLE and not mine for own, mine in zip(chances, asked, strict=True)]
        wanting = [i for i, length in enumerate(lengths) if length > len(chances[i])]
        pays = self.controller.another_step([rows[i] for i in wanting], [chances[i] for i in wanting], len(rows))
        return [not (pays or mine) for mine in asked]

    def acceptance_probs(self, row: Row, chances: Sequence[float]) -> list[float]:
        """The probability that the first 1, 2, ... tokens of a row's draft are all accepted."""
        return self.controller.confidence.acceptance_probs(row, chances)

    def sibling_probs(self, row: Row, chances: Sequence[float], beside: Sequence[float]) -> list[float] | None:
        """By what the draft model's tokens have brought; none for rows that asked for a number of tokens."""
        if row.params.num_draft_tokens is not None:
            return None
        return self.controller.confidence.sibling_probs(row, chances, beside)

    def note(self, length: int, chances: Sequence[float], beside: Sequence[tuple[int, float]] = ()) -> DraftNote:
        """How many tokens were asked for and drafted, and how confident the draft model was of each."""
        siblings = zip(chances, beside, strict=False)
        kinds = tuple((token, sibling_bin(chance, other)) for chance, (token, other) in siblings)
        return DraftNote(length, len(chances), kinds=tuple(map(bin_of, chances)), siblings=kinds)


@dataclass
class ModelDrafter:
    """Drafts token by token, by the draft model's distribution under the request's own options.

    vocab_size: the target's; a draft head of another size (padding) is cut or filled with impossible tokens.
    coupled: sample with the random numbers the target will use at that position, as for acceptance "match", the
    default. The token is then a function of these numbers alone, so the draft counts as one-hot.
    stop: when a row's draft ends before it has the tokens asked for. The token after which it ends stays in the draft,
    so the end is no choice among tokens and every rule keeps its distribution.
    siblings: how many tokens are proposed beside each of a one-hot draft: the draft model's next best, or the next
    fastest in the race that the target will run. Without `stop` they count among the tokens asked for, and where the
    end of a text leaves no room for all, the chain of `depth` tokens comes first.
    """

    session: DraftScorer
    vocab_size: int
    coupled: bool = False
    stop: Stop | None = None
    siblings: int = 0
    depth: int = 0

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """One forward of the draft model per column; rows that want fewer columns are padded."""
        sampled = not (sampler.all_greedy or self.coupled)
        beside = 0 if sampled else self.siblings
        asked = lengths if self.stop is not None else list(map(partial(self._chain, 1 + beside), rows, lengths))
        width, ends = max(asked, default=0), list(asked)
        if width and sampler.plain and self.stop is None and not beside:
            drafted = self.session.draft_greedy(rows, width, self.vocab_size)
            if drafted is not None:
                self.session.keep_drafts(lengths)
                return Draft(drafted.to(sampler.device, non_blocking=True), tuple(lengths), steps=width)
        device = self.session.backend.device
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        distributions: list[Tensor] = []
        chances: list[list[float]] = [[] for _ in rows]
        others: list[list[list[tuple[int, float]]]] = [[] for _ in rows]
        for j in range(width):
            logits = self.session.score(rows, tokens[:, :j], [j] * len(rows), keep=1)
            scores = self._fit(logits).to(sampler.device)
            if not sampler.plain:
                scores = sampler.scores(scores, tokens[:, :j].to(sampler.device), first=j)
                ends = _before_dead_ends(rows, scores[:, 0], ends, j)
                if max(ends) <= j:
                    break
                distributions.append(sampler.probs(scores))
            leaders, sure = self._leaders(scores[:, 0], distributions, sampler, 1 + beside)
            tokens[:, j] = leaders[:, 0]
            if sure is not None:
                for i, known in enumerate(zip(leaders.tolist(), sure.tolist(), strict=True)):
                    (_, own), *them = zip(*known, strict=True)
                    chances[i].append(own)
                    others[i].append(them)
            if self.stop is not None:
                over = self.stop.ends(rows, lengths, chances, sampled)
                ends = [min(end, j + 1) if ended else end for end, ended in zip(ends, over, strict=True)]
                if max(ends) <= j + 1:
                    break
        if width:
            self.session.keep_drafts(ends)
        steps, width = (j + 1 if width else 0), max(ends, default=0)
        draft = tokens[:, :width].to(sampler.device, non_blocking=True)
        probs_of = torch.cat(distributions[:width], dim=1) if sampled and distributions else None
        made = Draft(draft, tuple(ends), probs_of, steps=steps)
        if sampled or self.stop is None:
            return replace(made, siblings=_leftover(others, ends, lengths)) if beside else made
        made = annotated(made, self.stop, rows, lengths, chances, others if beside else None)
        return replace(made, siblings=_likely(self.stop, rows, chances, others, ends)) if beside else made

    def _chain(self, wide: int, row: Row, length: int) -> int:
        """How many of so many tokens are a chain, beside each of which stand others."""
        ending = wide > 1 and length == row.remaining - 1
        return min(self.depth, length) if self.depth and ending else -(-length // wide)

    def _leaders(
        self, scores: Tensor, distributions: Sequence[Tensor], sampler: Sampler, count: int
    ) -> tuple[Tensor, Tensor | None]:
        """The draft's next token and those beside it, [B, count], and how sure the draft model is of each.

        None for that where nobody asks. scores: [B, V]; distributions: of all the draft's tokens, if not `plain`.
        """
        asked = self.stop is not None or count > 1
        first = self._first(scores, distributions, sampler, asked)
        if first is not None and not asked:
            return first[:, None], None
        speeds = self._own_probs(scores, distributions, sampler)
        if not sampler.plain and self.coupled:
            speeds = sampler.speeds(speeds, len(distributions) - 1)
        tokens = [argmax(speeds) if first is None else first]
        left = speeds
        for _ in range(1, count):
            left = left.scatter(1, tokens[-1][:, None], 0.0)
            tokens.append(argmax(left))
        leaders = torch.stack(tokens, 1)
        return leaders, speeds.gather(1, leaders) / speeds.sum(-1, keepdim=True).clamp(min=1e-30)

    def _first(self, scores: Tensor, distributions: Sequence[Tensor], sampler: Sampler, asked: bool) -> Tensor | None:
        """[B] the draft's next token, where it is known before the race; asked: whether the race is run anyway."""
        if sampler.plain:
            return argmax(scores)
        races = sampler.all_greedy or self.coupled
        if races and asked:
            return None
        return sampler.draw(distributions[-1], len(distributions) - 1, Stream.TOKEN if races else Stream.DRAFT)[:, 0]

    def _own_probs(self, scores: Tensor, distributions: Sequence[Tensor], sampler: Sampler) -> Tensor:
        """[B, V] the draft model's probabilities; a greedy row's are those of its scores [B, V]."""
        if sampler.plain:
            return scores.float().softmax(-1)
        greedy = torch.tensor([row.params.temperature == 0 for row in sampler.rows], device=scores.device)
        own = distributions[-1][:, 0]
        if not bool(greedy.any()):
            return own
        return torch.where(greedy[:, None], scores.softmax(-1).nan_to_num(0.0), own)  # no number where no token is left

    def _fit(self, logits: Tensor) -> Tensor:
        extra = self.vocab_size - logits.shape[-1]
        if extra <= 0:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, extra), value=float("-inf"))


def _before_dead_ends(rows: Sequence[Row], scores: Tensor, ends: Sequence[int], at: int) -> list[int]:
    """Where drafts end if those whose constraint leaves no token of the draft model's go on no further.

    scores: [B, V] of draft token `at`.
    """
    if all(row.constraint is None for row in rows):
        return list(ends)
    dead = (scores.amax(-1) == float("-inf")).tolist()
    return [min(end, at) if none else end for end, none in zip(ends, dead, strict=True)]


Others = Sequence[Sequence[Sequence[tuple[int, float]]]]  # by row and depth: tokens beside the draft's own


def _leftover(others: Others, ends: Sequence[int], lengths: Sequence[int]) -> tuple[tuple[Sibling, ...], ...]:
    """As many siblings as there is room for besides the chains, the earliest first."""
    return tuple(
        tuple(Sibling(depth, token) for depth, them in enumerate(own[:end]) for token, chance in them if chance)[
            : n - end
        ]
        for own, end, n in zip(others, ends, lengths, strict=True)
    )


def _likely(
    stop: Stop, rows: Sequence[Row], chances: Sequence[Sequence[float]], others: Others, ends: Sequence[int]
) -> tuple[tuple[Sibling, ...], ...]:
    """The first sibling of each token, and how likely it is to be accepted."""
    made = []
    for row, known, own, end in zip(rows, chances, others, ends, strict=True):
        first = [them[0] for them in own[:end]]
        probs = stop.sibling_probs(row, known[:end], [chance for _, chance in first]) or []
        made.append(tuple(Sibling(at, first[at][0], prob) for at, prob in enumerate(probs) if first[at][1]))
    return tuple(made)


def annotated(
    draft: Draft,
    stop: Stop,
    rows: Sequence[Row],
    asked: Sequence[int],
    chances: Sequence[Sequence[float]],
    others: Others | None = None,
) -> Draft:
    """The draft with what `stop` knows of its tokens' acceptance."""
    own = [one[:end] for one, end in zip(chances, draft.lengths, strict=True)]
    probs = tuple(stop.acceptance_probs(row, one) for row, one in zip(rows, own, strict=True))
    beside = [()] * len(rows) if others is None else [[them[0] for them in line] for line in others]
    notes = tuple(stop.note(length, one, them) for length, one, them in zip(asked, own, beside, strict=True))
    return replace(draft, acceptance_probs=probs, notes=notes)


def build(setup: Setup, argument: str) -> Drafter:
    """The draft model that the decoder was given, as a drafter: "model", or "model:p=PERCENT" to stop early.

    Without an argument it drafts as many tokens as it was told to, and as many as pay where nobody said how many.
    """
    given = re.fullmatch(r"p=(\d{1,2})", argument)
    if argument and given is None:
        raise UsageError(f"drafter='model:{argument}'; allowed: 'model', or 'model:p=PERCENT' from 0 to 99")
    if argument and setup.fixed_tree:
        raise UsageError(f"drafter='model:{argument}' with a tree; allowed: 'model', whose drafts are then all of it")
    if setup.session is None:
        raise UsageError("drafter='model' needs a draft model; give draft=... (command line: --draft)")
    if setup.bridged is not None:
        return load(":".join(filter(None, ["cross_vocabulary", argument])), setup)
    stop = stop_for(setup, given and int(given[1]))
    siblings = setup.siblings if setup.fixed_tree or isinstance(stop, WhilePays) else 0
    return ModelDrafter(setup.session, setup.vocab_size, setup.coupled, stop, siblings, setup.depth)


def stop_for(setup: Setup, percent: int | None) -> Stop | None:
    """When a draft model built from this stops. percent: what the user said about its probability, if anything."""
    if percent is not None:
        return PathBelow(percent / 100) if percent else None
    if setup.confidence:
        return TokenBelow(setup.confidence)
    if setup.controller is None or setup.device.type != "cpu" or setup.fixed_tree:
        return None  # on a GPU waiting for every token's probability costs more than it saves
    return WhilePays(setup.controller)
