"""Sessions whose forwards take a different number of tokens of each row, one row's behind the other's, without padding.

The specification is `Session`: the same logits, from forwards in which every row is padded to the longest and prompts
are read one by one. Texts of several rows are read in the same forwards; one that begins as another does waits until
that one was read, and copies it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.cache_state import EXACT_FIT, Shapes, common_beginning
from slipstream.core.input_batch import InputBatch
from slipstream.core.interfaces import Backend, RaggedForwards, RowSegment
from slipstream.core.prefill import CATCH_UP, in_order
from slipstream.core.session import Session
from slipstream.core.types import Row


def make_session(backend: Backend, shapes: Shapes = EXACT_FIT) -> Session:
    """The session that makes the most of a backend."""
    kind = RaggedSession if isinstance(backend, RaggedForwards) and backend.ragged else Session
    return kind(backend, shapes)


@dataclass
class RaggedSession(Session):
    """A session over a backend that is `Ragged`."""

    @property
    def ragged(self) -> bool:
        """Whether the shapes allow ragged forwards."""
        return not self.shapes.widths or bool(self.shapes.totals)

    def num_tokens(self, rows: int, drafted: int) -> int | None:
        """Tokens of a ragged forward that verifies `drafted` tokens of several rows; None if there is no such."""
        return self.shapes.pad_total(rows + drafted) if rows > 1 else None

    def prefill(self, rows: Sequence[Row], *, answer: bool = False) -> Tensor | None:
        """See `Session.prefill`; rows that share no beginning are read together."""
        if not self.ragged or self.shapes.reuse > 1:
            return super().prefill(rows, answer=answer)
        answer, answers = answer and self.answers, dict[int, Tensor]()
        for turn in self._turns(rows):
            lacking = {slot: row for slot, row in turn.items() if self._lacks_much(slot, row)}
            answer = answer and len(lacking) == len(turn)
            ends = {slot: len(row.tokens) - (not answer) for slot, row in lacking.items()}
            if len(ends) > 1:
                self._read_together(turn, ends, answers)
            else:
                for slot, end in ends.items():
                    self._read(slot, turn[slot], end, answers)
        return in_order(answers, len(rows)) if answer else None

    def _turns(self, rows: Sequence[Row]) -> Iterator[dict[int, Row]]:
        """Rows that are read together, by slot; those that would copy what others read come after them."""
        waiting = list(enumerate(rows))
        while waiting:
            now: dict[int, Row] = {}
            later = []
            for slot, row in waiting:
                if now and self._would_copy(slot, row, now.values()):
                    later.append((slot, row))
                else:
                    self._seat(slot, row)
                    now[slot] = row
            yield now
            waiting = later

    def _would_copy(self, slot: int, row: Row, others: Iterable[Row]) -> bool:
        if self.slot_states[slot].row is row:
            return False
        known, most = max(self._usable(slot_state, row) for slot_state in self.slot_states), len(row.tokens) - 1
        return any(common_beginning(row.tokens, other.tokens, most) > known + CATCH_UP for other in others)

    def _read_together(self, rows: dict[int, Row], ends: dict[int, int], answers: dict[int, Tensor]) -> None:
        """Several rows' texts one behind the other, in forwards of a chunk."""
        lacking = [RowSegment(slot, base, ends[slot] - base) for slot in ends for base in [self.slot_states[slot].base]]
        for segments in portions(lacking, self.shapes.shared_chunk):
            texts = [rows[segment.slot].tokens[segment.start : segment.start + segment.count] for segment in segments]
            counts = [segment.count for segment in segments]
            total = sum(counts[:-1]) + self.shapes.pad_prompt(counts[-1])
            inputs = end_to_end(texts, self.shapes.pad_prompt(total))
            over = [
                i
                for i, segment in enumerate(segments)
                if segment.start + segment.count == len(rows[segment.slot].tokens)
            ]
            columns = [sum(counts[: i + 1]) - 1 for i in over]
            wanted = max(1, len(over))  # columns go through the output layer in numbers that agree
            columns += [0] * ((self.shapes.pad_total(wanted) or self.shapes.pad_prompt(wanted)) - len(over))
            logits = self._forward_ragged(inputs, segments, texts, None, torch.tensor(columns))
            answers.update({segments[i].slot: logits[None, n : n + 1] for n, i in enumerate(over)})
            for segment in segments:
                self._has_read(segment.slot, segment.count)

    def _score(self, input_batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        width, rows = draft.shape[1], len(input_batch.starts)
        if rows == 1 or (keep <= width and set(lengths) != {width}):
            return super()._score(input_batch, draft, lengths, keep)
        texts = without_padding(input_batch, draft, lengths)
        total = self.num_tokens(rows, sum(map(len, texts)) - rows)
        if total is None or total >= rows * input_batch.width or not self.ragged:
            return super()._score(input_batch, draft, lengths, keep)
        segments = [RowSegment(slot, start, len(texts[slot])) for slot, start in enumerate(input_batch.starts)]
        logits = self._forward_ragged(end_to_end(texts, total), segments, texts, self.shapes.widths)
        return last_of_each(logits, [len(text) for text in texts], [keep - width + n for n in lengths], keep)

    def _forward_ragged(
        self,
        inputs: Tensor,
        segments: list[RowSegment],
        texts: list[list[int]],
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(self.backend, RaggedForwards)
        if self._debug:
            for segment, text in zip(segments, texts, strict=True):
                self._debug.write(segment.slot, segment.start, text)
        return self.backend.forward_ragged(self._known(inputs), segments, widths=widths, columns=columns)


def without_padding(input_batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> list[list[int]]:
    """The real tokens of each row, of row i's draft the first lengths[i] tokens."""
    parts = zip(input_batch.missing, draft.tolist(), input_batch.fed, lengths, strict=True)
    return [[*tail, *drafted[skip:length]] for tail, drafted, skip, length in parts]


def end_to_end(texts: Sequence[Sequence[int]], total: int) -> Tensor:
    """[total] token ids of several texts, one behind the other, then padding."""
    tokens = [token for text in texts for token in text]
    return torch.tensor(tokens + [0] * (total - len(tokens)), dtype=torch.int64)


def last_of_each(logits: Tensor, counts: Sequence[int], wanted: Sequence[int], most: int) -> Tensor:
    """The last wanted[i] of row i's counts[i] positions, then its last one again. logits: [T, V] -> [B, most, V]."""
    ends = torch.tensor(counts).cumsum(0)
    own = torch.tensor(wanted)[:, None]
    columns = torch.minimum(torch.arange(most), own - 1)
    return logits[ends[:, None] - own + columns]


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
