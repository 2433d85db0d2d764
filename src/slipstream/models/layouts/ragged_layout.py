"""Forwards that take a different number of tokens of each row, one row's after the other's, without padding.

The specification is `Rectangle`: the same logits, from forwards in which every row is padded to the longest and prompts
are read one by one. Texts of several rows are read in the same forwards; one that begins as another does waits until
that one was read, and copies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from slipstream.core.interfaces import RaggedForwards, RowSegment
from slipstream.core.kv_slots import CATCH_UP, PROMPT_UNIT, SlotTable, common_beginning, in_order
from slipstream.core.rng import argmax
from slipstream.core.session import InputBatch, Rectangle
from slipstream.core.types import Row


class RaggedLayout:
    """The layout of sessions whose backend has `RaggedForwards`."""

    def __init__(self) -> None:
        self._rectangle = Rectangle()

    @staticmethod
    def allowed(table: SlotTable) -> bool:
        """Whether the shapes allow ragged forwards."""
        return not table.shapes.widths or bool(table.shapes.totals)

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        """Tokens of a ragged forward that verifies `drafted` tokens of several rows; None if there is none."""
        return table.shapes.total_for(rows + drafted) if rows > 1 else None

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, answer: bool) -> Tensor | None:
        """See `Session.prefill`; rows that share no beginning are read together."""
        if not self.allowed(table) or table.shapes.reuse > 1:
            return self._rectangle.prefill(table, rows, answer=answer)
        answers: dict[int, Tensor] = {}
        for group in _groups(table, rows):
            lacking = {slot: row for slot, row in group.items() if table.is_far_behind(slot, row)}
            answer = answer and len(lacking) == len(group)
            ends = {slot: len(row.tokens) - (not answer) for slot, row in lacking.items()}
            if len(ends) > 1:
                _read_together(table, group, ends, answers)
            else:
                for slot, end in ends.items():
                    table.read(slot, group[slot], end, answers)
        return in_order(answers, len(rows)) if answer else None

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """One forward without padding, where that takes fewer tokens than the rectangle."""
        width = draft.shape[1]
        flat = None if keep <= width and set(lengths) != {width} else self._flat(table, batch, draft, lengths)
        if flat is None:
            return self._rectangle.score(table, batch, draft, lengths, keep)
        return last_of_each(*flat, [keep - width + n for n in lengths], keep)

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """See `BatchLayout`; the tokens are put in rows, not the logits."""
        if (flat := self._flat(table, batch, draft, lengths)) is None:
            return self._rectangle.best(table, batch, draft, lengths)
        logits, counts = flat
        return last_of_each(argmax(logits), counts, [n + 1 for n in lengths], draft.shape[1] + 1)

    def _flat(
        self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]
    ) -> tuple[Tensor, list[int]] | None:
        """[T, V] logits of all rows one behind the other, and how many are whose; None if a rectangle is as small."""
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
    """Rows that are read together, by slot; those that would copy what others read come after them."""
    waiting = list(enumerate(rows))
    while waiting:
        now: dict[int, Row] = {}
        later = []
        for slot, row in waiting:
            if now and _would_copy(table, slot, row, now.values()):
                later.append((slot, row))
            else:
                table.assign_slot(slot, row)
                now[slot] = row
        yield now
        waiting = later


def _would_copy(table: SlotTable, slot: int, row: Row, others: Iterable[Row]) -> bool:
    if table.states[slot].row is row:
        return False
    cached, most = max(table.reusable_prefix(i, row) for i in range(len(table.states))), len(row.tokens) - 1
    return any(common_beginning(row.tokens, other.tokens, most) > cached + CATCH_UP for other in others)


def _read_together(table: SlotTable, rows: dict[int, Row], ends: dict[int, int], answers: dict[int, Tensor]) -> None:
    """Several rows' texts one after the other, in forwards of a chunk."""
    shapes = table.shapes
    lacking = [RowSegment(slot, base, ends[slot] - base) for slot in ends for base in [table.states[slot].base]]
    most = shapes.chunk - PROMPT_UNIT if shapes.widths else shapes.chunk  # the last piece may be padded
    for segments in portions(lacking, most):
        texts = [rows[segment.slot].tokens[segment.start : segment.start + segment.count] for segment in segments]
        counts = [segment.count for segment in segments]
        total = sum(counts[:-1]) + shapes.prompt_width_for(counts[-1])
        inputs = end_to_end(texts, shapes.prompt_width_for(total))
        over = [i for i, one in enumerate(segments) if one.start + one.count == len(rows[one.slot].tokens)]
        columns = [sum(counts[: i + 1]) - 1 for i in over]
        wanted = max(1, len(over))  # columns go through the output layer in numbers that agree
        columns += [0] * ((shapes.total_for(wanted) or shapes.prompt_width_for(wanted)) - len(over))
        logits = forward_segments(table, inputs, segments, texts, None, torch.tensor(columns))
        answers.update({segments[i].slot: logits[None, n : n + 1] for n, i in enumerate(over)})
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
    """See `RaggedForwards.forward_ragged`; the audit is told what is written."""
    assert isinstance(table.backend, RaggedForwards)
    if table.audit:
        for segment, text in zip(segments, texts, strict=True):
            table.audit.write(segment.slot, segment.start, text)
    return table.backend.forward_ragged(table.clamp_to_vocabulary(inputs), segments, widths=widths, columns=columns)


def without_padding(batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> list[list[int]]:
    """The real tokens of each row, of row i's draft the first lengths[i] tokens."""
    parts = zip(batch.missing, draft.tolist(), batch.fed, lengths, strict=True)
    return [[*tail, *drafted[skip:length]] for tail, drafted, skip, length in parts]


def end_to_end(texts: Sequence[Sequence[int]], total: int) -> Tensor:
    """[total] token ids of several texts, one behind the other, then padding."""
    tokens = [token for text in texts for token in text]
    return torch.tensor(tokens + [0] * (total - len(tokens)), dtype=torch.int64)


def last_of_each(values: Tensor, counts: Sequence[int], wanted: Sequence[int], most: int) -> Tensor:
    """The last wanted[i] of row i's counts[i] positions, then its last again. values: [T, ...] -> [B, most, ...]."""
    ends = torch.tensor(counts).cumsum(0)
    own = torch.tensor(wanted)[:, None]
    columns = torch.minimum(torch.arange(most), own - 1)
    return values[ends[:, None] - own + columns]


def portions(needs: Sequence[RowSegment], most: int) -> Iterator[list[RowSegment]]:
    """The pieces in their order, cut and put together into forwards of `most` tokens."""
    portion: list[RowSegment] = []
    room = most
    for need in needs:
        start, end = need.start, need.start + need.count
        while start < end:
            count = min(room, end - start)
            portion.append(RowSegment(need.slot, start, count))
            start, room = start + count, room - count
            if not room:
                yield portion
                portion, room = [], most
    if portion:
        yield portion
