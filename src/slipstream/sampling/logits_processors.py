"""Logits processors: constraints, bias, penalties, bad words, minimum length and the request's own.

Each kind edits the scores of all rows in place and reads the text so far: position j of a row sees the committed tokens
plus the first j draft tokens. Shapes as in `sampling`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.types import Row
from slipstream.sampling.batch_processor import BatchProcessor, params_of
from slipstream.sampling.constraint_processor import ConstraintMasks
from slipstream.sampling.request_processors import RequestProcessors
from slipstream.sampling.warpers import NEVER

_ANY = -1  # no token has this id


class FixedBias(BatchProcessor):
    """logit_bias, and bad words of one token (a bias of -inf)."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        biases: dict[tuple[int, int], float] = {}
        for i, row in enumerate(rows):
            biases.update({(i, token): bias for token, bias in params_of(row).logit_bias.items()})
            biases.update({(i, word[0]): NEVER for word in _words(row) if len(word) == 1})
        self.active = bool(biases)
        if self.active:
            self._rows, self._tokens = torch.tensor(list(biases), device=device).T
            self._bias = torch.tensor(list(biases.values()), dtype=torch.float32, device=device)[:, None]

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        scores[self._rows, :, self._tokens] += self._bias


class Penalties(BatchProcessor):
    """Repetition (Keskar et al. 2019, section 4.1; prompt and output), presence and frequency penalty (output only).

    Only tokens that have occurred are edited: those of the text, of which each row has a list, and of the draft.
    """

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        params = [params_of(row) for row in rows]
        used = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        self._penalised = [values != (1.0, 0.0, 0.0) for values in used]
        self.active = any(self._penalised)
        if not self.active:
            return
        self._device = device
        numbers = torch.tensor(used, dtype=torch.float32, device=device)
        self._repetition, self._presence, self._frequency = numbers.T[:, :, None, None]
        self._seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(len(rows), vocab_size, dtype=torch.float32, device=device)
        self._places: list[dict[int, int]] = [{} for _ in rows]  # token -> its index in the row's list
        self._ids = torch.zeros(len(rows), 0, dtype=torch.int64, device=device)  # the lists, padded with any token
        self._new: list[
            tuple[int, int, int, int]
        ] = []  # row, index in its list, token, further occurrences in the output
        for i, row in enumerate(rows):
            self._record(i, row.tokens, Counter(row.output))

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        self._record(row, tokens, Counter(tokens))

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        self._send_new()
        drafted = draft[:, : first + scores.shape[1] - 1]
        ids = torch.cat([self._ids, drafted], dim=1)
        drafted_counts = self._occurrences(ids, drafted)[:, first:]
        counts = self._counts.gather(1, ids)[:, None] + drafted_counts
        seen = self._seen.gather(1, ids)[:, None] | (drafted_counts > 0)
        at = ids[:, None].expand_as(counts)
        s = scores.gather(2, at)
        repeated = torch.where(s < 0, s * self._repetition, s / self._repetition)
        s = torch.where(seen, repeated, s) - self._presence * (counts > 0) - self._frequency * counts
        scores.scatter_(2, at, s)  # a token that is listed twice has the same score twice

    @staticmethod
    def _occurrences(ids: Tensor, drafted: Tensor) -> Tensor:
        """How often the first 0, 1, ... K draft tokens [B, K] are each of `ids` [B, U]: [B, K + 1, U]."""
        return pad((ids[:, None] == drafted[..., None]).cumsum(1), (0, 0, 1, 0))

    def _record(self, row: int, tokens: Sequence[int], counts: Counter[int]) -> None:
        if self._penalised[row]:
            places = self._places[row]
            for token in dict.fromkeys(tokens):
                self._new.append((row, places.setdefault(token, len(places)), token, counts[token]))

    def _send_new(self) -> None:
        """Send what was noted since the last call to the device, all rows at once."""
        if not self._new:
            return
        rows, places, tokens, more = torch.tensor(self._new).T.to(self._device, non_blocking=True)
        missing = max(map(len, self._places)) - self._ids.shape[1]
        if missing > 0:
            self._ids = pad(self._ids, (0, missing + self._ids.shape[1] // 4))
        self._ids[rows, places] = tokens
        self._seen[rows, tokens] = True
        self._counts.index_put_((rows, tokens), more.float(), accumulate=True)
        self._new.clear()


class BadWords(BatchProcessor):
    """Bad words of several tokens: the last one is forbidden where the others have just appeared."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        words = [(i, word) for i, row in enumerate(rows) for word in _words(row) if len(word) > 1]
        self.active = bool(words)
        if self.active:
            self._reach = max(len(word) for _, word in words) - 1
            begins = [[_ANY] * (self._reach + 1 - len(word)) + [*word[:-1]] for _, word in words]
            self._begins = torch.tensor(begins, device=device)[:, None]  # [words, 1, reach]
            self._row = torch.tensor([i for i, _ in words], device=device)
            self._last = torch.tensor([word[-1] for _, word in words], device=device)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        tails = [row.tokens[-self._reach :] for row in self._rows]
        padded = torch.tensor([[_ANY] * (self._reach - len(tail)) + tail for tail in tails])
        context = torch.cat([padded.to(draft.device, non_blocking=True), draft[:, : first + scores.shape[1] - 1]], 1)
        windows = context[:, first:].unfold(1, self._reach, 1)  # [B, J, reach]: what precedes each position
        begun = ((windows[self._row] == self._begins) | (self._begins == _ANY)).all(-1)
        bias = torch.zeros_like(begun, dtype=scores.dtype).masked_fill_(begun, NEVER)
        positions = torch.arange(scores.shape[1], device=scores.device)
        at = self._row[:, None], positions, self._last[:, None].expand_as(bias)
        scores.index_put_(at, bias, accumulate=True)


class MinTokens(BatchProcessor):
    """No end token before the minimum length."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self.active = any(params_of(row).min_tokens and row.end_ids for row in rows)
        self._ends = [torch.tensor(sorted(row.end_ids), device=device) for row in rows] if self.active else []

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, row in enumerate(self._rows):
            missing = params_of(row).min_tokens - row.num_output_tokens - first
            if missing > 0 and row.end_ids:
                scores[i, :missing].index_fill_(-1, self._ends[i], NEVER)


def _words(row: Row) -> list[Sequence[int]]:
    return [word for word in params_of(row).bad_words if not isinstance(word, str)]


# constraints, then the order of Hugging Face `generate`
KINDS = (ConstraintMasks, FixedBias, Penalties, BadWords, MinTokens, RequestProcessors)
