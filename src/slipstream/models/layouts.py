"""How rows of different length share a forward without padding, and which layout a model gets.

The specification is `Rectangle`, which pads every row to the longest and reads prompts one by one; all layouts give the
same logits. `RaggedLayout` joins the rows' tokens end to end. It reads the prompts of several rows in the same
forwards; a prompt that shares a prefix with another one waits until that one is read, and copies the prefix.
`UnpaddedLayout` is for models that run on caches of their own, one row at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.core.interfaces import Backend, Checkpoints
from slipstream.core.kv_slots import CATCH_UP, EXACT_FIT, PROMPT_UNIT, Shapes, SlotTable, common_prefix, in_order
from slipstream.core.rng import argmax
from slipstream.core.session import InputBatch, Rectangle, Session
from slipstream.core.types import Row
from slipstream.models.backend_capabilities import RaggedForwards, RowSegment

PADDED = Rectangle()


class RaggedLayout:
    """The layout of sessions whose backend has `RaggedForwards`."""

    @staticmethod
    def allowed(table: SlotTable) -> bool:
        """True if the shapes allow ragged forwards."""
        return not table.shapes.widths or bool(table.shapes.totals)

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        """Tokens of a ragged forward that verifies `drafted` tokens of several rows; None if there is none."""
        return table.shapes.total_for(rows + drafted) if rows > 1 else None

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, logits: bool) -> Tensor | None:
        """Prompts that share no prefix are read together."""
        if not self.allowed(table) or table.shapes.reuse > 1 or any(map(table.blocks, rows)):
            return PADDED.prefill(table, rows, logits=logits)
        prompt_logits: dict[int, Tensor] = {}
        for group in _groups(table, rows):
            lacking = {slot: row for slot, row in group.items() if table.is_far_behind(slot, row)}
            logits = logits and len(lacking) == len(group)  # a row left to the round gets its logits there, so all do
            ends = {slot: len(row.tokens) - (not logits) for slot, row in lacking.items()}
            if len(ends) > 1:
                _read_together(table, group, ends, prompt_logits)
            else:
                for slot, end in ends.items():
                    table.read(slot, group[slot], end, prompt_logits)
        return in_order(prompt_logits, len(rows)) if logits else None

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """One forward without padding, where that takes fewer tokens than the rectangle."""
        width = draft.shape[1]
        flat = None if keep <= width and set(lengths) != {width} else self._flat(table, batch, draft, lengths)
        if flat is None:
            return PADDED.score(table, batch, draft, lengths, keep)
        return last_of_each(*flat, [keep - width + n for n in lengths], keep)

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """Picks tokens first and arranges those in rows: that moves less memory than arranging logits."""
        if (flat := self._flat(table, batch, draft, lengths)) is None:
            return PADDED.best(table, batch, draft, lengths)
        logits, counts = flat
        return last_of_each(argmax(logits), counts, [n + 1 for n in lengths], draft.shape[1] + 1)

    def _flat(
        self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, list[int]] | None:
        """[T, V] logits, one row after the other, and how many belong to each row; None if a rectangle is as small."""
        if (rows := len(batch.starts)) == 1 or not self.allowed(table):
            return None
        texts = without_padding(batch, draft, lengths)
        total = self.num_tokens(table, rows, sum(map(len, texts)) - rows)
        if total is None or total >= rows * batch.width:
            return None
        segments = [RowSegment(slot, start, len(texts[slot])) for slot, start in enumerate(batch.starts)]
        logits = forward_segments(table, end_to_end(texts, total), segments, texts, table.shapes.widths)
        return logits, [len(text) for text in texts]


def _groups(table: SlotTable, rows: Sequence[Row]) -> Iterator[dict[int, Row]]:
    """Groups of rows to read together, by slot; a row that can copy what others read is in a later group."""
    waiting = list(enumerate(rows))
    while waiting:
        group: dict[int, Row] = {}
        later = []
        for slot, row in waiting:
            if group and _would_copy(table, slot, row, group.values()):
                later.append((slot, row))
            else:
                table.assign_slot(slot, row)
                group[slot] = row
        yield group
        waiting = later


def _would_copy(table: SlotTable, slot: int, row: Row, others: Iterable[Row]) -> bool:
    if table.states[slot].row is row:
        return False
    cached, longest = max(table.reusable_prefix(i, row) for i in range(len(table.states))), len(row.tokens) - 1
    return any(common_prefix(row, other, longest) > cached + CATCH_UP for other in others)


def _read_together(
    table: SlotTable, rows: dict[int, Row], ends: dict[int, int], prompt_logits: dict[int, Tensor]
) -> None:
    """Read several rows' tokens, joined end to end, in forwards of one chunk each."""
    shapes = table.shapes
    bases = {slot: table.states[slot].base for slot in ends}
    lacking = [RowSegment(slot, bases[slot], end - bases[slot]) for slot, end in ends.items()]
    max_tokens = shapes.chunk - PROMPT_UNIT if shapes.widths else shapes.chunk  # the last piece may be padded
    for segments in portions(lacking, max_tokens):
        texts = [rows[segment.slot].tokens[segment.start : segment.start + segment.count] for segment in segments]
        counts = [segment.count for segment in segments]
        total = sum(counts[:-1]) + shapes.prompt_width_for(counts[-1])
        inputs = end_to_end(texts, shapes.prompt_width_for(total))
        ended = [i for i, piece in enumerate(segments) if piece.start + piece.count == len(rows[piece.slot].tokens)]
        columns = [sum(counts[: i + 1]) - 1 for i in ended]
        num_columns = max(1, len(ended))  # padded below to a number for which the output layer's bits agree
        columns += [0] * ((shapes.total_for(num_columns) or shapes.prompt_width_for(num_columns)) - len(ended))
        logits = forward_segments(table, inputs, segments, texts, None, torch.tensor(columns))
        prompt_logits.update({segments[i].slot: logits[None, n : n + 1] for n, i in enumerate(ended)})
        for segment in segments:
            table.note_read(segment.slot, segment.count)


