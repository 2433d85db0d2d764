"""Heads whose block has scores for each place, which the tokens drafted before that place then change.

A chain is given scores that were computed once for a whole block. B rows, K places up to the one that is drafted, H
hidden size, R rank, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from slipstream.models.heads.network import Linear


class Chain(Protocol):
    """Scores of a place once the tokens before it are known."""

    def __call__(self, scores: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        """[B, V] from the block's own scores [B, V] of the last of K places.

        outputs: [B, K, H] of the block's places; before: [B, K] the token before each of them.
        """


@dataclass(frozen=True)
class MarkovChain:
    """DSpark (arXiv 2607.05147): a product of rank R adds to the scores what the token before speaks for.

    tokens: [V, R]. gate, joint: with biases; of the kinds "gated" and "rnn", else None. token_ids: of `add`'s scores in
    the vocabulary, None for all.
    """

    tokens: Tensor
    add: Linear
    gate: Linear | None = None
    joint: Linear | None = None
    token_ids: Tensor | None = None

    def __call__(self, scores: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        added = self.add(self._state(outputs, before)).to(scores.dtype)
        if self.token_ids is None:
            return scores + added[:, : scores.shape[1]]
        return scores.index_add(1, self.token_ids, added)

    def _state(self, outputs: Tensor, before: Tensor) -> Tensor:
        if self.joint is not None:
            return self._recurrent_state(self.joint, outputs, before)
        token = embedding(before[:, -1], self.tokens)
        if self.gate is None:
            return token
        return torch.sigmoid(self.gate(torch.cat([outputs[:, -1], token], -1))) * token

    def _recurrent_state(self, joint: Linear, outputs: Tensor, before: Tensor) -> Tensor:
        """What the recurrence says of the last place, from the first place on: a block is short."""
        tokens = embedding(before, self.tokens)
        state = output = torch.zeros_like(tokens[:, 0])
        for place in range(before.shape[1]):
            joined = joint(torch.cat([state, tokens[:, place], outputs[:, place]], -1))
            gate, candidate, output = joined.chunk(3, -1)
            gate = gate.sigmoid()
            state = gate * state + (1 - gate) * candidate.tanh()
        return output.tanh()


@dataclass(frozen=True)
class Confidence:
    """DSpark's estimate of how likely the token that it drafts in a place is to be accepted, if those before it are.

    weight: [1, H + R] with tokens [V, R], a `MarkovChain`'s; [1, H] without. bias: [1].
    """

    weight: Tensor
    bias: Tensor
    tokens: Tensor | None

    def __call__(self, outputs: Tensor, before: Tensor) -> Tensor:
        """[B] probabilities. outputs: [B, H] of the place; before: [B] the token before it."""
        parts = [outputs] if self.tokens is None else [outputs, embedding(before, self.tokens).to(outputs.dtype)]
        return linear(torch.cat(parts, -1), self.weight, self.bias)[:, 0].float().sigmoid()


@dataclass(frozen=True)
class CandidateChain:
    """DFlash 2: only the likeliest `count` tokens of a place can follow, each by how well it fits to the one before.

    before, after: [V, R] of tokens; project: from outputs to R.
    """

    before: Tensor
    after: Tensor
    project: Linear
    count: int

    def __call__(self, scores: Tensor, outputs: Tensor, before: Tensor) -> Tensor:
        best, candidates = scores.topk(self.count)
        expected = embedding(before[:, -1], self.before) * self.project(outputs[:, -1])
        fit = (expected[:, None] * embedding(candidates, self.after)).sum(-1)
        return torch.full_like(scores, float("-inf")).scatter(1, candidates, best + fit.to(scores.dtype))
