"""A draft model with its own KV cache, and when it stops before it has drafted what was asked for.

Greedy rows get its likeliest tokens. Sampled rows get the winners of the race that the target will run with the same
random numbers (`match`), or tokens sampled from its own distribution (`block`, `rejection`). A token that ends a draft
stays in it: dropping it because of its value would bias the distribution (docs/exactness.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.interfaces import Drafter, DraftScorer, Extender, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rng import Stream, argmax
from slipstream.core.rounds import MODEL, RowDraft
from slipstream.core.types import Draft, Row, Traits
from slipstream.draft_length.acceptance_model import ModelDrafts, bin_of, sibling_bin
from slipstream.draft_length.planner import Planner
from slipstream.drafters import Setup, load
from slipstream.errors import UsageError
from slipstream.models.heads.network import all_scores

MIN_DRAFT_PROB = 0.4  # a less likely draft ends, where drafts must depend on the row alone
TRAITS = Traits(
    has_own_cache=True, default_length=6, preference=2, needs_draft_model=True, branches=True, in_other_engines=True
)


class Stop(Protocol):
    """Decides which rows' drafts end with the token drafted last."""

    @property
    def learned(self) -> ModelDrafts | None:
        """Acceptance learned by kind of token, from which drafts get acceptance probabilities; None without it."""
        return None

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        """For each row, True if its draft ends.

        chances[i]: the draft model's probability of each token of row i so far. lengths: numbers of requested tokens.
        sampled: the tokens are sampled from the draft model's distribution, so that the text depends on them.
        """


@dataclass(frozen=True)
class PathBelow(Stop):
    """Ends a draft when the product of its tokens' probabilities falls below `threshold`."""

    threshold: float

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        return [prod(row_chances) < self.threshold for row_chances in chances]


@dataclass(frozen=True)
class TokenBelow(Stop):
    """Ends a draft with its first token less likely than `threshold`.

    Greedy drafts end as with Hugging Face's `assistant_confidence_threshold`.
    """

    threshold: float

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        return [row_chances[-1] < self.threshold for row_chances in chances]


@dataclass(frozen=True)
class WhilePays(Stop):
    """Ends all drafts when another step of the draft model would cost more than it is expected to bring.

    Rows whose request sets a draft length get that many tokens. Where the text depends on the draft, the draft's
    probability decides instead of costs, so that a seed gives the same text again.
    """

    planner: Planner

    @property
    def learned(self) -> ModelDrafts:
        return self.planner.model_drafts

    def ends(
        self, rows: Sequence[Row], lengths: Sequence[int], chances: Sequence[Sequence[float]], sampled: bool
    ) -> list[bool]:
        is_set = [row.params.num_draft_tokens is not None for row in rows]
        if sampled:
            return [
                prod(row_chances) < MIN_DRAFT_PROB and not has_length
                for row_chances, has_length in zip(chances, is_set, strict=True)
            ]
        unfinished = [i for i, length in enumerate(lengths) if length > len(chances[i])]
        pays = self.planner.next_step_pays([rows[i] for i in unfinished], [chances[i] for i in unfinished], len(rows))
        return [not (pays or has_length) for has_length in is_set]


@dataclass
class DraftChain:
    """One row's draft on the host."""

    tokens: list[int] = field(default_factory=list)
    # the draft model's probability of each; of a head that estimates acceptance itself (DSpark), its estimates
    chances: list[float] = field(default_factory=list)
    # for each token, the next best ones and their probabilities, best first
    runners_up: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, best: Sequence[int], chances: Sequence[float]) -> None:
        """Append a token with its runners-up. best: the token and they, best first; chances: theirs."""
        self.tokens.append(best[0])
        self.chances.append(chances[0])
        self.runners_up.append(list(zip(best[1:], chances[1:], strict=True)))

    def cut(self, length: int) -> DraftChain:
        """The draft of the first `length` tokens."""
        return DraftChain(self.tokens[:length], self.chances[:length], self.runners_up[:length])


