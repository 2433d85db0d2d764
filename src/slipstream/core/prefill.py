"""A memory of rows and how texts get into it: what is known is copied, what is not is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from slipstream.core.cache_audit import CacheAudit
from slipstream.core.cache_state import EXACT_FIT, Shapes, SlotState
from slipstream.core.interfaces import Backend, PromptLogits, set_attended_lengths
from slipstream.core.types import Row

CATCH_UP = 8  # rows that lack more tokens than this are brought up to date on their own first


@dataclass
class Reader:
    """Reads texts with one model into the slots of its memory; row i of a call uses slot i."""

    backend: Backend
    shapes: Shapes = EXACT_FIT
    slot_states: list[SlotState] = field(default_factory=list)
    prefill_tokens: int = 0

    def __post_init__(self) -> None:
        self._debug = CacheAudit(self.slot_states) if os.environ.get("SLIPSTREAM_DEBUG") == "1" else None

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; what the memory holds is kept."""
        set_attended_lengths(self.backend, self.shapes.attended_unit, self.shapes.attended_lengths)
        self.backend.reserve(rows, length + max(self.shapes.widths or (0,)) + self.shapes.chunk)
        self.slot_states.extend(SlotState() for _ in range(rows - len(self.slot_states)))

    @property
    def answers(self) -> bool:
        """Whether the forwards that read a new prompt can say what comes after it."""
        return self.shapes.reuse == 1 and isinstance(self.backend, PromptLogits)

    def forget(self) -> None:
        """Drop what the memory holds."""
        self.slot_states[:] = [SlotState() for _ in self.slot_states]

    def with_shapes(self, shapes: Shapes) -> Self:
        """The same model and memory under other shapes; sessions that share a memory may take turns."""
        other = copy(self)  # shares the memos, which are the truth about the memory
        other.shapes = shapes
        return other

    def prefill(self, rows: Sequence[Row], *, answer: bool = False) -> Tensor | None:
        """Bring the memo of rows that lack many tokens up to their last token, in chunks, never two rows together.

        answer: take in the last token too and return the logits [B, 1, V] after it, or None if those of a row lack.
        """
        answer, answers = answer and self.answers, dict[int, Tensor]()
        for slot, row in enumerate(rows):
            self._seat(slot, row)
            if not self._lacks_much(slot, row):
                answer = False
            else:
                self._read(slot, row, len(row.tokens) - (not answer), answers)
        return in_order(answers, len(rows)) if answer else None

    def _lacks_much(self, slot: int, row: Row) -> bool:
        base = self.slot_states[slot].base
        return base == 0 or len(row.tokens) - base > CATCH_UP

    def _read(self, slot: int, row: Row, end: int, answers: dict[int, Tensor]) -> None:
        slot_state = self.slot_states[slot]
        while slot_state.base < end:
            chunk = row.tokens[slot_state.base : min(end, slot_state.base + self.shapes.chunk)]
            width = self.shapes.pad_prompt(len(chunk))
            inputs = torch.tensor([chunk + [0] * (width - len(chunk))], device=self.backend.device)
            if self._debug:
                self._debug.write(slot, slot_state.base, chunk)
            if slot_state.base + len(chunk) == len(row.tokens):
                answers[slot] = self._answer(inputs, slot_state.base, slot, len(chunk) - 1)
            else:
                self._forward(inputs, [slot_state.base], slot, logits=False)
            self._has_read(slot, len(chunk))

    def _has_read(self, slot: int, count: int) -> None:
        slot_state = self.slot_states[slot]
        slot_state.base = slot_state.written = slot_state.base + count
        self.prefill_tokens += count

    def _answer(self, inputs: Tensor, start: int, slot: int, last: int) -> Tensor:
        """Logits [1, 1, V] of one column, computed beside as many others as in the narrowest forward."""
        assert isinstance(self.backend, PromptLogits)
        width = self.shapes.pad(1, 1)
        columns = torch.arange(width, device=self.backend.device) + max(0, last + 1 - width)
        logits = self.backend.answer(self._known(inputs), start, slot=slot, columns=columns)
        return logits[:, min(last, width - 1), None]

    def _seat(self, slot: int, row: Row) -> None:
        """Make slot `slot` hold what is known of its row, copying from the slot that knows most.

        Rows of a batch only ever move to lower slots, so a slot is never overwritten before it has been copied.
        """
        slot_state = self.slot_states[slot]
        if slot_state.row is row:
            if slot_state.round != len(row.rounds):
                slot_state.base = slot_state.written = slot_state.valid(row)
            return
        knowledge = [self._usable(slot_state, row) for slot_state in self.slot_states]
        known = max(knowledge)
        # of several that know as much the row's own: it is never worth more to have computed something once again
        source = max(range(len(self.slot_states)), key=lambda s: (knowledge[s], self.slot_states[s].row is row))
        if source != slot:
            self.slot_states[slot] = SlotState()  # what it held is about to be overwritten
            self.backend.copy(source, slot, known)
        if self._debug:
            self._debug.copy(source, slot, known)
        self.slot_states[slot] = SlotState(row, known, known, len(row.rounds), self.shapes)

    def _usable(self, slot_state: SlotState, row: Row) -> int:
        """How many leading tokens of a row that enters may be copied from where `memo` says."""
        other, known = slot_state.row, slot_state.valid(row)
        if other is row or other is None:
            return known
        if slot_state.shapes != self.shapes:
            return 0
        if self.shapes.reuse > 1:
            # reuse what any prefill of this prompt would have computed bit for bit: the same prompt, or whole chunks
            known = min(known, other.prompt_length - 1)
            if not known == row.prompt_length - 1 == other.prompt_length - 1:
                known -= known % self.shapes.reuse
        return known

    def _forward(self, inputs: Tensor, starts: list[int], first_slot: int, *, logits: bool) -> Tensor:
        return self.backend.forward(self._known(inputs), starts, first_slot=first_slot, logits=logits)

    def _known(self, inputs: Tensor) -> Tensor:
        # a draft model with a smaller head may be shown tokens it does not know; its drafts may be poor, never wrong
        return inputs.clamp(max=self.backend.vocab_size - 1)


def in_order(answers: Mapping[int, Tensor], count: int) -> Tensor | None:
    """The answers [1, 1, V] of rows 0 to count - 1 as [count, 1, V]; None if one lacks."""
    return torch.cat([answers[i] for i in range(count)]) if len(answers) == count else None