def forward_segments(
    table: SlotTable,
    inputs: Tensor,
    segments: list[RowSegment],
    texts: list[list[int]],
    widths: Sequence[int] | None,
    columns: Tensor | None = None,
) -> Tensor:
    """`RaggedForwards.forward_ragged`, with what it writes noted in the audit."""
    assert isinstance(table.backend, RaggedForwards)
    if table.audit:
        for segment, text in zip(segments, texts, strict=True):
            table.audit.write(segment.slot, segment.start, text)
    return table.backend.forward_ragged(table.clamp_to_vocabulary(inputs), segments, widths=widths, columns=columns)


def without_padding(batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> list[list[int]]:
    """Each row's tokens without padding: what its cache lacks, then the first lengths[i] tokens of row i's draft."""
    parts = zip(batch.missing, draft.tolist(), batch.fed, lengths, strict=True)
    return [[*tail, *drafted[skip:length]] for tail, drafted, skip, length in parts]


def end_to_end(texts: Sequence[Sequence[int]], total: int) -> Tensor:
    """[total] token ids of several texts, one after the other, then padding."""
    tokens = [token for text in texts for token in text]
    return torch.tensor(tokens + [0] * (total - len(tokens)), dtype=torch.int64)


def last_of_each(values: Tensor, counts: Sequence[int], last_counts: Sequence[int], width: int) -> Tensor:
    """[B, width, ...] of values [T, ...]: the last last_counts[i] of row i's counts[i] positions.

    A row with fewer than `width` repeats its last position.
    """
    ends = torch.tensor(counts).cumsum(0)
    num_last = torch.tensor(last_counts)[:, None]
    columns = torch.minimum(torch.arange(width), num_last - 1)
    return values[ends[:, None] - num_last + columns]


def portions(segments: Sequence[RowSegment], max_tokens: int) -> Iterator[list[RowSegment]]:
    """The segments in their order, cut and joined into forwards of `max_tokens` tokens."""
    portion: list[RowSegment] = []
    room = max_tokens
    for segment in segments:
        start, end = segment.start, segment.start + segment.count
        while start < end:
            count = min(room, end - start)
            portion.append(RowSegment(segment.slot, start, count))
            start, room = start + count, room - count
            if not room:
                yield portion
                portion, room = [], max_tokens
    if portion:
        yield portion


@runtime_checkable
class UnpaddedForwards(Checkpoints, Protocol):
    """Optional capability of a backend that runs rows one at a time and has states only where forwards ended.

    It takes several rows as `RaggedForwards` does, without padding.
    """

    takes_several_tokens: bool  # in one forward after a state; if so, long prompts are read in chunks
    rounds_like_one_token: bool  # such a forward's logits are those of single tokens, up to float32 rounding


class UnpaddedLayout:
    """The layout of sessions whose backend has `UnpaddedForwards`."""

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        """Nothing is padded, so there are as many tokens as rows and draft tokens."""
        return rows + drafted if rows > 1 else None

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, logits: bool) -> Tensor | None:
        """Prompts are read one by one, without padding where any shape is allowed."""
        return PADDED.prefill(table, rows, logits=logits)

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """One forward of all rows' real tokens."""
        width = draft.shape[1]
        real = lengths if keep > width else [width] * len(lengths)  # else a draft model scores by column
        logits, counts = self._flat(table, batch, draft, real)
        return last_of_each(logits, counts, [keep - width + n for n in real], keep)

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        logits, counts = self._flat(table, batch, draft, lengths)
        return last_of_each(argmax(logits), counts, [n + 1 for n in lengths], draft.shape[1] + 1)

    def _flat(
        self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, list[int]]:
        """[T, V] logits of all rows, one after the other, and how many belong to each row."""
        texts = without_padding(batch, draft, lengths)
        counts = [len(text) for text in texts]
        segments = [RowSegment(slot, start, counts[slot]) for slot, start in enumerate(batch.starts)]
        pieces = texts
        if table.shapes.token_by_token:
            segments = [
                RowSegment(segment.slot, segment.start + i, 1) for segment in segments for i in range(segment.count)
            ]
            pieces = [[token] for text in texts for token in text]
        return forward_segments(table, end_to_end(texts, sum(counts)), segments, pieces, None), counts


def make_session(backend: Backend, shapes: Shapes = EXACT_FIT, *, shows_images: bool = False) -> Session:
    """A session with the layout that suits the backend's capabilities."""
    if isinstance(backend, UnpaddedForwards):
        return Session(backend, shapes, UnpaddedLayout())
    ragged = isinstance(backend, RaggedForwards) and backend.ragged
    return Session(backend, shapes, RaggedLayout() if ragged else None, shows_images=shows_images)
