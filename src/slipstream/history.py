"""What depends on a row's history: bias, penalties, bad words, minimum length and a request's own processors.

Each kind edits the scores of all rows in place. Position j of a row sees the committed tokens plus the first j draft
tokens. Shapes as in `sampling`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.params import Processor
from slipstream.types import Row, UsageError

NEVER = float("-inf")


class History:
    """One kind of processor: `apply` edits scores [B, J, V] in place. Inactive ones are left out of the loop."""

    active = False

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        raise AssertionError(f"{type(self).__name__} is not active")

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Only processors that keep counts need to be told."""


class FixedBias(History):
    """logit_bias, and bad words of one token (a bias of -inf)."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        entries = [
            (i, token, bias)
            for i, row in enumerate(rows)
            for token, bias in [
                *row.params.logit_bias.items(),
                *((word[0], NEVER) for word in _words(row) if len(word) == 1),
            ]
        ]
        self.active = bool(entries)
        if self.active:
            self._bias = torch.zeros(len(rows), 1, vocab_size, device=device)
            for i, token, bias in entries:
                self._bias[i, 0, token] += bias

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        scores += self._bias


class Penalties(History):
    """Repetition (Keskar et al. 2019, section 4.1; prompt and output), presence and frequency penalty (output only)."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        params = [row.params for row in rows]
        used = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        self.active = any(values != (1.0, 0.0, 0.0) for values in used)
        if not self.active:
            return
        shape = (len(params), vocab_size)
        self._repetition, self._presence, self._frequency = torch.tensor(used, device=device).T[:, :, None]
        self._seen = torch.zeros(shape, dtype=torch.bool, device=device)
        self._counts = torch.zeros(shape, device=device)
        for i, row in enumerate(rows):
            self._seen[i, torch.tensor(row.tokens[: row.prompt_length], device=device)] = True
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


class BadWords(History):
    """Bad words of several tokens: the last one is forbidden where the others have just appeared."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._words = [[word for word in _words(row) if len(word) > 1] for row in rows]
        self.active = any(self._words)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        proposed = draft.tolist()
        for i, words in enumerate(self._words):
            for j in range(scores.shape[1] if words else 0):
                context = self._rows[i].tokens + proposed[i][: first + j]
                for word in words:
                    if context[1 - len(word) :] == list(word[:-1]):
                        scores[i, j, word[-1]] = NEVER


class MinTokens(History):
    """No end token before the minimum length."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self.active = any(row.params.min_tokens and row.end_ids for row in rows)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, row in enumerate(self._rows):
            missing = row.params.min_tokens - row.num_output_tokens - first
            if missing > 0 and row.end_ids:
                scores[i, :missing, sorted(row.end_ids)] = NEVER


class Processors(History):
    """The request's own Hugging Face processors, called as `generate` calls them: (input_ids [1, n], scores [1, V])."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._checked: set[int] = set()
        self.active = any(row.params.logits_processors for row in rows)

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


KINDS = (FixedBias, Penalties, BadWords, MinTokens, Processors)  # in the order of Hugging Face `generate`
