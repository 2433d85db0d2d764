"""Log-probabilities of a prompt's own tokens.

The logits of every position are needed, so cached tokens are computed again. Forwards have the shapes of rounds: where
shapes agree to the bit, a token gets the same number as when it is generated.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from slipstream.core.kv_slots import SlotState
from slipstream.core.rounds import TokenLogprobs, token_logprobs
from slipstream.core.session import Session
from slipstream.core.types import Row

WIDTH = 64  # columns of a forward where any shape is allowed; each has the logits of a whole vocabulary


@dataclass
class PromptScores:
    """Scores a row's tokens in steps, in a slot that no row of a batch uses."""

    session: Session
    slot: int
    row: Row
    count: int  # likeliest tokens to report for each position
    values: list[TokenLogprobs] = field(default_factory=list)  # of the second token, the third, ...
    _read: int = 0

    @property
    def finished(self) -> bool:
        return len(self.values) >= len(self.row.tokens) - 1

    @torch.inference_mode()
    def advance(self, budget: int) -> None:
        """Score about `budget` more tokens."""
        table, tokens = self.session.table, self.row.tokens
        state = table.states[self.slot] if self.slot < len(table.states) else None
        if state is None or state.row is not self.row:  # the first step, or another row has used the slot
            self.session.reserve(self.slot + 1, len(tokens))
            table.states[self.slot] = SlotState(self.row, shapes=table.shapes, is_long=table.is_long(self.row))
            self._read = 0
        while budget > 0 and not self.finished:
            budget -= self._step()

    def _step(self) -> int:
        table, tokens = self.session.table, self.row.tokens
        piece = tokens[self._read : self._read + self._width()]
        padding = self.session.shapes.width_for(len(piece), 1) - len(piece)
        inputs = torch.tensor([piece + [0] * padding], device=table.backend.device)
        table.mark_final(self.slot, self._read + len(piece))
        table.set_reading(self.slot, self.row)
        if table.audit:
            table.audit.write(self.slot, self._read, piece)
        logits = table.forward(inputs, [self._read], self.slot, logits=True)[0]
        follow = tokens[self._read + 1 : self._read + len(piece) + 1]
        logprobs = token_logprobs(logits, follow, self.count) if follow else ()
        self.values[self._read :] = logprobs
        self._read += len(piece)
        table.note_read(self.slot, len(piece))
        return len(piece)

    def _width(self) -> int:
        shapes = self.session.shapes
        if shapes.token_by_token:
            return 1
        return (shapes.alone or shapes.widths or (WIDTH,))[-1]