@dataclass
class ModelDrafter:
    """Drafts token by token from the draft model's distribution under the request's own options."""

    session: DraftScorer
    vocab_size: int  # the target's; a draft model of another size (padding) is cut or filled with impossible tokens
    # sample with the random numbers that the target will use at that position, as acceptance "match" needs; a token is
    # then a function of these numbers alone, so the draft counts as one-hot
    coupled: bool = False
    # ends a row's draft before it has the tokens asked for
    stop: Stop | None = None
    # alternatives to each token of a one-hot draft: the draft model's next best, or the next fastest in the race that
    # the target will run; without `stop` they count among the tokens asked for
    siblings: int = 0
    depth: int = 0  # of the chain, which comes first where the end of an output leaves no room for all alternatives
    steps: int = MAX_DRAFT_TOKENS  # most forward passes in a round
    extender: Extender | None = None  # continues chains whose acceptance probabilities are known

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """One forward of the draft model per column; rows that want fewer columns are padded."""
        sampled = not (sampler.all_greedy or self.coupled)
        siblings = 0 if sampled or not sampler.branching else self.siblings
        per_level = 1 + siblings if self.stop is None else 1
        num_steps = [self._chain_length(per_level, row, n) for row, n in zip(rows, lengths, strict=True)]
        width = self.session.begin(max(num_steps, default=0))
        ends = num_steps = [min(count, width) for count in num_steps]
        records = tuple(RowDraft(MODEL if n else "") for n in lengths)
        if width and sampler.plain and self.stop is None and not siblings:
            drafted = self.session.draft_greedy(rows, width, self.vocab_size)
            if drafted is not None:
                self.session.keep_drafts(ends)
                drafted = drafted.to(sampler.device, non_blocking=True)
                return Draft(drafted, tuple(ends), steps=width, rows=records)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64, device=self.session.backend.device)
        chains, distributions, steps = [DraftChain() for _ in rows], list[Tensor](), 0
        while (place := steps) < max(ends, default=0):
            steps += 1
            logits = self.session.score(rows, tokens[:, :place], [place] * len(rows), keep=1)
            token_ids = None if sampled or sampler.changes_logits else self.session.token_ids
            scores = (self._fit(logits) if token_ids is None else logits).to(sampler.device)
            if not sampler.plain:
                scores = sampler.scores(scores, tokens[:, :place].to(sampler.device), first=place)
                ends = _before_dead_ends(rows, scores[:, 0], ends, place)
                if max(ends) <= place:
                    break
            if sampled:
                distributions.append(sampler.probs(scores))
                leaders, chances = self._sampled(scores[:, 0], distributions, sampler)
            else:
                leaders, chances = self._leaders(scores, place, sampler, 1 + siblings, token_ids)
            tokens[:, place] = leaders[:, 0]
            if chances is not None:
                estimates = self.session.acceptance(rows, tokens[:, :place])
                if estimates is not None:
                    chances[:, 0] = estimates.to(chances.device)
                for chain, best, best_chances in zip(chains, leaders.tolist(), chances.tolist(), strict=True):
                    chain.add(best, best_chances)
            if self.stop is not None:
                has_ended = self.stop.ends(rows, num_steps, [chain.chances for chain in chains], sampled)
                ends = [min(end, steps) if is_over else end for end, is_over in zip(ends, has_ended, strict=True)]
        if steps:
            self.session.keep_drafts(ends)
        learned = None if self.stop is None else self.stop.learned
        if not sampled and (learned is not None or siblings):
            chains = [chain.cut(end) for chain, end in zip(chains, ends, strict=True)]
            if learned is None:
                return replace(_filled(lengths, chains, sampler), steps=steps)
            return replace(self._likeliest(rows, lengths, chains, learned, sampler), steps=steps)
        width = max(ends, default=0)
        probs = torch.cat(distributions[:width], dim=1) if sampled and distributions else None
        return Draft(tokens[:, :width].to(sampler.device, non_blocking=True), tuple(ends), probs, steps, rows=records)

    def _likeliest(
        self,
        rows: Sequence[Row],
        lengths: Sequence[int],
        chains: Sequence[DraftChain],
        learned: ModelDrafts,
        sampler: Sampler,
    ) -> Draft:
        """Chains and their runners-up, the likeliest nodes first, with acceptance probabilities."""
        trees, records = [], []
        for row, length, chain in zip(rows, lengths, chains, strict=True):
            firsts = [runners_up[0] for runners_up in chain.runners_up if runners_up]
            records.append(record_of(length, chain.chances, firsts))
            probs = learned.acceptance_probs(row, chain.chances)
            tokens, probs = extended(self.extender, row, chain.tokens, probs, length)
            leaves = []
            if firsts and row.params.num_draft_tokens is None:
                leaf_probs = learned.runner_up_probs(row, chain.chances, [chance for _, chance in firsts])
                pairs = enumerate(zip(firsts, leaf_probs, strict=False))
                leaves = [(depth, token, prob) for depth, ((token, chance), prob) in pairs if chance]
            nodes, parents, probs_of_nodes = comb(tokens, probs, leaves)
            trees.append((nodes[:length], parents[:length], (probs_of_nodes or [])[:length]))
        return _draft_of(trees, records, sampler)

    def _chain_length(self, tokens_per_level: int, row: Row, length: int) -> int:
        """The depth of a tree of `length` tokens with this many on each level."""
        is_cut_short = tokens_per_level > 1 and length == row.remaining - 1  # by the end of the text
        depth = min(self.depth, length) if self.depth and is_cut_short else -(-length // tokens_per_level)
        return min(self.steps, depth)

    def _leaders(
        self, scores: Tensor, place: int, sampler: Sampler, count: int, token_ids: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A one-hot draft's next token and its runners-up [B, count], and the draft model's confidence in each.

        None for the confidence where nothing needs it. scores: [B, 1, V] of the draft token at `place`. token_ids: [V]
        of the scores; None for all.
        """
        if self.stop is not None or count > 1:
            return sampler.leaders(scores[:, 0], place, count, token_ids)
        if token_ids is not None:
            if sampler.plain:
                return token_ids[argmax(scores)], None
            return sampler.leaders(scores[:, 0], place, 1, token_ids)[0], None
        return (argmax(scores) if sampler.plain else sampler.draw(sampler.probs(scores), place, Stream.TOKEN)), None

    def _sampled(
        self, scores: Tensor, distributions: Sequence[Tensor], sampler: Sampler
    ) -> tuple[Tensor, Tensor | None]:
        """The next token [B, 1], drawn from the last of the draft's distributions, and its probability.

        None for the probability where nothing needs it. scores: [B, V], whose softmax greedy rows take.
        """
        first = sampler.draw(distributions[-1], len(distributions) - 1, Stream.DRAFT)
        if self.stop is None:
            return first, None
        greedy = torch.tensor([row.params.temperature == 0 for row in sampler.rows], device=scores.device)
        probs = distributions[-1][:, 0]
        if bool(greedy.any()):  # softmax gives NaN where a constraint allows no token
            probs = torch.where(greedy[:, None], scores.float().softmax(-1).nan_to_num(0.0), probs)
        return first, probs.gather(1, first)

    def _fit(self, logits: Tensor) -> Tensor:
        """[..., V] of the target's vocabulary: tokens that the draft model cannot propose are impossible."""
        if self.session.token_ids is not None:
            return all_scores(logits, self.session.token_ids, self.vocab_size)
        extra = self.vocab_size - logits.shape[-1]
        if extra <= 0:
            return logits[..., : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, extra), value=float("-inf"))


def _before_dead_ends(rows: Sequence[Row], scores: Tensor, ends: Sequence[int], index: int) -> list[int]:
    """`ends`, moved to `index` for drafts whose constraint leaves the draft model no token to choose there.

    scores: [B, V] of the draft tokens at `index`.
    """
    if all(row.constraint is None for row in rows):
        return list(ends)
    dead = (scores.amax(-1) == float("-inf")).tolist()
    return [min(end, index) if is_dead else end for end, is_dead in zip(ends, dead, strict=True)]


Tree = tuple[list[int], list[int], list[float] | None]  # tokens, parents and acceptance probabilities of nodes


def record_of(length: int, chances: Sequence[float], firsts: Sequence[tuple[int, float]] = ()) -> RowDraft:
    """The record from which `ModelDrafts` learns of a row's chain.

    length: number of tokens that were asked for. chances: the draft model's probability of each token drafted. firsts:
    each token's first runner-up and its probability.
    """
    runners_up = tuple(
        (token, sibling_bin(chance, runner_up_chance))
        for chance, (token, runner_up_chance) in zip(chances, firsts, strict=False)
    )
    return RowDraft(MODEL if length else "", None, tuple(map(bin_of, chances)), runners_up)


def extended(
    extender: Extender | None, row: Row, tokens: list[int], probs: list[float], length: int
) -> tuple[list[int], list[float]]:
    """A chain, continued by retrieval up to `length` tokens, and its acceptance probabilities."""
    if extender is None or not probs:
        return tokens, probs
    more, more_probs = extender.extend(row, tokens, max(0, length - len(tokens)), probs[-1])
    return tokens + more, probs + more_probs


def comb(tokens: Sequence[int], probs: Sequence[float] | None, leaves: Sequence[tuple[int, int, float]]) -> Tree:
    """A chain with leaves next to its tokens: with `probs` the likeliest nodes first, else the chain before the leaves.

    leaves: depth, token and acceptance probability.
    """
    nodes = [(0.0 if probs is None else -probs[depth], depth, 0, token) for depth, token in enumerate(tokens)]
    for place, (depth, token, prob) in enumerate(leaves, 1):
        nodes.append((-(prob if probs is None else min(prob, probs[depth])), depth, place, token))
    if probs is not None:
        nodes.sort()
    on_chain = {depth: number for number, (_, depth, place, _) in enumerate(nodes) if not place}
    parents = [on_chain.get(depth - 1, -1) for _, depth, _, _ in nodes]
    return [token for *_, token in nodes], parents, None if probs is None else [-negative for negative, *_ in nodes]


def _filled(lengths: Sequence[int], chains: Sequence[DraftChain], sampler: Sampler) -> Draft:
    """Chains, and as many runners-up as there is room for, the earliest first."""
    trees = []
    for length, chain in zip(lengths, chains, strict=True):
        leaves = [
            (depth, token, 0.0)
            for depth, runners_up in enumerate(chain.runners_up)
            for token, chance in runners_up
            if chance
        ]
        trees.append(comb(chain.tokens, None, leaves[: length - len(chain.tokens)]))
    return _draft_of(trees, [RowDraft(MODEL if n else "") for n in lengths], sampler)


def _draft_of(trees: Sequence[Tree], records: Sequence[RowDraft], sampler: Sampler) -> Draft:
    draft = Draft.from_lists([tokens for tokens, _, _ in trees], sampler.device)
    rows = tuple(replace(row, acceptance_probs=probs) for row, (_, _, probs) in zip(records, trees, strict=True))
    branches = any(parents != list(range(-1, len(parents) - 1)) for _, parents, _ in trees)
    return replace(draft, rows=rows, parents=tuple(tuple(parents) for _, parents, _ in trees) if branches else None)


def build(setup: Setup, argument: str) -> Drafter:
    """Build the drafter "model", or "model:p=PERCENT", which stops when its draft's probability falls below PERCENT.

    Without an argument it drafts as many tokens as are asked for, or, where costs decide, as many as pay.
    """
    match = re.fullmatch(r"p=(\d{1,2})", argument)
    if argument and match is None:
        raise UsageError(f"drafter='model:{argument}'; allowed: 'model', or 'model:p=PERCENT' from 0 to 99")
    if argument and setup.fixed_tree:
        raise UsageError(f"drafter='model:{argument}' with a tree; allowed: 'model', which then drafts the whole tree")
    if setup.session is None:
        raise UsageError("drafter='model' needs a draft model; give draft=... (command line: --draft)")
    if setup.bridged is not None:
        other: Drafter = load(":".join(filter(None, ["cross_vocabulary", argument])), setup)
        return other
    stop = stop_for(setup, match and int(match[1]))
    siblings = setup.siblings if setup.fixed_tree or (stop is not None and stop.learned is not None) else 0
    return ModelDrafter(
        setup.session, setup.vocab_size, setup.coupled, stop, siblings, setup.depth, setup.steps, setup.extender
    )


def stop_for(setup: Setup, percent: int | None) -> Stop | None:
    """The rule that ends drafts of a draft model of this setup. percent: the user's p=PERCENT, None without one."""
    if percent is not None:
        return PathBelow(percent / 100) if percent else None
    if setup.confidence:
        return TokenBelow(setup.confidence)
    if setup.planner is None or setup.device.type != "cpu" or setup.fixed_tree:
        return None  # on a GPU waiting for every token's probability costs more than it saves
    return WhilePays(setup.planner)
