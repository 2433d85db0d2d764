"""The data the loop works on: drafts, verdicts and rows.

This module knows neither models nor sampling. Shapes: B rows, K the widest draft of the round, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from slipstream.core.rounds import FinishReason, Round, RowDraft

T = TypeVar("T")


class RequestOptions(Protocol):
    """The part of a request's options that the loop reads; `SamplingParams` has these and more."""

    @property
    def temperature(self) -> float:
        """0 for greedy decoding."""

    @property
    def min_tokens(self) -> int:
        """The text has at least this many tokens."""

    @property
    def max_tokens(self) -> int:
        """The text has at most this many tokens."""

    @property
    def num_draft_tokens(self) -> int | None:
        """This request's own draft length; None lets the policy choose."""

    @property
    def logprobs(self) -> int | None:
        """Number of log-probabilities to report per token besides its own; None to report none, not even its own."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens and the distribution they were sampled from."""

    tokens: Tensor  # [B, K] int64; row i proposes its first `lengths[i]` columns, the rest is padding
    lengths: tuple[int, ...]  # of each row, 0 to K; they are chosen on the host, so they stay there
    probs: Tensor | None = None  # [B, K, V] the distribution each token was sampled from; None: one-hot
    steps: int = 0  # forward passes of a draft model that it took
    # of a tree, None for chains: for each token of a row the number of the one it follows, -1 for the committed tokens;
    # the first child of a token continues the chain; trees are one-hot, verified by `match`
    parents: tuple[tuple[int, ...], ...] | None = None
    rows: tuple[RowDraft, ...] = ()  # one record per row; empty if nothing is known about the draft

    @property
    def width(self) -> int:
        """K, the number of columns."""
        return self.tokens.shape[1]

    @cached_property
    def lengths_on_device(self) -> Tensor:
        """[B, 1] int64, where the tokens are; sent without waiting for the device."""
        return torch.tensor(self.lengths, dtype=torch.int64)[:, None].to(self.tokens.device, non_blocking=True)

    @property
    def records(self) -> tuple[RowDraft, ...]:
        """`rows`; empty records if the draft has none."""
        return self.rows or (RowDraft(),) * len(self.lengths)

    @property
    def acceptance_probs(self) -> list[Sequence[float] | None]:
        """For each row, the probability that its first 1, 2, ... tokens are all accepted; None where unknown."""
        return [row.acceptance_probs for row in self.records]

    @property
    def promised(self) -> list[float]:
        """For each row, the expected number of accepted tokens; where unknown, 1.2, or 0.6 for a single token."""
        pairs = zip(self.lengths, self.acceptance_probs, strict=True)
        return [min(1.2, 0.6 * length) if probs is None else sum(probs) for length, probs in pairs]

    def cut(self, lengths: Sequence[int]) -> Draft:
        """This draft with at most lengths[i] tokens in row i."""
        shorter = tuple(map(min, self.lengths, lengths))
        if shorter == self.lengths:
            return self
        width = max(shorter, default=0)
        probs = None if self.probs is None else self.probs[:, :width]
        parents = self.parents and tuple(row[:n] for row, n in zip(self.parents, shorter, strict=True))
        rows = tuple(row.cut(n) for row, n in zip(self.rows, shorter, strict=False))
        return replace(self, tokens=self.tokens[:, :width], lengths=shorter, probs=probs, parents=parents, rows=rows)

    @staticmethod
    def where(chosen: Sequence[bool], first: Draft, second: Draft) -> Draft:
        """Row by row, `first` where chosen[i], else `second`; the steps are those of both."""
        if len(set(chosen)) == 1:
            return replace(first if chosen[0] else second, steps=first.steps + second.steps)
        width = max(first.width, second.width)
        mask = torch.tensor(chosen).to(first.tokens.device, non_blocking=True)

        def choose(firsts: Sequence[T], seconds: Sequence[T]) -> tuple[T, ...]:
            return tuple(a if is_first else b for is_first, a, b in zip(chosen, firsts, seconds, strict=True))

        first_tokens, second_tokens = (pad(draft.tokens, (0, width - draft.width)) for draft in (first, second))
        probs = parents = None
        if first.probs is not None or second.probs is not None:
            size = next(draft.probs.shape[-1] for draft in (first, second) if draft.probs is not None)
            first_probs, second_probs = (_widened_probs(draft, width, size) for draft in (first, second))
            probs = torch.where(mask[:, None, None], first_probs, second_probs)
        if first.parents is not None or second.parents is not None:
            chains = [[tuple(range(-1, n - 1)) for n in draft.lengths] for draft in (first, second)]
            parents = choose(first.parents or chains[0], second.parents or chains[1])
        lengths, rows = choose(first.lengths, second.lengths), choose(first.records, second.records)
        tokens = torch.where(mask[:, None], first_tokens, second_tokens)
        return Draft(tokens, lengths, probs, first.steps + second.steps, parents, rows)

    @staticmethod
    def empty(rows: int, device: torch.device) -> Draft:
        """A draft that proposes nothing: plain decoding."""
        return Draft(torch.empty(rows, 0, dtype=torch.int64, device=device), (0,) * rows)

    @staticmethod
    def from_lists(
        proposals: Sequence[Sequence[int]],
        device: torch.device,
        acceptance_probs: Sequence[Sequence[float] | None] | None = None,
        source: str = "",
    ) -> Draft:
        """A one-hot draft from one list of token ids per row, and their acceptance probabilities where known."""
        width = max(map(len, proposals), default=0)
        probs_of_rows = (None,) * len(proposals) if acceptance_probs is None else acceptance_probs
        rows = tuple(RowDraft(source, probs) for probs in probs_of_rows)
        if not width:
            return replace(Draft.empty(len(proposals), device), rows=rows)
        padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in proposals]
        # no dtype is given, so that floats stay floats, which the check of drafts refuses by name
        tokens = torch.tensor(padded).to(device, non_blocking=True)
        return Draft(tokens, tuple(map(len, proposals)), rows=rows)


