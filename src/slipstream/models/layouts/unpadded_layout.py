"""Forwards without padding, of models that run on caches of their own, a row at a time; and which layout is whose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from slipstream.core.interfaces import Backend, Checkpoints, RaggedForwards, RowSegment
from slipstream.core.kv_slots import EXACT_FIT, Shapes, SlotTable
from slipstream.core.rng import argmax
from slipstream.core.session import InputBatch, Rectangle, Session
from slipstream.core.types import Row
from slipstream.models.layouts.ragged_layout import (
    RaggedLayout,
    end_to_end,
    forward_segments,
    last_of_each,
    without_padding,
)


@runtime_checkable
class UnpaddedForwards(Checkpoints, Protocol):
    """Optional capability of a backend whose rows share no forward, and which knows a state where a forward ended.

    Forwards of several rows are `RaggedForwards`, and nothing is padded.

    reads_on: whether a forward of several tokens after a state is right, so that long prompts may be read in chunks.
    rounds_alike: whether it also gives each token the logits that it gets alone, up to the rounding of float32.
    """

    reads_on: bool
    rounds_alike: bool


class UnpaddedLayout:
    """The layout of sessions whose backend has `UnpaddedForwards`."""

    def __init__(self) -> None:
        self._rectangle = Rectangle()

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        """As many tokens as there are."""
        return rows + drafted if rows > 1 else None

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, answer: bool) -> Tensor | None:
        """See `Session.prefill`; prompts are read one by one, without padding where no shapes are asked for."""
        return self._rectangle.prefill(table, rows, answer=answer)

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """One forward of all rows' real tokens."""
        width = draft.shape[1]
        real = lengths if keep > width else [width] * len(lengths)  # a draft model that scores column by column
        logits, counts = self._flat(table, batch, draft, real)
        return last_of_each(logits, counts, [keep - width + n for n in real], keep)

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """See `BatchLayout`."""
        logits, counts = self._flat(table, batch, draft, lengths)
        return last_of_each(argmax(logits), counts, [n + 1 for n in lengths], draft.shape[1] + 1)

    def _flat(
        self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """[T, V] logits of all rows one behind the other, and how many are whose."""
        texts = without_padding(batch, draft, lengths)
        counts = [len(text) for text in texts]
        segments = [RowSegment(slot, start, counts[slot]) for slot, start in enumerate(batch.starts)]
        pieces = texts
        if table.shapes.token_by_token:
            segments = [RowSegment(one.slot, one.start + i, 1) for one in segments for i in range(one.count)]
            pieces = [[token] for text in texts for token in text]
        return forward_segments(table, end_to_end(texts, sum(counts)), segments, pieces, None), counts


def make_session(backend: Backend, shapes: Shapes = EXACT_FIT) -> Session:
    """The session that makes the most of a backend."""
    if isinstance(backend, UnpaddedForwards):
        return Session(backend, shapes, UnpaddedLayout())
    ragged = isinstance(backend, RaggedForwards) and backend.ragged
    return Session(backend, shapes, RaggedLayout() if ragged else None)
