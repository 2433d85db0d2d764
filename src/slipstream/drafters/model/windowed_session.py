"""A draft model's session that reads the beginning and the end of a long prompt and skips the middle.

Drafts are guesses, so a draft model need not read everything, and one with a short context cannot. But it cannot draft
what it has not read: where the output repeats the skipped part of the prompt, skipping costs more than reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from slipstream.core.interfaces import DraftScorer
from slipstream.core.session import Session
from slipstream.core.types import Row

BEGINNING = 64  # tokens of a prompt that are always read: instructions, and the first tokens, which attention needs


class PartialRow(Row):
    """A row as the draft model reads it. num_skipped: tokens of the prompt, after its beginning, that are missing."""

    num_skipped: int = 0

    def true_length(self, round_index: int, base: int) -> int:
        # the rounds are those of the whole row
        true = super().true_length(round_index, base)
        return true if round_index >= len(self.rounds) else true - self.num_skipped


def num_tokens_skipped(prompt_length: int, limit: int) -> int:
    """Number of tokens of a prompt to skip so that at most `limit` are read; a function of its length alone."""
    step = max(1, limit // 4)  # coarse, so that a chat's next turn finds most of its text cached
    return -(-max(0, prompt_length - limit) // step) * step


class WindowedSession(DraftScorer):
    """A `Session` that reads at most `limit` tokens of a prompt, and no more than the model's context holds."""

    def __init__(self, session: Session, limit: int | None = None) -> None:
        """limit: more than `BEGINNING`; None for what the context holds."""
        self.backend, self.session, self.token_ids = session.backend, session, session.token_ids
        self.limit = session.backend.max_length if limit is None else limit
        self._parts: WeakKeyDictionary[Row, PartialRow | None] = WeakKeyDictionary()  # None: the whole row is read

    def num_to_read(self, row: Row) -> int:
        return len(self._part(row).tokens)

    def reserve(self, rows: int, length: int) -> None:
        self.session.reserve(rows, length)

    def move_to_slots(self, rows: Sequence[Row]) -> None:
        self.session.move_to_slots(self._read(rows))

    def read_ahead(self, rows: Mapping[int, Row], budget: int) -> None:
        self.session.read_ahead(dict(zip(rows, self._read(list(rows.values())), strict=True)), budget)

    def has_read(self, row: Row) -> bool:
        return self.session.has_read(self._part(row))

    def holds(self, row: Row) -> bool:
        return self.session.holds(self._part(row))

    def forget_round(self) -> None:
        self.session.forget_round()

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        return self.session.score(self._read(rows), draft, lengths, keep)

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        return self.session.draft_greedy(self._read(rows), steps, vocab_size)

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        self.session.keep_drafts(lengths)

    def _read(self, rows: Sequence[Row]) -> list[Row]:
        return [self._part(row) for row in rows]

    def _part(self, row: Row) -> Row:
        """The part of a row that is read, or the row itself, up to date with its committed tokens."""
        if row not in self._parts:
            context = self.backend.max_length
            room = context - min(row.params.max_tokens, context // 2)  # at most half is kept free for the output
            num_skipped = num_tokens_skipped(row.prompt_length, min(self.limit, max(room, 2 * BEGINNING)))
            part = None
            if num_skipped:
                part = PartialRow(
                    row.index, row.tokens[:BEGINNING], row.params, row.seed, rounds=row.rounds, group=row.group
                )
                part.num_skipped, part.prompt_length = num_skipped, row.prompt_length - num_skipped
            self._parts[row] = part
        part = self._parts[row]
        if part is None:
            return row
        part.tokens += row.tokens[len(part.tokens) + part.num_skipped :]
        return part