def _widened_probs(draft: Draft, width: int, size: int) -> Tensor:
    """The distributions of a draft [B, width, size]; a one-hot draft's come from its tokens."""
    if draft.probs is not None:
        return pad(draft.probs, (0, 0, 0, width - draft.width))
    return one_hot(pad(draft.tokens, (0, width - draft.width)), size).float()


@dataclass(frozen=True)
class Verdict:
    """The target's decision on a draft."""

    accepted: Tensor  # [B] number of accepted tokens
    next_token: Tensor  # [B] the token that follows them
    path: Tensor | None = None  # [B, K], for a tree: numbers of the accepted tokens, accepted[i] of row i, then padding


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of a prompt, as the target reads them."""

    digests: Mapping[int, str]  # by the position of an image's first token, the digest of its pixels
    places: Tensor  # [N] ascending; positions of tokens that only stand for a part of an image
    features: Tensor  # [N, H] what enters the first decoder layer there
    rotations: Tensor | None = None  # [3, prompt's length] rotary positions, if they are not the tokens' positions
    blocks: tuple[tuple[int, int], ...] = ()  # first and end of those that see each other, and are read in one forward


@dataclass(eq=False)
class Row:
    """One sequence: its committed tokens (the only truth about it), its options and its rounds so far."""

    index: int
    tokens: list[int]
    params: RequestOptions
    seed: int
    end_ids: frozenset[int] = frozenset()
    # looks for stop strings; called with a round's tokens up to the first end token, and the number, from 1 on, of
    # the first token that may end the row; returns the number of the token that completes a stop string, or None
    find_stop: Callable[[Sequence[int], int], int | None] | None = None
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None  # why the row failed, with finish reason "error"
    messages: Sequence[Any] | None = None  # the chat that the prompt was rendered from, for draft models' own templates
    open_end: int = 1  # trailing tokens that may still change, or are read again
    prediction: Sequence[int] = ()  # token ids that the output will probably resemble
    call_rows: Sequence[Row] = ()  # all rows of a call that returns when the last of them has ended
    constraint: object | None = None  # the grammar that the text must match; only the sampler knows what it means
    group: str = ""  # rows of different groups share only averages of acceptance and cost: no cache, no learned texts
    text: object | None = None  # the output as text, if it is read as it grows; only `text/` knows what it means
    images: PromptImages | None = None  # of the prompt; only the target sees them
    quotable: Sequence[Sequence[int]] = ()  # further texts, as token ids, of which the output may quote parts
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def output(self) -> list[int]:
        """Committed tokens after the prompt."""
        return self.tokens[self.prompt_length :]

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Number of tokens that the row may still generate."""
        return self.prompt_length + self.params.max_tokens - len(self.tokens)

    def fail(self, error: Exception) -> None:
        """End this row alone; what it has committed stays."""
        self.error, self.finish_reason = error, "error"

    def commit(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Append tokens up to the first end and return those appended.

        Ends are an end-of-sequence or stop id, a stop string, and the length limit, which counts last.
        """
        num_before = self.num_output_tokens
        room, first = self.params.max_tokens - num_before, max(1, self.params.min_tokens - num_before)
        tokens = tokens[:room]
        end = next((n for n, token in enumerate(tokens[first - 1 :], first) if token in self.end_ids), None)
        if self.find_stop is not None:
            end = self.find_stop(tokens[:end], first) or end
        if end is not None:
            self.finish_reason = "stop"
        elif len(tokens) == room:
            self.finish_reason = "length"
        committed = tuple(tokens[:end])
        self.tokens.extend(committed)
        return committed

    def true_length(self, round_index: int, base: int) -> int:
        """How many leading tokens of a cache, which a round filled with the row and its draft, are committed by now.

        base: number committed before that round, which is the result if the round was interrupted before its commit.
        """
        if round_index >= len(self.rounds):
            return base
        round = self.rounds[round_index]
        return round.start + round.num_accepted_on_chain


@dataclass(frozen=True, kw_only=True)
class Traits:
    """A drafter's declaration of its properties; `auto`, `--help`, the bench and the tests go by this alone."""

    # under rules other than `match`, it samples drafts for sampled rows from a distribution of its own (`Draft.probs`);
    # under `match`, and for our own drafters under `auto` (`Setup.coupled`), every draft is one-hot
    samples: bool = True
    needs_forwards: bool = True  # each drafted token takes a forward of a model; else only verifying it takes time
    has_own_cache: bool = False  # it has a KV cache of its own that must read a text before the first draft
    default_length: int = 5  # tokens per round where neither the user nor measured costs say how many
    preference: int = 0  # `auto` takes the drafter of the highest one whose needs are met; 0 is never taken
    needs_draft_model: bool = False  # `auto` takes it only with a draft model
    needs_cost_model: bool = False  # `auto` takes it only where costs are known
    branches: bool = False  # it proposes alternatives to the tokens of its chains, where trees are verified
    other_vocabulary: bool = False  # for draft models of another vocabulary: `model` becomes this drafter for them
    in_other_engines: bool = False  # inference engines have it too: `tune` compares it, and says how to set it there


@runtime_checkable
class Declared(Protocol):
    """Optional capability of a user's drafter object: declares its traits. An object without it has the defaults."""

    @property
    def traits(self) -> Traits:
        """The traits that it declares."""
