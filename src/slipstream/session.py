"""A model and its memo: which tokens of which row its key-value memory already holds.

Committed tokens are the only truth; the memory is a memo of a prefix of them. Whatever a caller asks for, a session
feeds what the memo lacks and nothing else: prompts, the tokens after a rejection, a conversation's next turn and a
prompt that begins like another one are all this one mechanism. This module knows neither acceptance nor sampling.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.backends import Answering, Backend, Unrolled, read_memory
from slipstream.ledger import Ledger
from slipstream.memo import EXACT_FIT, Memo, Shapes
from slipstream.types import Row, Verdict

CATCH_UP = 8  # rows that lack more tokens than this are brought up to date on their own first


@dataclass(frozen=True)
class Feed:
    """Input of one forward: [B, W] token ids from starts[i] on, of which row i has counts[i] real ones."""

    inputs: Tensor
    starts: list[int]
    counts: list[int]


@dataclass
class Session:
    """Scores tokens with one model for up to `rows` rows; row i of a call uses slot i of the memory."""

    backend: Backend
    shapes: Shapes = EXACT_FIT
    memos: list[Memo] = field(default_factory=list)
    prefill_tokens: int = 0

    def __post_init__(self) -> None:
        self._debug = Ledger(self.memos) if os.environ.get("SLIPSTREAM_DEBUG") == "1" else None

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; what the memory holds is kept."""
        read_memory(self.backend, self.shapes.view, self.shapes.reads)
        self.backend.reserve(rows, length + max(self.shapes.widths or (0,)) + self.shapes.chunk)
        self.memos.extend(Memo() for _ in range(rows - len(self.memos)))

    @property
    def longest_draft(self) -> int | None:
        """The longest draft whose round fits the allowed widths; None for any."""
        return max(0, self.shapes.widths[-1] - CATCH_UP) if self.shapes.widths else None

    @property
    def answers(self) -> bool:
        """Whether the forwards that read a new prompt can say what comes after it."""
        return self.shapes.reuse == 1 and isinstance(self.backend, Answering)

    def forget(self) -> None:
        """Drop what the memory holds."""
        self.memos[:] = [Memo() for _ in self.memos]

    def with_shapes(self, shapes: Shapes) -> Session:
        """The same model and memory under other shapes; sessions that share a memory may take turns."""
        other = copy(self)  # shares the memos, which are the truth about the memory
        other.shapes = shapes
        return other

    def prefill(self, rows: Sequence[Row], *, answer: bool = False) -> Tensor | None:
        """Bring the memo of rows that lack many tokens up to their last token, in chunks, never two rows together.

        answer: take in the last token too and return the logits [B, 1, V] after it, or None if those of a row lack.
        """
        answer, answers = answer and self.answers, list[Tensor]()
        for slot, row in enumerate(rows):
            self._seat(slot, row)
            memo = self.memos[slot]
            if len(row.tokens) - memo.base <= CATCH_UP and memo.base > 0:
                answer = False
                continue
            end = len(row.tokens) if answer else len(row.tokens) - 1
            while memo.base < end:
                chunk = row.tokens[memo.base : min(end, memo.base + self.shapes.chunk)]
                width = self.shapes.pad_prompt(len(chunk))
                inputs = torch.tensor([chunk + [0] * (width - len(chunk))], device=self.backend.device)
                if self._debug:
                    self._debug.write(slot, memo.base, chunk)
                if memo.base + len(chunk) == len(row.tokens):
                    answers.append(self._answer(inputs, memo.base, slot, len(chunk) - 1))
                else:
                    self._forward(inputs, [memo.base], slot, logits=False)
                memo.base = memo.written = memo.base + len(chunk)
                self.prefill_tokens += len(chunk)
        return torch.cat(answers) if answer and len(answers) == len(rows) else None

    def _answer(self, inputs: Tensor, start: int, slot: int, last: int) -> Tensor:
        """Logits [1, 1, V] of one column, computed beside as many others as in the narrowest forward."""
        assert isinstance(self.backend, Answering)
        width = self.shapes.pad(1, 1)
        columns = torch.arange(width, device=self.backend.device) + max(0, last + 1 - width)
        logits = self.backend.answer(self._known(inputs), start, slot=slot, columns=columns)
        return logits[:, min(last, width - 1), None]

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits after the committed tokens and after each draft token.

        draft: [B, K] token ids, of which row i really has `lengths[i]`. Returns [B, K + 1, V], or only the last
        `keep` of the K + 1 positions.
        """
        keep = draft.shape[1] + 1 if keep is None else keep
        feed = self._feed(rows, draft, keep)
        logits = self._forward(feed.inputs, feed.starts, 0, logits=True)
        self._remember(rows, lengths)
        return _last(logits, feed.counts, keep)

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """[B, steps] tokens of the model's own choice, each fed to the next step, in one call of the backend.

        None if the backend is not `Unrolled`: then it is `score`, step by step.
        """
        backend = self.backend
        if not isinstance(backend, Unrolled):
            return None
        nothing = torch.empty(len(rows), 0, dtype=torch.int64, device=backend.device)
        feed = self._feed(rows, nothing, 1)
        tokens = backend.draft_greedy(feed.inputs, feed.starts, feed.counts, steps=steps, vocab_size=vocab_size)
        self._remember(rows, [steps - 1] * len(rows))
        if self._debug:
            for slot, row in enumerate(rows):
                self._debug.write(slot, len(row.tokens), tokens[slot, : steps - 1].tolist())
        return tokens

    def verify_greedy(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int]) -> Verdict | None:
        """`score`, argmax and the longest matching prefix in one call of the backend; None if it is not `Unrolled`."""
        backend = self.backend
        if not isinstance(backend, Unrolled):
            return None
        width = draft.shape[1]
        feed = self._feed(rows, draft, width + 1)
        table = backend.verify_greedy(feed.inputs, feed.starts, feed.counts, lengths, width=width)
        self._remember(rows, lengths)
        return Verdict(table[:, 0], table[:, 1])

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """Note that of what was scored for row i in this round only the first lengths[i] tokens are its draft."""
        for memo, length in zip(self.memos, lengths, strict=False):
            memo.written = min(memo.written, memo.base + length)

    def _feed(self, rows: Sequence[Row], draft: Tensor, keep: int) -> Feed:
        """What the rows' memory lacks up to the end of the draft, of which `keep` positions will be asked for."""
        self.prefill(rows)
        width = draft.shape[1]
        starts = [self._feed_from(slot, row, width if keep <= width else 0) for slot, row in enumerate(rows)]
        missing = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        # draft tokens that are in the memory already (a draft model scoring token by token) are not fed again
        fed = [max(start - len(row.tokens), 0) for row, start in zip(rows, starts, strict=True)]
        counts = [len(tail) + width - skip for tail, skip in zip(missing, fed, strict=True)]
        inputs = self._inputs(missing, draft, fed, self.shapes.pad(max(counts), len(rows)))
        if self._debug:
            for slot, start in enumerate(starts):
                self._debug.write(slot, start, inputs[slot, : counts[slot]].tolist())
        return Feed(inputs, starts, counts)

    def _remember(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Note that the slots hold the rows' committed tokens and lengths[i] draft tokens after them."""
        for slot, row in enumerate(rows):
            true = len(row.tokens)
            self.memos[slot] = Memo(row, true, true + lengths[slot], len(row.rounds), self.shapes)

    def _forward(self, inputs: Tensor, starts: list[int], first_slot: int, *, logits: bool) -> Tensor:
        return self.backend.forward(self._known(inputs), starts, first_slot=first_slot, logits=logits)

    def _known(self, inputs: Tensor) -> Tensor:
        # a draft model with a smaller head may be shown tokens it does not know; its drafts may be poor, never wrong
        return inputs.clamp(max=self.backend.vocab_size - 1)

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
        knowledge = [self._usable(memo, row) for memo in self.memos]
        known = max(knowledge)
        # of several that know as much the row's own: it is never worth more to have computed something once again
        source = max(range(len(self.memos)), key=lambda s: (knowledge[s], self.memos[s].row is row))
        if source != slot:
            self.memos[slot] = Memo()  # what it held is about to be overwritten
            self.backend.copy(source, slot, known)
        if self._debug:
            self._debug.copy(source, slot, known)
        self.memos[slot] = Memo(row, known, known, len(row.rounds), self.shapes)

    def _usable(self, memo: Memo, row: Row) -> int:
        """How many leading tokens of a row that enters may be copied from where `memo` says."""
        other, known = memo.row, memo.valid(row)
        if other is row or other is None:
            return known
        if memo.shapes != self.shapes:
            return 0
        if self.shapes.reuse > 1:
            # reuse what any prefill of this prompt would have computed bit for bit: the same prompt, or whole chunks
            known = min(known, other.prompt_length - 1)
            if not known == row.prompt_length - 1 == other.prompt_length - 1:
                known -= known % self.shapes.reuse
        return known

    def _inputs(self, missing: list[list[int]], draft: Tensor, fed: list[int], width: int) -> Tensor:
        """[B, width] token ids: what each row lacks, then its draft, then padding."""
        device, count = self.backend.device, draft.shape[1]
        shift = [skip - len(tail) for tail, skip in zip(missing, fed, strict=True)]  # from input to draft column
        table = [[by, *tail, *[0] * (width - len(tail))] for by, tail in zip(shift, missing, strict=True)]
        columns = torch.tensor(table, dtype=torch.int64).to(device, non_blocking=True)
        inputs = columns[:, 1:]
        if not count:
            return inputs
        if len(set(shift)) == 1:
            inputs[:, len(missing[0]) : count - shift[0]] = draft[:, fed[0] :]
            return inputs
        source = torch.arange(width, device=device) + columns[:, :1]
        drafted = draft.gather(1, source.clamp(0, count - 1))
        return torch.where((source >= 0) & (source < count), drafted, inputs)


def _last(logits: Tensor, counts: list[int], keep: int) -> Tensor:
    """The last `keep` of each row's `counts[i]` real positions. logits: [B, W, V] -> [B, keep, V]."""
    if len(set(counts)) == 1:
        return logits[:, counts[0] - keep : counts[0]]
    first = torch.tensor([count - keep for count in counts])[:, None]
    at = (first + torch.arange(keep)).to(logits.device, non_blocking=True)
    return logits[torch.arange(len(counts), device=logits.device)[:, None], at]
