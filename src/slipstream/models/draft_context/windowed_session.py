"""A draft model's session that reads the beginning of a long prompt and its end, and leaves out what is between.

Drafts are guesses, so a draft model need not have read everything, and one with a short context cannot. What it has not
read it does not draft from, though, which costs more than reading it where the text is about its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor

from slipstream.core.interfaces import Backend
from slipstream.core.session import Session
from slipstream.core.types import Row

BEGINNING = 64  # tokens of a prompt that are always read: instructions, and what attention rests on
OUTPUT = 2  # such a part of a model's context, at most, is kept free for the output
STEPS = (
    4  # what is left out grows by such a part of the limit, so that a chat's next turn finds most of its text cached
)


class PartialRow(Row):
    """A row as the draft model reads it. left_out: how many tokens of the prompt, after its beginning, are missing."""

    left_out: int = 0

    def true_length(self, round_index: int, base: int) -> int:
        """See `Row.true_length`; the rounds are those of the whole row."""
        true = super().true_length(round_index, base)
        return true if round_index >= len(self.rounds) else true - self.left_out


def num_left_out(prompt_length: int, limit: int) -> int:
    """How many tokens of a prompt are not read, so that at most `limit` of them are. Depends on its length alone."""
    step = max(1, limit // STEPS)
    return -(-max(0, prompt_length - limit) // step) * step


class WindowedSession:
    """See `Session`; of longer prompts only `limit` tokens are read, and no more than the model's context holds."""

    def __init__(self, session: Session, limit: int | None = None) -> None:
        """limit: above `BEGINNING`; None for what the context holds."""
        self.session, self.limit = session, session.backend.max_length if limit is None else limit
        self._parts: WeakKeyDictionary[Row, PartialRow] = WeakKeyDictionary()

    @property
    def backend(self) -> Backend:
        """The draft model."""
        return self.session.backend

    def num_to_read(self, row: Row) -> int:
        """How many of a row's tokens are read."""
        return len(row.tokens) - self._left_out(row)

    def reserve(self, rows: int, length: int) -> None:
        """See `Session.reserve`."""
        self.session.reserve(rows, length)

    def move_to_slots(self, rows: Sequence[Row]) -> None:
        """See `Session.move_to_slots`."""
        self.session.move_to_slots(self._read(rows))

    def read_ahead(self, rows: Mapping[int, Row], budget: int) -> None:
        """See `Session.read_ahead`."""
        self.session.read_ahead(dict(zip(rows, self._read(list(rows.values())), strict=True)), budget)

    def has_read(self, row: Row) -> bool:
        """See `Session.has_read`."""
        return self.session.has_read(self._part(row))

    def holds(self, row: Row) -> bool:
        """See `Session.holds`."""
        return self.session.holds(self._part(row))

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """See `Session.score`."""
        return self.session.score(self._read(rows), draft, lengths, keep)

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """See `Session.draft_greedy`."""
        return self.session.draft_greedy(self._read(rows), steps, vocab_size)

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """See `Session.keep_drafts`."""
        self.session.keep_drafts(lengths)

    def _left_out(self, row: Row) -> int:
        context = self.backend.max_length
        room = context - min(row.params.max_tokens, context // OUTPUT)
        return num_left_out(row.prompt_length, min(self.limit, max(room, 2 * BEGINNING)))

    def _read(self, rows: Sequence[Row]) -> list[Row]:
        return [self._part(row) for row in rows]

    def _part(self, row: Row) -> Row:
        """What is read of a row: all of it, or a part that has what the row has committed since."""
        left_out = self._left_out(row)
        if left_out == 0:
            return row
        part = self._parts.get(row)
        if part is None:
            part = self._parts[row] = PartialRow(
                row.index, row.tokens[:BEGINNING], row.params, row.seed, rounds=row.rounds, group=row.group
            )
            part.left_out, part.prompt_length = left_out, row.prompt_length - left_out
        part.tokens += row.tokens[len(part.tokens) + left_out :]
        return part
