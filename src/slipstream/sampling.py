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

from slipstream.noise import Race, Stream, key
from slipstream.params import Processor, SamplingParams
from slipstream.types import Row, UsageError

NEVER = float("-inf")
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
        kinds = (_FixedBias, _Penalties, _BadWords, _MinTokens, _Processors)  # the order of `generate`
        self._history = [processor for kind in kinds if (processor := kind(self)).active]
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


class _History:
    """One kind of processor: `apply` edits scores [B, J, V] in place. Inactive ones are left out of the loop."""

    active = False

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        raise AssertionError(f"{type(self).__name__} is not active")

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Only processors that keep counts need to be told."""


class _FixedBias(_History):
    """logit_bias, and bad words of one token (a bias of -inf)."""

    def __init__(self, sampler: Sampler) -> None:
        entries = [
            (i, token, bias)
            for i, row in enumerate(sampler.rows)
            for token, bias in [
                *row.params.logit_bias.items(),
                *((word[0], NEVER) for word in _words(row) if len(word) == 1),
            ]
        ]
        self.active = bool(entries)
        if self.active:
            self._bias = torch.zeros(len(sampler.rows), 1, sampler.vocab_size, device=sampler.device)
            for i, token, bias in entries:
                self._bias[i, 0, token] += bias

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        scores += self._bias


class _Penalties(_History):
    """Repetition (Keskar et al. 2019, section 4.1; prompt and output), presence and frequency penalty (output only)."""

    def __init__(self, sampler: Sampler) -> None:
        params = [row.params for row in sampler.rows]
        used = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        self.active = any(values != (1.0, 0.0, 0.0) for values in used)
        if not self.active:
            return
        shape = (len(params), sampler.vocab_size)
        self._repetition, self._presence, self._frequency = torch.tensor(used, device=sampler.device).T[:, :, None]
        self._seen = torch.zeros(shape, dtype=torch.bool, device=sampler.device)
        self._counts = torch.zeros(shape, device=sampler.device)
        for i, row in enumerate(sampler.rows):
            self._seen[i, torch.tensor(row.tokens[: row.prompt_length], device=sampler.device)] = True
            self.advance(i, row.output)

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        ids = torch.tensor(tokens, dtype=torch.int64, device=self._counts.device)
        self._seen[row, ids] = True
        self._counts[row].index_add_(0, ids, torch.ones(len(tokens), device=self._counts.device))

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        seen, counts = self._seen.clone(), self._counts.clone()
        for token in draft[:, :first].T:
            self._add(seen, counts, token)
        for j in range(scores.shape[1]):
            if j:
                self._add(seen, counts, draft[:, first + j - 1])
            s = scores[:, j]
            repeated = torch.where(s < 0, s * self._repetition, s / self._repetition)
            scores[:, j] = torch.where(seen, repeated, s) - self._presence * (counts > 0) - self._frequency * counts

    @staticmethod
    def _add(seen: Tensor, counts: Tensor, token: Tensor) -> None:
        seen.scatter_(1, token[:, None], True)
        counts.scatter_add_(1, token[:, None], torch.ones_like(token[:, None], dtype=counts.dtype))


class _BadWords(_History):
    """Bad words of several tokens: the last one is forbidden where the others have just appeared."""

    def __init__(self, sampler: Sampler) -> None:
        self._rows = sampler.rows
        self._words = [[word for word in _words(row) if len(word) > 1] for row in sampler.rows]
        self.active = any(self._words)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        proposed = draft.tolist()
        for i, words in enumerate(self._words):
            for j in range(scores.shape[1] if words else 0):
                context = self._rows[i].tokens + proposed[i][: first + j]
                for word in words:
                    if context[1 - len(word) :] == list(word[:-1]):
                        scores[i, j, word[-1]] = NEVER


class _MinTokens(_History):
    """No end token before the minimum length."""

    def __init__(self, sampler: Sampler) -> None:
        self._rows = sampler.rows
        self.active = any(row.params.min_tokens and row.end_ids for row in sampler.rows)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, row in enumerate(self._rows):
            missing = row.params.min_tokens - row.num_output_tokens - first
            if missing > 0 and row.end_ids:
                scores[i, :missing, sorted(row.end_ids)] = NEVER


class _Processors(_History):
    """The request's own Hugging Face processors, called as `generate` calls them: (input_ids [1, n], scores [1, V])."""

    def __init__(self, sampler: Sampler) -> None:
        self._rows = sampler.rows
        self._checked: set[int] = set()
        self.active = any(row.params.logits_processors for row in sampler.rows)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, row in enumerate(self._rows):
            if not row.params.logits_processors:
                continue
            committed = torch.tensor([row.tokens], device=scores.device)
            for j in range(scores.shape[1]):
                context = torch.cat([committed, draft[i : i + 1, : first + j]], dim=1)
                for processor in row.params.logits_processors:
                    scores[i, j] = self._call(processor, context, scores[i : i + 1, j])[0]

    def _call(self, processor: Processor, context: Tensor, scores: Tensor) -> Tensor:
        if id(processor) in self._checked:
            return processor(context, scores.clone())
        self._checked.add(id(processor))
        return check_stateless(processor, context, scores)


def check_stateless(processor: Processor, context: Tensor, scores: Tensor) -> Tensor:
    """The processor's answer, or a refusal if asking twice gives two answers.

    Drafts are scored at positions that may be rejected, so a processor that remembers what it was asked would have to
    be rolled back.
    """
    first = processor(context, scores.clone())
    second = processor(context, scores.clone())
    processor(context[:, :-1] if context.shape[1] > 1 else context, scores.clone())
    if not torch.equal(first, second) or not torch.equal(first, processor(context, scores.clone())):
        raise UsageError(
            f"logits_processors: {type(processor).__name__} keeps state between calls, which drafting would corrupt; "
            "allowed: processors whose answer depends on input_ids and scores alone"
        )
    return first


def _words(row: Row) -> list[Sequence[int]]:
    return [word for word in row.params.bad_words if not isinstance(word, str)]
