"""A draft model with its own KV cache, and when it stops before it has drafted what was asked for.

Greedy rows get its likeliest tokens, sampled ones the winners of the race that the target will run with the same random
numbers (`match`), or tokens sampled from its own distribution (`block`, `rejection`). A draft may end by anything that
is known when it does, as long as the tokens sampled so far stay in it: which tokens the target is asked about is then
no choice among tokens (docs/exactness.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.interfaces import Drafter, DraftScorer, Extender, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rng import Stream, argmax
from slipstream.core.rounds import RowDraft
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.acceptance_model import bin_of, sibling_bin
from slipstream.draft_length.planner import MODEL, Planner
from slipstream.drafters import Setup, load
from slipstream.errors import UsageError

REPRODUCIBLE = 0.4  # least probability of the draft so far, where drafts must depend on nothing but the row
TRAITS = Traits(
    has_own_cache=True,
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


@dataclass(frozen=True)
class PathBelow:
    """A draft ends with the token that makes the draft model less sure of all its tokens than `threshold`."""

    threshold: float

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """See `Stop`."""
        return [prod(sure) < self.threshold for sure in chances]


@dataclass(frozen=True)
class TokenBelow:
    """The same of the last token alone; in greedy rows that is Hugging Face's `assistant_confidence_threshold`."""

    threshold: float

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """See `Stop`."""
        return [sure[-1] < self.threshold for sure in chances]


@dataclass(frozen=True)
class WhilePays:
    """All drafts end where another step of the draft model would cost more than it can be expected to bring.

    Rows whose request says how many tokens to draft get them. Where the text depends on the draft costs do not count,
    so that a seed gives the same text again.
    """

    planner: Planner

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """All rows at once, or row by row."""
        asked = [row.params.num_draft_tokens is not None for row in rows]
        if sampled:
            return [prod(sure) < REPRODUCIBLE and not is_asked for sure, is_asked in zip(chances, asked, strict=True)]
        wanting = [i for i, length in enumerate(lengths) if length > len(chances[i])]
        pays = self.planner.next_step_pays([rows[i] for i in wanting], [chances[i] for i in wanting], len(rows))
        return [not (pays or is_asked) for is_asked in asked]


@dataclass
class Line:
    """One row's draft on the host: its chain, how sure the draft model is of each token, and the next best ones."""

    tokens: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    others: list[list[tuple[int, float]]] = field(default_factory=list)

    def cut(self, length: int) -> Line:
        """Its first `length` tokens."""
        return Line(self.tokens[:length], self.chances[:length], self.others[:length])


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
    steps: forwards in a round at most. extender: goes on behind chains whose acceptance probabilities are known.
    """

    session: DraftScorer
    vocab_size: int
    coupled: bool = False
    stop: Stop | None = None
    siblings: int = 0
    depth: int = 0
    steps: int = MAX_DRAFT_TOKENS
    extender: Extender | None = None

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """One forward of the draft model per column; rows that want fewer columns are padded."""
        sampled = not (sampler.all_greedy or self.coupled)
        beside = 0 if sampled or not sampler.branching else self.siblings
        asked = list(map(partial(self._chain, 1 + beside if self.stop is None else 1), rows, lengths))
        width, ends = max(asked, default=0), list(asked)
        records = tuple(RowDraft(MODEL if n else "") for n in lengths)
        if width and sampler.plain and self.stop is None and not beside:
            drafted = self.session.draft_greedy(rows, width, self.vocab_size)
            if drafted is not None:
                self.session.keep_drafts(asked)
                drafted = drafted.to(sampler.device, non_blocking=True)
                return Draft(drafted, tuple(asked), steps=width, rows=records)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=self.session.backend.device)
        distributions = list[Tensor]()
        lines = [Line() for _ in rows]
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
                for line, best, chances in zip(lines, leaders.tolist(), sure.tolist(), strict=True):
                    line.tokens.append(best[0])
                    line.chances.append(chances[0])
                    line.others.append(list(zip(best[1:], chances[1:], strict=True)))
            if self.stop is not None:
                over = self.stop.ends(rows, asked, [line.chances for line in lines], sampled)
                ends = [min(end, j + 1) if is_over else end for end, is_over in zip(ends, over, strict=True)]
                if max(ends) <= j + 1:
                    break
        if width:
            self.session.keep_drafts(ends)
        steps, width = (j + 1 if width else 0), max(ends, default=0)
        learns = isinstance(self.stop, WhilePays)
        if not sampled and (learns or beside):
            lines = [line.cut(end) for line, end in zip(lines, ends, strict=True)]
            made = self._likely(rows, lengths, lines, sampler) if learns else _leftover(lengths, lines, sampler)
            return replace(made, steps=steps)
        draft = tokens[:, :width].to(sampler.device, non_blocking=True)
        probs = torch.cat(distributions[:width], dim=1) if sampled and distributions else None
        return Draft(draft, tuple(ends), probs, steps, rows=records)

    def _likely(self, rows: Sequence[Row], lengths: Sequence[int], lines: Sequence[Line], sampler: Sampler) -> Draft:
        """Chains and their runners-up, the likeliest nodes first, and what is known of them."""
        assert isinstance(self.stop, WhilePays)
        learned, trees, records = self.stop.planner.model_drafts, [], []
        for row, length, line in zip(rows, lengths, lines, strict=True):
            tokens, probs = list(line.tokens), learned.acceptance_probs(row, line.chances)
            record = record_of(length, line)
            first = [others[0] for others in line.others if others]
            tokens, probs = extended(self.extender, row, tokens, probs, length)
            runners_up = []
            if first and row.params.num_draft_tokens is None:
                beside = learned.runner_up_probs(row, line.chances, [chance for _, chance in first])
                pairs = enumerate(zip(first, beside, strict=False))
                runners_up = [(at, token, prob) for at, ((token, sure), prob) in pairs if sure]
            nodes, parents, probs_of_nodes = comb(tokens, probs, runners_up)
            trees.append((nodes[:length], parents[:length], (probs_of_nodes or [])[:length]))
            records.append(record)
        return _draft_of(trees, records, sampler)

    def _chain(self, wide: int, row: Row, length: int) -> int:
        """How many of so many tokens are a chain, beside each of which stand others."""
        ending = wide > 1 and length == row.remaining - 1
        return min(self.steps, min(self.depth, length) if self.depth and ending else -(-length // wide))

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


Tree = tuple[list[int], list[int], list[float] | None]  # tokens, parents and acceptance probabilities of nodes


def record_of(length: int, line: Line) -> RowDraft:
    """What is learned from a row's chain later. length: tokens it was asked for."""
    beside = [others[0] for others in line.others if others]
    runners_up = tuple(
        (token, sibling_bin(chance, other)) for chance, (token, other) in zip(line.chances, beside, strict=False)
    )
    return RowDraft(MODEL if length else "", None, tuple(map(bin_of, line.chances)), runners_up)


