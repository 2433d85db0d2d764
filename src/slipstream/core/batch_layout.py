"""How the tokens of several rows are laid out in a forward: a rectangle, padded to its longest row.

The alternative, without padding, is `slipstream.models.layouts.ragged_layout`; this one is its specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from slipstream.core.argmax import argmax
from slipstream.core.input_batch import InputBatch, last
from slipstream.core.slot_table import SlotTable, in_order
from slipstream.core.types import Row


class BatchLayout(Protocol):
    """A strategy of `Session`."""

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        """Tokens of a forward that verifies `drafted` tokens of several rows; None if rows are padded."""

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, answer: bool) -> Tensor | None:
        """See `Session.prefill`."""

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """[B, keep, V] logits of the last `keep` positions of each row; see `Session.score`."""

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, K + 1] the likeliest token after the committed tokens and after each draft token."""


class Rectangle:
    """All rows as wide as the widest; prompts are read one by one."""

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        """None."""
        return None

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, answer: bool) -> Tensor | None:
        """See `Session.prefill`; never two rows together."""
        answers: dict[int, Tensor] = {}
        for slot, row in enumerate(rows):
            table.seat(slot, row)
            if not table.lacks_much(slot, row):
                answer = False
            else:
                table.read(slot, row, len(row.tokens) - (not answer), answers)
        return in_order(answers, len(rows)) if answer else None

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """One padded forward."""
        return last(table.forward(batch.padded(draft, table), batch.starts, 0, logits=True), batch.counts, keep)

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """See `BatchLayout`."""
        return argmax(self.score(table, batch, draft, lengths, draft.shape[1] + 1))
