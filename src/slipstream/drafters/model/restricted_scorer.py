"""A draft model's session that scores, for each row, only a part of the vocabulary.

That part is the frequent tokens, the row's end tokens and the tokens of its text so far, so it depends on the row's
committed tokens alone. A row whose text leaves it again and again, in another script perhaps, is scored whole. All
other tokens have logit -inf, so a draft's distribution covers just the tokens that can be drafted, and every acceptance
rule stays exact.
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


class RestrictedScorer(DraftScorer):
    """A draft model that scores the frequent tokens and those of each row's own text."""

    def __init__(self, session: DraftScorer, head: RestrictedHead) -> None:
        """head: the output layer of the session's model."""
        self.backend, self.session, self.head = session.backend, session, head
        self._rows: WeakKeyDictionary[Row, _Vocabulary] = WeakKeyDictionary()
        self._joined: tuple[list[Tensor], ChosenRows] | None = None  # of the rows of the last call

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Float32 logits; -inf for tokens outside a row's vocabulary."""
        vocabularies = [self._vocabulary(row) for row in rows]
        is_whole = [
            vocabulary.needs_all_tokens(len(row.tokens)) for vocabulary, row in zip(vocabularies, rows, strict=True)
        ]
        if any(is_whole):
            logits = self.session.score(rows, draft, lengths, keep)
            return logits.float() if all(is_whole) else self._mask_unknown(logits, vocabularies, is_whole)
        with self.head.only(self._join_rows(vocabularies)):
            logits = self.session.score(rows, draft, lengths, keep)
        return self._spread(logits, vocabularies)

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

    def _join_rows(self, vocabularies: Sequence[_Vocabulary]) -> ChosenRows:
        """The output rows of all vocabularies, one vocabulary after the other."""
        if len(vocabularies) == 1:
            return vocabularies[0].chosen
        weights = [vocabulary.chosen.weight for vocabulary in vocabularies]
        if self._joined is None or list(map(id, self._joined[0])) != list(map(id, weights)):
            self._joined = weights, _concatenated([vocabulary.chosen for vocabulary in vocabularies])
        return self._joined[1]

    def _spread(self, logits: Tensor, vocabularies: Sequence[_Vocabulary]) -> Tensor:
        """Logits [B, J, V] from those of the frequent tokens, followed by those of each row's other tokens in turn."""
        out = self._all_masked(logits)
        column = first = self.head.num_first
        out[..., :first] = logits[..., :first]
        for i, vocabulary in enumerate(vocabularies):
            out[i].index_copy_(1, vocabulary.tokens, logits[i, :, column : column + len(vocabulary.tokens)].float())
            column += len(vocabulary.tokens)
        return out

    def _mask_unknown(self, logits: Tensor, vocabularies: Sequence[_Vocabulary], is_whole: Sequence[bool]) -> Tensor:
        """Logits of all tokens, with -inf for those outside a row's vocabulary."""
        out, first = self._all_masked(logits), self.head.num_first
        out[..., :first] = logits[..., :first]
        for i, (vocabulary, scored_whole) in enumerate(zip(vocabularies, is_whole, strict=True)):
            kept = slice(None) if scored_whole else vocabulary.tokens
            out[i][:, kept] = logits[i][:, kept].float()
        return out

    def _all_masked(self, logits: Tensor) -> Tensor:
        shape = *logits.shape[:2], self.head.out_features
        return torch.full(shape, float("-inf"), dtype=torch.float32, device=logits.device)


def _concatenated(parts: Sequence[ChosenRows]) -> ChosenRows:
    biases = [part.bias for part in parts if part.bias is not None]
    return ChosenRows(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)
