"""The facts a round leaves behind, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "cancelled", "error"]
Origin = Literal["accepted", "forced", "recovered", "bonus", "plain"]


@dataclass(frozen=True)
class Seconds:
    """Seconds that the parts of one step took. On a GPU the parts only measure issuing the work; the total is exact."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one output position: log-softmax of the target's raw logits, in float32.

    logprob: of the committed token; top: ids and log-probabilities of the most likely tokens, the likeliest first.
    Sampling options (temperature, penalties, ...) do not enter.
    token, top_tokens: the texts of these tokens, set in `Result.logprobs` only.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    token: str | None = field(default=None, compare=False)
    top_tokens: tuple[str, ...] = field(default=(), compare=False)


# sources of drafts: the request's own prediction, a model (a forward for each token), text that was looked up
PREDICTION, MODEL, RETRIEVAL = "prediction", "model", "retrieval"


@dataclass(frozen=True)
class RowDraft:
    """The origin of one row's draft, and what its source reports about it.

    A draft with acceptance probabilities may be cut before it is verified, so its tokens must not have been sampled.
    """

    source: str = ""  # one of those above; "" if the drafter does not name one
    # the probability that the first 1, 2, ... tokens are all accepted; for a tree, that each node and its path are;
    # None where the source cannot tell
    acceptance_probs: Sequence[float] | None = None
    kinds: tuple[int, ...] = ()  # of the proposed tokens, the first of the main chain; see `acceptance_model`
    runners_up: tuple[tuple[int, int], ...] = ()  # for each of them, the next best token and its kind
    forced: tuple[int, int] = (0, 0)  # number of first and of last tokens that a constraint forces

    def cut(self, length: int) -> RowDraft:
        """The record of a draft that is cut to its first `length` tokens."""
        return replace(self, acceptance_probs=self.acceptance_probs and self.acceptance_probs[:length])


@dataclass(frozen=True)
class Round:
    """One row's share of one draft-verify-accept-commit cycle, on the host."""

    row: int
    step: int  # numbers the forward pass of the target that the rows of a batch share
    num_rows: int  # in that batch
    start: int  # position of the first committed token, counted from the first prompt token
    draft: tuple[int, ...]
    tokens: tuple[int, ...]  # committed in this round
    num_accepted_tokens: int  # the first of `tokens`, which came from `draft`
    rejected: bool  # the token after them replaces a draft token
    finish_reason: FinishReason | None = None
    seconds: Seconds = field(default_factory=lambda: Seconds())  # of the whole step
    num_draft_steps: int = 0  # forward passes of the draft model in the whole step
    origin: RowDraft = field(default=RowDraft(), compare=False, repr=False)
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each of `tokens`, if the request asks for them
    # of a tree, None for a chain: for each draft token the number of the one it follows, the main chain first
    parents: tuple[int, ...] | None = None
    path: tuple[int, ...] | None = None  # of a tree: the numbers of the accepted draft tokens
    num_prediction_tokens: int | None = None  # drafted from the request's prediction; None if it has none
    # distinct experts that the step's forward read in a layer, on average over the layers; None for a dense model, and
    # where the token comes from reading the prompt
    experts_read: float | None = None
    # of the whole step, as plain decoding would have taken it, about; None if not measured, or for a token that comes
    # from reading the prompt
    plain_seconds: float | None = None

    @property
    def forced(self) -> tuple[int, int]:
        """Number of the draft's first and of its last tokens that a constraint forced; no drafter proposed them."""
        return self.origin.forced

    @property
    def without_forced(self) -> Round:
        """The round as if a constraint had forced nothing: only the drafter's tokens and what became of them."""
        before, after = self.origin.forced
        if not before + after:
            return self
        draft = self.draft[before : len(self.draft) - after]
        accepted = max(0, min(self.num_accepted_tokens - before, len(draft)))
        rejected = self.rejected and 0 <= self.num_accepted_tokens - before < len(draft)
        parents = self.parents and tuple(max(-1, parent - before) for parent in self.parents[before:])
        path = self.path and tuple(node - before for node in self.path[before:])
        origin = replace(self.origin, forced=(0, 0))
        moved = replace(self, start=self.start + before, tokens=self.tokens[before:], parents=parents, path=path)
        return replace(moved, draft=draft, num_accepted_tokens=accepted, rejected=rejected, origin=origin)

    @property
    def chain(self) -> tuple[int, ...]:
        """The draft's main chain."""
        return self.draft if self.parents is None else self.draft[: chain_end(self.parents)]

    @property
    def unaccepted(self) -> tuple[int, ...]:
        """Draft tokens that were not accepted."""
        if self.path is None:
            return self.draft[self.num_accepted_tokens :]
        return tuple(token for node, token in enumerate(self.draft) if node not in self.path)

    @property
    def num_levels(self) -> int:
        """The number of levels of a tree; of a chain, its length."""
        return len(self.draft) if self.parents is None else 1 + max(depths(self.parents), default=-1)

    @property
    def num_accepted_on_chain(self) -> int:
        """Number of accepted tokens on the main chain, from its beginning on."""
        return self.num_accepted_tokens if self.path is None else num_consecutive(self.path)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens verified in this round. Tokens that were cut from the draft before that are not counted anywhere."""
        return len(self.draft)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """The origin of each committed token."""
        last: Origin = "recovered" if self.rejected else "bonus" if self.draft else "plain"
        extra = len(self.tokens) - self.num_accepted_tokens
        before, after = self.origin.forced
        drafted = range(before, len(self.draft) - after)
        accepted: list[Origin] = ["accepted" if i in drafted else "forced" for i in range(self.num_accepted_tokens)]
        return (*accepted, *(last,) * extra)


def num_consecutive(numbers: Sequence[int], first: int = 0) -> int:
    """Length of the longest beginning that counts up: first, first + 1, ..."""
    return next((i for i, number in enumerate(numbers) if number != first + i), len(numbers))


def chain_end(parents: Sequence[int]) -> int:
    """Number of nodes in the main chain of an arranged tree: the first follows -1, each other the one before it."""
    return num_consecutive(parents, -1)


def depths(parents: Sequence[int]) -> list[int]:
    """For each node of an arranged tree, the number of nodes between it and the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def token_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """For each token its own log-probability and the `count` highest. logits: [J, V], the target's at each token.

    Takes one transfer from the device.
    """
    logprobs = logits[: len(tokens)].float().log_softmax(-1)
    chosen = logprobs.gather(-1, torch.tensor(tokens, dtype=torch.int64).to(logits.device)[:, None])
    values, ids = logprobs.topk(count, dim=-1)
    table = torch.cat([chosen.double(), values.double(), ids.double()], dim=1).tolist()  # ids are exact in float64
    return tuple(
        TokenLogprobs(token, line[0], tuple(zip(map(int, line[1 + count :]), line[1 : 1 + count], strict=True)))
        for token, line in zip(tokens, table, strict=True)
    )
