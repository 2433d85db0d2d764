"""From logits to the law a request asked for, and draws from it.

The order of operations is that of Hugging Face `generate`: bias, penalties, bad words, minimum length, the request's
own processors; then, unless greedy, temperature, top-k, top-p, min-p. Position j of a row sees the committed tokens
plus the first j draft tokens. This module knows neither models nor acceptance.

Shapes: B rows, J positions, V vocabulary. `first` is the number of draft tokens that precede position 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.history import KINDS, NEVER
from slipstream.noise import Race, Stream, key
from slipstream.params import SamplingParams
from slipstream.types import Row

NONE = -1  # drawn where no token is left; harmless behind a rejection, an error if committed


class Sampler:
    """The sampling options of the rows of one batch, as tensors; made anew whenever the rows change."""

    def __init__(self, rows: Sequence[Row], race: Race, vocab_size: int, device: torch.device) -> None:
        self.rows = list(rows)
        self.race, self.vocab_size, self.device = race, vocab_size, device
        params = [row.params for row in rows]
        self._greedy = torch.tensor([p.temperature == 0 for p in params], device=device)
        self.all_greedy = all(p.temperature == 0 for p in params)
        self._warp = _Warp(params, device)
        made = [kind(self.rows, vocab_size, device) for kind in KINDS]
        self._history = [processor for processor in made if processor.active]
        self.plain = self.all_greedy and not self._history

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Tell the penalties what row number `row` of this batch has committed."""
        for processor in self._history:
            processor.advance(row, tokens)

    def scores(self, logits: Tensor, draft: Tensor, first: int = 0) -> Tensor:
        """Logits after everything that depends on the history. logits: [B, J, V]; draft: [B, >= first + J - 1]."""
        if not self._history:
            return logits.float()
        scores = logits.to(torch.float32, copy=True)
        for processor in self._history:
            processor.apply(scores, draft, first)
        return scores

    def probs(self, scores: Tensor) -> Tensor:
        """The law of each position, float32 [B, J, V]: one-hot for greedy rows."""
        if self.all_greedy:
            return _one_hot(scores)
        probs = torch.softmax(self._warp(scores), dim=-1)
        if self._history:  # bias and the like can leave a position without any token; its law is then zero
            probs = probs.nan_to_num(0.0)
        if bool(self._greedy.any()):
            probs = torch.where(self._greedy[:, None, None], _one_hot(scores), probs)
        return probs

    def choose(self, logits: Tensor, draft: Tensor) -> Tensor:
        """The target's own token at every position, [B, J]: what plain decoding would commit there."""
        if self.plain:
            return logits.argmax(-1)
        scores = self.scores(logits, draft)
        chosen = scores.argmax(-1) if self.all_greedy else self.draw(self.probs(scores))
        return chosen.masked_fill(torch.isneginf(scores.amax(-1)), NONE)

    def draw(self, probs: Tensor, first: int = 0, stream: Stream = Stream.TOKEN) -> Tensor:
        """One token per position from probs [B, J, V], by the noise of (seed, stream, absolute position) -> [B, J].

        The numbers of the streams other than TOKEN also depend on the round, because a position may come up again.
        """
        positions = range(first, first + probs.shape[1])
        keys = [self._key(row, stream, len(row.tokens) + j) for row in self.rows for j in positions]
        return self.race.draw(probs.flatten(0, 1), keys).view(probs.shape[:2])

    def draw_at(self, laws: Tensor, offsets: Sequence[int]) -> Tensor:
        """One token per row from laws [B, V], at `offsets[i]` positions after row i's committed tokens -> [B]."""
        positions = [len(row.tokens) + j for row, j in zip(self.rows, offsets, strict=True)]
        keys = [self._key(row, Stream.TOKEN, at) for row, at in zip(self.rows, positions, strict=True)]
        return self.race.draw(laws, keys).masked_fill(laws.amax(-1) <= 0, NONE)

    def round_keys(self, stream: Stream) -> list[int]:
        """One key per row for this round."""
        return [self._key(row, stream, len(row.tokens)) for row in self.rows]

    def _key(self, row: Row, stream: Stream, position: int) -> int:
        if stream is Stream.TOKEN:
            return key(row.seed, stream, position)
        return key(row.seed, stream, position, len(row.tokens))


def _one_hot(scores: Tensor) -> Tensor:
    hot = torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    return hot.masked_fill(torch.isneginf(scores.amax(-1, keepdim=True)), 0.0)


class _Warp:
    """Temperature, top-k, top-p and min-p of each row; rows that do not use an option pass through it unchanged."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, device=device)[:, None, None]

        self.temperature = column([max(p.temperature, 1e-30) if p.temperature else 1.0 for p in params])
        self.top_k = torch.tensor([p.top_k for p in params], device=device)
        self.max_top_k = max(p.top_k for p in params)
        self.top_p, self.min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
        self.any_top_p, self.any_min_p = any(p.top_p < 1 for p in params), any(p.min_p > 0 for p in params)

    def __call__(self, scores: Tensor) -> Tensor:
        best = scores.amax(-1, keepdim=True)
        scores = (scores - best.masked_fill(torch.isneginf(best), 0.0)) / self.temperature
        if self.max_top_k:
            scores = self._keep_top_k(scores)
        if self.any_top_p:
            scores = self._keep_top_p(scores)
        if self.any_min_p:
            probs = torch.softmax(scores, dim=-1)
            scores = scores.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), NEVER)
        return scores

    def _keep_top_k(self, scores: Tensor) -> Tensor:
        largest = scores.topk(min(self.max_top_k, scores.shape[-1]), dim=-1).values
        last = (self.top_k - 1).clamp(0, largest.shape[-1] - 1)[:, None, None].expand(-1, scores.shape[1], 1)
        below = scores < largest.gather(-1, last)
        return scores.masked_fill(below & (self.top_k > 0)[:, None, None], NEVER)

    def _keep_top_p(self, scores: Tensor) -> Tensor:
        ascending, order = scores.sort(dim=-1)
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
        removed &= self.top_p < 1
        removed[..., -1] = False
        return scores.masked_fill(removed.scatter(-1, order, removed), NEVER)
