"""A draft model's session that scores, for each row, a part of the vocabulary.

That part is the frequent tokens, the row's end tokens and those of its own text so far, so it depends on nothing but
the row's committed tokens. A row that goes beyond it again and again, in another script perhaps, is scored whole.
What is left out has logit -inf, so a draft's distribution is over the tokens that could be drafted: whatever rule
verifies it stays exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.core.interfaces import Backend, DraftScorer
from slipstream.core.types import Row
from slipstream.models.draft_vocabulary import ChosenRows, RestrictedHead

STRAYS, WINDOW = 4, 64  # so many new tokens among the last so many of the output, and a row is scored whole


@dataclass
class _Vocabulary:
    """One row's tokens beyond the first ones: `known`, in the order of `tokens` [N], and their weights.

    read: how many of the row's tokens were looked at; strays: places of output tokens that were not known before.
    """

    tokens: Tensor
    chosen: ChosenRows
    known: set[int] = field(default_factory=set)
    read: int = 0
    strays: deque[int] = field(default_factory=lambda: deque(maxlen=STRAYS))

    def is_left(self, length: int) -> bool:
        """Whether a text of this length has lately gone beyond the vocabulary often."""
        return len(self.strays) == STRAYS and self.strays[0] >= length - WINDOW


class RestrictedScorer:
    """See `DraftScorer`."""

    def __init__(self, session: DraftScorer, head: RestrictedHead) -> None:
        """head: the output layer of the session's model."""
        self.session, self.head = session, head
        self._rows: WeakKeyDictionary[Row, _Vocabulary] = WeakKeyDictionary()
        self._joined: tuple[list[Tensor], ChosenRows] | None = None  # of the rows of the last call

    @property
    def backend(self) -> Backend:
        """The draft model."""
        return self.session.backend

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """See `Session.score`; float32."""
        own = [self._vocabulary(row) for row in rows]
        whole = [one.is_left(len(row.tokens)) for one, row in zip(own, rows, strict=True)]
        if any(whole):
            logits = self.session.score(rows, draft, lengths, keep)
            return logits.float() if all(whole) else self._left_out(logits, own, whole)
        with self.head.only(self._together(own)):
            logits = self.session.score(rows, draft, lengths, keep)
        return self._spread(logits, own)

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """None: every step is scored on its own."""
        return None

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """See `Session.keep_drafts`."""
        self.session.keep_drafts(lengths)

    def _vocabulary(self, row: Row) -> _Vocabulary:
        """A row's vocabulary, with what it has committed since."""
        one, first = self._rows.get(row), self.head.num_first
        if one is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self.backend.device)
            one = self._rows[row] = _Vocabulary(nothing, self.head.chosen(nothing))
            self._add(one, sorted(token for token in row.end_ids if first <= token < self.head.out_features))
        new: dict[int, None] = {}
        for place in range(one.read, len(row.tokens)):
            token = row.tokens[place]
            if first <= token < self.head.out_features and token not in one.known and token not in new:
                new[token] = None
                if place >= row.prompt_length:
                    one.strays.append(place)
        one.read = len(row.tokens)
        self._add(one, list(new))
        return one

    def _add(self, one: _Vocabulary, tokens: list[int]) -> None:
        if not tokens:
            return
        one.known.update(tokens)
        new = torch.tensor(tokens, device=self.backend.device)
        more = self.head.chosen(new)
        one.tokens, one.chosen = torch.cat([one.tokens, new]), _joined([one.chosen, more])

    def _together(self, own: Sequence[_Vocabulary]) -> ChosenRows:
        """The rows' vocabularies one after the other."""
        if len(own) == 1:
            return own[0].chosen
        weights = [one.chosen.weight for one in own]
        if self._joined is None or not _same(self._joined[0], weights):
            self._joined = weights, _joined([one.chosen for one in own])
        return self._joined[1]

    def _spread(self, logits: Tensor, own: Sequence[_Vocabulary]) -> Tensor:
        """[B, J, V] from the logits of the first tokens and of each row's others, which follow each other."""
        out = self._nothing(logits)
        at = first = self.head.num_first
        out[..., :first] = logits[..., :first]
        for i, one in enumerate(own):
            out[i].index_copy_(1, one.tokens, logits[i, :, at : at + len(one.tokens)].float())
            at += len(one.tokens)
        return out

    def _left_out(self, logits: Tensor, own: Sequence[_Vocabulary], whole: Sequence[bool]) -> Tensor:
        """Logits of all tokens, without those that are not in a row's vocabulary."""
        out, first = self._nothing(logits), self.head.num_first
        out[..., :first] = logits[..., :first]
        for i, (one, left) in enumerate(zip(own, whole, strict=True)):
            known = slice(None) if left else one.tokens
            out[i][:, known] = logits[i][:, known].float()
        return out

    def _nothing(self, logits: Tensor) -> Tensor:
        shape = *logits.shape[:2], self.head.out_features
        return torch.full(shape, float("-inf"), dtype=torch.float32, device=logits.device)


def _joined(parts: Sequence[ChosenRows]) -> ChosenRows:
    biases = [part.bias for part in parts if part.bias is not None]
    return ChosenRows(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None)


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