def extended(
    extender: Extender | None, row: Row, tokens: list[int], probs: list[float], length: int
) -> tuple[list[int], list[float]]:
    """A chain and its acceptance probabilities with what retrieval knows behind it, up to `length` tokens."""
    if extender is None or not probs:
        return tokens, probs
    more, more_probs = extender.extend(row, tokens, max(0, length - len(tokens)), probs[-1])
    return tokens + more, probs + more_probs


def comb(tokens: Sequence[int], probs: Sequence[float] | None, beside: Sequence[tuple[int, int, float]]) -> Tree:
    """A chain with leaves beside it, the likeliest nodes first where that is known, a chain's own before its leaves.

    beside: depth, token and acceptance probability of the leaves.
    """
    nodes = [(0.0 if probs is None else -probs[depth], depth, 0, token) for depth, token in enumerate(tokens)]
    for place, (depth, token, prob) in enumerate(beside, 1):
        nodes.append((-(prob if probs is None else min(prob, probs[depth])), depth, place, token))
    if probs is not None:
        nodes.sort()
    on_chain = {depth: at for at, (_, depth, place, _) in enumerate(nodes) if not place}
    parents = [on_chain.get(depth - 1, -1) for _, depth, _, _ in nodes]
    return [token for *_, token in nodes], parents, None if probs is None else [-negative for negative, *_ in nodes]


def _leftover(lengths: Sequence[int], lines: Sequence[Line], sampler: Sampler) -> Draft:
    """Chains, and beside them as many of the next best tokens as there is room for, the earliest first."""
    trees = []
    for length, line in zip(lengths, lines, strict=True):
        beside = [(at, token, 0.0) for at, others in enumerate(line.others) for token, sure in others if sure]
        trees.append(comb(line.tokens, None, beside[: length - len(line.tokens)]))
    return _draft_of(trees, [RowDraft(MODEL if n else "") for n in lengths], sampler)


def _draft_of(trees: Sequence[Tree], records: Sequence[RowDraft], sampler: Sampler) -> Draft:
    made = Draft.from_lists([tokens for tokens, _, _ in trees], sampler.device)
    rows = tuple(replace(row, acceptance_probs=probs) for row, (_, _, probs) in zip(records, trees, strict=True))
    branches = any(parents != list(range(-1, len(parents) - 1)) for _, parents, _ in trees)
    return replace(made, rows=rows, parents=tuple(tuple(parents) for _, parents, _ in trees) if branches else None)


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
    return ModelDrafter(
        setup.session, setup.vocab_size, setup.coupled, stop, siblings, setup.depth, setup.steps, setup.extender
    )


def stop_for(setup: Setup, percent: int | None) -> Stop | None:
    """When a draft model built from this stops. percent: what the user said about its probability, if anything."""
    if percent is not None:
        return PathBelow(percent / 100) if percent else None
    if setup.confidence:
        return TokenBelow(setup.confidence)
    if setup.planner is None or setup.device.type != "cpu" or setup.fixed_tree:
        return None  # on a GPU waiting for every token's probability costs more than it saves
    return WhilePays(setup.planner)
