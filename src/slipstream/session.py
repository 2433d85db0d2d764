"""A model and its memo: which tokens of which row its key-value memory already holds.

Committed tokens are the only truth; the memory is a memo of a prefix of them. Whatever a caller asks for, a session
feeds what the memo lacks and nothing else: prompts, the tokens after a rejection, a conversation's next turn and a
prompt that begins like another one are all this one mechanism. This module knows neither acceptance nor sampling.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.backends import Backend
from slipstream.types import Row, SlipstreamError

PROMPT_UNIT = 32  # prompts are padded to multiples of this where shapes are kept
CATCH_UP = 8  # rows that lack more tokens than this are brought up to date on their own first


@dataclass(frozen=True)
class Shapes:
    """Which forward shapes are allowed.

    A forward is padded to the next of `widths`, a prompt is cut into `chunk`s, the memory is read in units of `view`,
    and what another row left in it is used in units of `reuse`.
    """

    widths: tuple[int, ...]
    chunk: int
    view: int = 256
    reuse: int = 1

    def pad_prompt(self, length: int) -> int:
        """The width of a prompt's last chunk: depends on its length alone, and takes few values."""
        return min(self.chunk, -(-length // PROMPT_UNIT) * PROMPT_UNIT) if self.widths else length

    def pad(self, width: int) -> int:
        """The smallest allowed width that holds `width` tokens."""
        at = bisect_left(self.widths, width)
        return self.widths[at] if at < len(self.widths) else width


EXACT_FIT = Shapes(widths=(), chunk=512)


@dataclass
class Memo:
    """What one slot of the memory holds: `base` committed tokens of `row`, then draft tokens up to `written`.

    Whether the draft tokens became true is read off the row's round number `round` once that is committed.
    shapes: those of the forwards that computed it.
    """

    row: Row | None = None
    base: int = 0
    written: int = 0
    round: int = 0
    shapes: Shapes = EXACT_FIT

    def valid(self, row: Row) -> int:
        """How many leading tokens of `row` the slot holds."""
        if self.row is None:
            return 0
        own = max(self.base, min(self.written, self.row.true_length(self.round, self.base)))
        if self.row is row:
            return own
        # another row's slot: reuse the common beginning, but always leave one token to feed
        limit = min(own, len(row.tokens) - 1)
        theirs, ours = self.row.tokens, row.tokens
        return next((i for i in range(limit) if theirs[i] != ours[i]), max(limit, 0))


@dataclass
class Session:
    """Scores tokens with one model for up to `rows` rows; row i of a call uses slot i of the memory."""

    backend: Backend
    shapes: Shapes = EXACT_FIT
    memos: list[Memo] = field(default_factory=list)
    prefill_tokens: int = 0

    def __post_init__(self) -> None:
        self._debug = _Ledger(self) if os.environ.get("SLIPSTREAM_DEBUG") == "1" else None

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; what the memory holds is kept."""
        self.backend.view = self.shapes.view
        self.backend.reserve(rows, length + max(self.shapes.widths or (0,)) + self.shapes.chunk)
        self.memos.extend(Memo() for _ in range(rows - len(self.memos)))

    @property
    def longest_draft(self) -> int | None:
        """The longest draft whose round fits the allowed widths; None for any."""
        return max(0, self.shapes.widths[-1] - CATCH_UP) if self.shapes.widths else None

    def forget(self) -> None:
        """Drop what the memory holds."""
        self.memos[:] = [Memo() for _ in self.memos]

    def with_shapes(self, shapes: Shapes) -> Session:
        """The same model and memory under other shapes; sessions that share a memory may take turns."""
        other = copy(self)  # shares the memos, which are the truth about the memory
        other.shapes = shapes
        return other

    def prefill(self, rows: Sequence[Row]) -> None:
        """Bring the memo of rows that lack many tokens up to their last token, one row at a time, in chunks.

        A row is never prefilled together with others, so the result does not depend on them.
        """
        for slot, row in enumerate(rows):
            self._seat(slot, row)
            memo, end = self.memos[slot], len(row.tokens) - 1
            if len(row.tokens) - memo.base <= CATCH_UP and memo.base > 0:
                continue
            while memo.base < end:
                chunk = row.tokens[memo.base : min(end, memo.base + self.shapes.chunk)]
                width = self.shapes.pad_prompt(len(chunk))
                inputs = torch.tensor([chunk + [0] * (width - len(chunk))], device=self.backend.device)
                self._record(slot, [memo.base], inputs, len(chunk))
                self._forward(inputs, [memo.base], slot, logits=False)
                memo.base = memo.written = memo.base + len(chunk)
                self.prefill_tokens += len(chunk)

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits after the committed tokens and after each draft token.

        draft: [B, K] token ids, of which row i really has `lengths[i]`. Returns [B, K + 1, V], or only the last
        `keep` of the K + 1 positions.
        """
        self.prefill(rows)
        width, keep = draft.shape[1], draft.shape[1] + 1 if keep is None else keep
        starts = [self._feed_from(slot, row, width if keep <= width else 0) for slot, row in enumerate(rows)]
        missing = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        # draft tokens that are in the memory already (a draft model scoring token by token) are not fed again
        fed = [max(start - len(row.tokens), 0) for row, start in zip(rows, starts, strict=True)]
        counts = [len(tail) + width - skip for tail, skip in zip(missing, fed, strict=True)]
        inputs = self._inputs(missing, draft, fed, self.shapes.pad(max(counts)))
        for slot, start in enumerate(starts):
            self._record(slot, [start], inputs[slot : slot + 1], counts[slot])
        logits = self._forward(inputs, starts, 0, logits=True)
        for slot, row in enumerate(rows):
            true = len(row.tokens)
            self.memos[slot] = Memo(row, true, true + lengths[slot], len(row.rounds), self.shapes)
        return _last(logits, counts, keep)

    def _forward(self, inputs: Tensor, starts: list[int], first_slot: int, *, logits: bool) -> Tensor:
        # a draft model with a smaller head may be shown tokens it does not know; its drafts may be poor, never wrong
        inputs = inputs.clamp(max=self.backend.vocab_size - 1)
        return self.backend.forward(inputs, starts, first_slot=first_slot, logits=logits)

    def _feed_from(self, slot: int, row: Row, width: int) -> int:
        """The first position whose key and value the slot lacks; at least one token is always fed.

        width: columns of the draft if the caller goes on column by column within a round, else 0.
        """
        memo = self.memos[slot]
        this_round = memo.round == len(row.rounds) and memo.base == len(row.tokens)
        if this_round and memo.written < memo.base + width:
            return memo.written  # the columns written earlier in this round stand
        return min(memo.base, len(row.tokens) - 1)

    def _seat(self, slot: int, row: Row) -> None:
        """Make slot `slot` hold what is known of its row, copying from the slot that knows most.

        Rows of a batch only ever move to lower slots, so a slot is never overwritten before it has been copied.
        """
        memo = self.memos[slot]
        if memo.row is row:
            if memo.round != len(row.rounds):
                memo.base = memo.written = memo.valid(row)
            return
        source = max(range(len(self.memos)), key=lambda s: self.memos[s].valid(row))
        other, known = self.memos[source].row, self.memos[source].valid(row)
        if other is not row and self.memos[source].shapes != self.shapes:
            known = 0
        elif other is not row and other is not None and self.shapes.reuse > 1:
            # reuse what any prefill of this prompt would have computed bit for bit: the same prompt, or whole chunks
            known = min(known, other.prompt_length - 1)
            if not known == row.prompt_length - 1 == other.prompt_length - 1:
                known -= known % self.shapes.reuse
        if source != slot:
            self.memos[slot] = Memo()  # what it held is about to be overwritten
            self.backend.copy(source, slot, known)
        if self._debug:
            self._debug.copy(source, slot, known)
        self.memos[slot] = Memo(row, known, known, len(row.rounds), self.shapes)

    def _inputs(self, missing: list[list[int]], draft: Tensor, fed: list[int], width: int) -> Tensor:
        """[B, width] token ids: what each row lacks, then its draft, then padding."""
        device = self.backend.device
        padded = [tail + [0] * (width - len(tail)) for tail in missing]
        inputs = torch.tensor(padded, dtype=torch.int64).to(device, non_blocking=True)
        if len(set(map(len, missing))) == 1 and len(set(fed)) == 1:
            at, skip = len(missing[0]), fed[0]
            inputs[:, at : at + draft.shape[1] - skip] = draft[:, skip:]
        else:
            for row, (tail, skip) in enumerate(zip(missing, fed, strict=True)):
                inputs[row, len(tail) : len(tail) + draft.shape[1] - skip] = draft[row, skip:]
        return inputs

    def _record(self, slot: int, starts: list[int], inputs: Tensor, count: int) -> None:
        if self._debug:
            self._debug.write(slot, starts[0], inputs[0, :count].tolist())


def _last(logits: Tensor, counts: list[int], keep: int) -> Tensor:
    """The last `keep` of each row's `counts[i]` real positions. logits: [B, W, V] -> [B, keep, V]."""
    if len(set(counts)) == 1:
        return logits[:, counts[0] - keep : counts[0]]
    first = torch.tensor([count - keep for count in counts], device=logits.device)
    index = first[:, None] + torch.arange(keep, device=logits.device)
    return logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))


class _Ledger:
    """Debug mode (SLIPSTREAM_DEBUG=1): the token ids each slot holds, compared with committed tokens at every use."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids: dict[int, list[int]] = {}

    def write(self, slot: int, start: int, tokens: list[int]) -> None:
        held = self._ids.setdefault(slot, [])
        if len(held) < start:
            raise SlipstreamError(f"memo: slot {slot} holds {len(held)} tokens, written at {start}")
        memo = self._session.memos[slot]
        true = memo.row.tokens if memo.row is not None else []
        upto = min(start, len(true))
        if held[:upto] != true[:upto]:
            at = next(i for i in range(upto) if held[i] != true[i])
            raise SlipstreamError(f"memo: slot {slot} position {at} holds token {held[at]}, committed is {true[at]}")
        self._ids[slot] = held[:start] + tokens

    def copy(self, source: int, destination: int, length: int) -> None:
        self._ids[destination] = self._ids.get(source, [])[:length]
