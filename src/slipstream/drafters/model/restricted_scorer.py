"""A draft model's session that scores, for each row, only a part of the vocabulary.

That part is the frequent tokens, the row's end tokens and the tokens of its text so far, so it depends on the row's
committed tokens alone. A row whose text leaves it again and again, in another script perhaps, is scored whole. Rows of
a batch are scored together, with logit -inf for tokens of other rows. So a draft's distribution covers just the tokens
that can be drafted, and every acceptance rule stays exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.core.interfaces import DraftScorer
from slipstream.core.types import Row
from slipstream.models.draft_vocabulary import ChosenRows, RestrictedHead

STRAYS, WINDOW = 4, 64  # a row with this many new tokens among this many of its last ones is scored whole


@dataclass
class _Vocabulary:
    """One row's tokens besides the frequent ones."""

    tokens: Tensor  # [N], in the order of their weights in `chosen`
    chosen: ChosenRows
    token_set: set[int] = field(default_factory=set)  # the same tokens
    num_read: int = 0  # tokens of the row that have been looked at
    # latest positions of tokens outside the vocabulary
    strays: deque[int] = field(default_factory=lambda: deque(maxlen=STRAYS))

    def needs_all_tokens(self, length: int) -> bool:
        """True if the last tokens of a row of this length were outside the vocabulary too often to restrict it."""
        return len(self.strays) == STRAYS and self.strays[0] >= length - WINDOW


@dataclass(frozen=True)
class _Batch:
    """The tokens that are scored for some rows besides the frequent ones."""

    weights: list[Tensor]  # of the rows' vocabularies
    chosen: ChosenRows  # of N tokens
    unknown: Tensor | None  # [B, 1, N], True for tokens that are not of the row's vocabulary; None for a single row


class RestrictedScorer(DraftScorer):
    """A draft model that scores the frequent tokens and those of each row's own text."""

    def __init__(self, session: DraftScorer, head: RestrictedHead) -> None:
        """head: the output layer of the session's model."""
        self.backend, self.session, self.head = session.backend, session, head
        self._rows: WeakKeyDictionary[Row, _Vocabulary] = WeakKeyDictionary()
        self._batch: _Batch | None = None  # of the last call
        self._all_ids = torch.arange(head.out_features, device=self.backend.device)  # overwritten after the first

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits of the frequent tokens and of the rows' other tokens, or of all if a row is scored whole."""
        vocabularies = [self._vocabulary(row) for row in rows]
        is_whole = [
            vocabulary.needs_all_tokens(len(row.tokens)) for vocabulary, row in zip(vocabularies, rows, strict=True)
        ]
        if any(is_whole):
            self.token_ids = None
            logits = self.session.score(rows, draft, lengths, keep)
            return logits if all(is_whole) else self._mask_unknown(logits, vocabularies, is_whole)
        batch, first = self._batch_of(vocabularies), self.head.num_first
        with self.head.only(batch.chosen):
            logits = self.session.score(rows, draft, lengths, keep)
        if batch.unknown is not None:
            logits[..., first:].masked_fill_(batch.unknown, float("-inf"))
        self.token_ids = self._all_ids[: logits.shape[-1]]
        return logits

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        self.session.keep_drafts(lengths)

    def _vocabulary(self, row: Row) -> _Vocabulary:
        """A row's vocabulary, brought up to date with its committed tokens."""
        vocabulary, first = self._rows.get(row), self.head.num_first
        if vocabulary is None:
            no_tokens = torch.empty(0, dtype=torch.int64, device=self.backend.device)
            vocabulary = self._rows[row] = _Vocabulary(no_tokens, self.head.chosen(no_tokens))
            self._add(vocabulary, sorted(token for token in row.end_ids if first <= token < self.head.out_features))
        new: dict[int, None] = {}
        for place in range(vocabulary.num_read, len(row.tokens)):
            token = row.tokens[place]
            if first <= token < self.head.out_features and token not in vocabulary.token_set and token not in new:
                new[token] = None
                if place >= row.prompt_length:
                    vocabulary.strays.append(place)
        vocabulary.num_read = len(row.tokens)
        self._add(vocabulary, list(new))
        return vocabulary

    def _add(self, vocabulary: _Vocabulary, tokens: list[int]) -> None:
        if not tokens:
            return
        vocabulary.token_set.update(tokens)
        new = torch.tensor(tokens, device=self.backend.device)
        vocabulary.tokens = torch.cat([vocabulary.tokens, new])
        vocabulary.chosen = _concatenated([vocabulary.chosen, self.head.chosen(new)])

    def _batch_of(self, vocabularies: Sequence[_Vocabulary]) -> _Batch:
        """The union of vocabularies; also writes its tokens to `_all_ids`."""
        weights = [vocabulary.chosen.weight for vocabulary in vocabularies]
        if self._batch is None or list(map(id, self._batch.weights)) != list(map(id, weights)):
            tokens, chosen, unknown = vocabularies[0].tokens, vocabularies[0].chosen, None
            if len(vocabularies) > 1:
                each = [vocabulary.tokens for vocabulary in vocabularies]
                tokens, places = torch.unique(torch.cat(each), return_inverse=True)
                order = torch.empty_like(tokens).index_copy_(0, places, torch.arange(len(places)).to(places))
                chosen = _concatenated([vocabulary.chosen for vocabulary in vocabularies])
                chosen = ChosenRows(chosen.weight[order], None if chosen.bias is None else chosen.bias[order])
                unknown = torch.ones(len(each), 1, len(tokens), dtype=torch.bool, device=tokens.device)
                for line, own in zip(unknown, places.split(list(map(len, each))), strict=True):
                    line[:, own] = False
            self._batch = _Batch(weights, chosen, unknown)
            self._all_ids[self.head.num_first :][: len(tokens)] = tokens
        return self._batch

    def _mask_unknown(self, logits: Tensor, vocabularies: Sequence[_Vocabulary], is_whole: Sequence[bool]) -> Tensor:
        """Logits of all tokens, with -inf for those outside a row's vocabulary."""
        for line, vocabulary, scored_whole in zip(logits, vocabularies, is_whole, strict=True):
            if not scored_whole:
                kept = line[:, vocabulary.tokens]
                line[:, self.head.num_first :] = float("-inf")
                line[:, vocabulary.tokens] = kept
        return logits


def _concatenated(parts: Sequence[ChosenRows]) -> ChosenRows:
    biases = [part.bias for part in parts if part.bias is not None]
    return ChosenRows(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
