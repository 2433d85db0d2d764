"""A model and its memo: which tokens of which row its key-value memory already holds.

Committed tokens are the only truth; the memory is a memo of a prefix of them. Whatever a caller asks for, a session
feeds what the memo lacks and nothing else: prompts, the tokens after a rejection, a conversation's next turn and a
prompt that begins like another one are all this one mechanism. This module knows neither acceptance nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.cache_state import SlotState
from slipstream.core.input_batch import InputBatch, last
from slipstream.core.interfaces import GreedyRounds
from slipstream.core.prefill import CATCH_UP, Reader
from slipstream.core.types import Row, Verdict


@dataclass
class Session(Reader):
    """Scores tokens with one model for up to `rows` rows; row i of a call uses slot i of the memory."""

    def num_tokens(self, rows: int, drafted: int) -> int | None:
        """Tokens of a ragged forward that verifies `drafted` tokens of several rows; None if there is no such."""
        return None

    @property
    def longest_draft(self) -> int | None:
        """The longest draft whose round fits the allowed widths; None for any."""
        return max(0, self.shapes.widths[-1] - CATCH_UP) if self.shapes.widths else None

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits after the committed tokens and after each draft token.

        draft: [B, K] token ids, of which row i really has `lengths[i]`. Returns [B, K + 1, V], or only the last
        `keep` of the K + 1 positions.
        """
        keep = draft.shape[1] + 1 if keep is None else keep
        input_batch = self._input_batch(rows, draft, keep)
        logits = self._score(input_batch, draft, lengths, keep)
        self._remember(rows, lengths)
        return logits

    def _score(self, input_batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        return last(
            self._forward(self._inputs(input_batch, draft), input_batch.starts, 0, logits=True),
            input_batch.counts,
            keep,
        )

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """[B, steps] tokens of the model's own choice, each fed to the next step, in one call of the backend.

        None if the backend is not `Unrolled`: then it is `score`, step by step.
        """
        backend = self.backend
        if not isinstance(backend, GreedyRounds):
            return None
        nothing = torch.empty(len(rows), 0, dtype=torch.int64, device=backend.device)
        input_batch = self._input_batch(rows, nothing, 1)
        inputs = self._inputs(input_batch, nothing)
        tokens = backend.draft_greedy(
            inputs, input_batch.starts, input_batch.counts, steps=steps, vocab_size=vocab_size
        )
        self._remember(rows, [steps - 1] * len(rows))
        if self._debug:
            for slot, row in enumerate(rows):
                self._debug.write(slot, len(row.tokens), tokens[slot, : steps - 1].tolist())
        return tokens

    def verify_greedy(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int]) -> Verdict | None:
        """`score`, argmax and the longest matching prefix in one call of the backend; None if it is not `Unrolled`."""
        backend = self.backend
        if not isinstance(backend, GreedyRounds):
            return None
        width = draft.shape[1]
        input_batch = self._input_batch(rows, draft, width + 1)
        inputs = self._inputs(input_batch, draft)
        table = backend.verify_greedy(inputs, input_batch.starts, input_batch.counts, lengths, width=width)
        self._remember(rows, lengths)
        return Verdict(table[:, 0], table[:, 1])

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """Note that of what was scored for row i in this round only the first lengths[i] tokens are its draft."""
        for slot_state, length in zip(self.slot_states, lengths, strict=False):
            slot_state.written = min(slot_state.written, slot_state.base + length)

    def _input_batch(self, rows: Sequence[Row], draft: Tensor, keep: int) -> InputBatch:
        """What the rows' memory lacks up to the end of the draft, of which `keep` positions will be asked for."""
        self.prefill(rows)
        width = draft.shape[1]
        starts = [self._first_missing(slot, row, width if keep <= width else 0) for slot, row in enumerate(rows)]
        missing = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        # draft tokens that are in the memory already (a draft model scoring token by token) are not fed again
        fed = [max(start - len(row.tokens), 0) for row, start in zip(rows, starts, strict=True)]
        counts = [len(tail) + width - skip for tail, skip in zip(missing, fed, strict=True)]
        return InputBatch(starts, missing, fed, width, self.shapes.pad(max(counts), len(rows)))

    def _inputs(self, input_batch: InputBatch, draft: Tensor) -> Tensor:
        inputs = input_batch.rectangle(draft.to(self.backend.device))
        if self._debug:
            for slot, (start, count) in enumerate(zip(input_batch.starts, input_batch.counts, strict=True)):
                self._debug.write(slot, start, inputs[slot, :count].tolist())
        return inputs

    def _remember(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Note that the slots hold the rows' committed tokens and lengths[i] draft tokens after them."""
        for slot, row in enumerate(rows):
            true = len(row.tokens)
            self.slot_states[slot] = SlotState(row, true, true + lengths[slot], len(row.rounds), self.shapes)

    def _first_missing(self, slot: int, row: Row, width: int) -> int:
        """The first position whose key and value the slot lacks; at least one token is always fed.

        width: columns of the draft if the caller goes on column by column within a round, else 0.
        """
        slot_state = self.slot_states[slot]
        this_round = slot_state.round == len(row.rounds) and slot_state.base == len(row.tokens)
        if this_round and slot_state.written < slot_state.base + width:
            return slot_state.written  # the columns written earlier in this round stand
        return min(slot_state.base, len(row.tokens) - 1)
