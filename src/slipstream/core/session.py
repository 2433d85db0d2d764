"""A model and its KV cache: which tokens of which row are cached, and forwards over what is not.

Committed tokens are the only truth; a cache holds a prefix of them. Whatever a caller asks for, a session feeds the
model what the cache lacks and nothing else. This one mechanism covers prompts, the tokens after a rejection, the next
turn of a conversation, and prompts that begin alike. This module knows no sampling, and of acceptance only `match`,
which a backend may compute within its forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.acceptance import match
from slipstream.core.interfaces import Backend, DraftScorer, GreedyRounds, PartialVocabulary
from slipstream.core.kv_slots import CATCH_UP, EXACT_FIT, PROMPT_UNIT, Shapes, SlotState, SlotTable, in_order
from slipstream.core.rng import argmax
from slipstream.core.trees import TreeForwards, TreeSegment, chain_lengths, segments_of
from slipstream.core.types import Draft, Row, Verdict


class Session(DraftScorer):
    """Scores tokens with one model for any number of rows; row i of a call uses slot i of the KV cache.

    layout: how rows of different length share a forward. shows_images: the model sees the images of prompts.
    """

    def __init__(
        self,
        backend: Backend,
        shapes: Shapes = EXACT_FIT,
        layout: BatchLayout | None = None,
        *,
        shows_images: bool = False,
    ) -> None:
        self.backend, self.table = backend, SlotTable(backend, shapes, shows_images)
        self.layout = Rectangle() if layout is None else layout
        self._trees = backend if isinstance(backend, TreeForwards) else None
        self.token_ids = backend.token_ids if isinstance(backend, PartialVocabulary) else None

    @property
    def shapes(self) -> Shapes:
        return self.table.shapes

    @property
    def slot_states(self) -> list[SlotState]:
        return self.table.states

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens read so far."""
        return self.table.prefill_tokens

    @property
    def longest_draft(self) -> int | None:
        """The longest draft whose round fits the allowed widths; None if there is no limit."""
        return max(0, self.shapes.widths[-1] - CATCH_UP) if self.shapes.widths else None

    def num_tokens(self, rows: int, drafted: int) -> int | None:
        """Tokens of a forward that verifies `drafted` tokens of several rows; None if rows are padded."""
        return self.layout.num_tokens(self.table, rows, drafted)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; what is cached stays."""
        self.table.reserve(rows, length)

    def forget(self) -> None:
        self.slot_states[:] = [SlotState() for _ in self.slot_states]

    def with_shapes(self, shapes: Shapes) -> Session:
        """A session over this model and cache that keeps to other shapes; the two may take turns."""
        other = copy(self)
        other.table = replace(self.table, shapes=shapes)  # shares the states, which are the truth about the cache
        return other

    def prefill(self, rows: Sequence[Row], *, logits: bool = False) -> Tensor | None:
        """Read in chunks what rows lack up to their last token, if they lack much.

        logits: read the last token too, and return the logits [B, 1, V] after it; None unless all rows have them.
        """
        return self.layout.prefill(self.table, rows, logits=logits and self.table.returns_prompt_logits)

    def read_ahead(self, rows: Mapping[int, Row], budget: int) -> None:
        """Read prompts of rows that are in no batch yet, one after the other. rows: by slot.

        budget: how many tokens to read; where prompts cannot be cut anywhere, one whole chunk even if that is more.
        """
        table, room = self.table, budget
        for slot, row in rows.items():
            if room <= 0:
                return  # the next row begins later, when it can copy what the rows before it have read
            table.assign_slot(slot, row)
            while room > 0 and not self.has_read(row, slot):
                end, before, base = len(row.tokens) - 1, table.prefill_tokens, table.states[slot].base
                may_cut = table.shapes.reuse == 1  # wherever a prompt is cut, the bits are the same
                if room < budget and min(end - base, PROMPT_UNIT if may_cut else table.shapes.chunk) > room:
                    return  # too little room is left for another piece
                end = min(end, base + room) if may_cut else end
                table.read_chunk(slot, row, end, {})
                room -= table.prefill_tokens - before

    def has_read(self, row: Row, slot: int | None = None) -> bool:
        """True if a row's prompt is cached, except for its last token, in a slot; None: in any slot."""
        states = self.slot_states if slot is None else [self.slot_states[slot]]
        return any(state.row is row and state.base >= len(row.tokens) - 1 for state in states)

    def num_cached(self, row: Row) -> int:
        """Tokens of a row that need not be read: those cached for it, or those it can copy."""
        return max((self.table.reusable_prefix(slot, row) for slot in range(len(self.slot_states))), default=0)

    def holds(self, row: Row) -> bool:
        """True if any token of this row is cached."""
        return any(state.row is row and state.base > 0 for state in self.table.states)

    def move_to_slots(self, rows: Sequence[Row]) -> None:
        """Move what is cached of rows of a batch to their slots, before other rows take the slots they had."""
        for slot, row in enumerate(rows):
            if self.holds(row):
                self.table.assign_slot(slot, row)

    def keep(self, row: Row, length: int) -> None:
        """Keep only the first `length` cached tokens of a row, drafts included, as its text is about to change."""
        for slot, state in enumerate(self.slot_states):
            if state.row is row:
                count = min(max(state.base, state.written), length)
                state.base = state.written = self.table.checkpoint(slot, count)

    def forget_round(self) -> None:
        """After a round that was interrupted before its commit: only committed tokens count as cached."""
        for slot, state in enumerate(self.slot_states):
            if state.row is not None and state.round == len(state.row.rounds):
                state.base = state.written = self.table.checkpoint(slot, min(state.base, len(state.row.tokens)))
                state.branches = 0

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        """Logits after the committed tokens and after each draft token.

        draft: [B, K] token ids, the first `lengths[i]` of row i real, the rest padding. Returns [B, K + 1, V], or only
        the last `keep` of the K + 1 positions.
        """
        keep = draft.shape[1] + 1 if keep is None else keep
        self.prefill(rows)
        batch = self._input_batch(rows, draft, keep)
        logits = self.layout.score(self.table, batch, draft, lengths, keep)
        self.table.note_cached(rows, lengths)
        return logits

    @property
    def branches(self) -> bool:
        """True if trees that are small enough can be verified."""
        trees = self._trees
        return trees is not None and trees.branching and (trees.flat or not self.shapes.widths)

    def fits_tree(self, rows: Sequence[Row], draft: Draft) -> bool:
        """True if the forward of an arranged tree keeps to the allowed shapes."""
        missing = sum(self.table.num_missing(slot, row) for slot, row in enumerate(rows))
        return self.branches and self.shapes.tree_total_for(sum(draft.lengths) + missing, len(rows)) is not None

    def score_tree(self, rows: Sequence[Row], draft: Draft) -> Tensor:
        """`score` of an arranged tree: [B, K + 1, V] logits after the committed tokens and after each node.

        The rows have been prefilled.
        """
        assert self._trees is not None and draft.parents is not None
        batch, device = self._input_batch(rows, draft.tokens[:, :0], 1), self.backend.device
        segments, columns = list[TreeSegment](), list[list[int]]()
        tails = [token for tail in batch.missing for token in tail]
        # a row's input is what its cache lacks, then its nodes: as indices into the draft followed by all tails and a 0
        inputs, next_tail = list[int](), draft.tokens.numel()
        for slot, (row, tail, parents) in enumerate(zip(rows, batch.missing, draft.parents, strict=True)):
            segments += segments_of(slot, batch.starts[slot], len(row.tokens), parents)
            root, first_node = len(inputs) + len(tail) - 1, slot * draft.width
            columns.append([min(root + i, root + len(parents)) for i in range(draft.width + 1)])
            inputs += [*range(next_tail, next_tail + len(tail)), *range(first_node, first_node + len(parents))]
            next_tail += len(tail)
        total = self.shapes.tree_total_for(len(inputs), len(rows)) or len(inputs)
        inputs += [next_tail] * (total - len(inputs))
        tokens = torch.cat([draft.tokens.flatten().to(device), torch.tensor([*tails, 0]).to(device)])
        tokens = tokens[torch.tensor(inputs, device=device)]
        if self.table.audit:
            self._audit_tree(batch, tokens.tolist(), draft.lengths)
        tokens = self.table.clamp_to_vocabulary(tokens)
        logits = self._trees.forward_tree(tokens, segments, widths=self.shapes.widths)
        self.table.note_cached(rows, chain_lengths(draft), draft.lengths)
        first, last = columns[0][0], columns[-1][-1]
        if len(rows) == 1 and last - first == draft.width:  # a slice, not a copy
            return logits[None, first : last + 1]
        return logits[torch.tensor(columns, device=device)]

    def _audit_tree(self, batch: InputBatch, tokens: list[int], lengths: Sequence[int]) -> None:
        assert self.table.audit is not None
        for slot, (start, tail, length) in enumerate(zip(batch.starts, batch.missing, lengths, strict=True)):
            count = len(tail) + length
            self.table.audit.write(slot, start, tokens[:count])
            tokens = tokens[count:]

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        """[B, steps] tokens of the model's own choice, each fed to the next step, in one call of the backend.

        None if the backend has no `GreedyRounds`: then it is `score`, step by step.
        """
        backend = self.backend
        if not isinstance(backend, GreedyRounds):
            return None
        nothing = torch.empty(len(rows), 0, dtype=torch.int64, device=backend.device)
        self.prefill(rows)
        batch = self._input_batch(rows, nothing, 1)
        inputs = batch.padded(nothing, self.table)
        tokens = backend.draft_greedy(inputs, batch.starts, batch.counts, steps=steps, vocab_size=vocab_size)
        self.table.note_cached(rows, [steps - 1] * len(rows))
        if self.table.audit:
            for slot, row in enumerate(rows):
                self.table.audit.write(slot, len(row.tokens), tokens[slot, : steps - 1].tolist())
        return tokens

    def verify_greedy(self, rows: Sequence[Row], draft: Draft) -> Verdict:
        """`score`, argmax and the longest matching prefix; in one call where the backend has `GreedyRounds`.

        The rows have been prefilled.
        """
        backend, width = self.backend, draft.width
        batch = self._input_batch(rows, draft.tokens, width + 1)
        if isinstance(backend, GreedyRounds):
            inputs = batch.padded(draft.tokens, self.table)
            table = backend.verify_greedy(inputs, batch.starts, batch.counts, draft.lengths, width=width)
            verdict = Verdict(table[:, 0], table[:, 1])
        else:
            best = self.layout.best(self.table, batch, draft.tokens, draft.lengths)
            verdict = match(best.to(draft.tokens.device, non_blocking=True), draft)
        self.table.note_cached(rows, draft.lengths)
        return verdict

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        """Note that only the first lengths[i] of the tokens scored for row i in this round are its draft."""
        for state, length in zip(self.slot_states, lengths, strict=False):
            state.written = min(state.written, state.base + length)

    def _input_batch(self, rows: Sequence[Row], draft: Tensor, keep: int) -> InputBatch:
        """The tokens that the rows' cache lacks up to the end of the draft. keep: how many positions are wanted."""
        table, width = self.table, draft.shape[1]
        starts = [table.first_missing(i, row, width if keep <= width else 0) for i, row in enumerate(rows)]
        if table.has_checkpoints:
            for slot, row in enumerate(rows):
                table.mark_final(slot, len(row.tokens) - row.open_end)
        missing = [row.tokens[start:] for row, start in zip(rows, starts, strict=True)]
        # draft tokens that are cached already (a draft model scoring token by token) are not fed again
        fed = [max(start - len(row.tokens), 0) for row, start in zip(rows, starts, strict=True)]
        counts = [len(tail) + width - skip for tail, skip in zip(missing, fed, strict=True)]
        return InputBatch(starts, missing, fed, width, counts, table.shapes.width_for(max(counts), len(rows)))


@dataclass(frozen=True)
class InputBatch:
    """The tokens of some rows, up to the ends of their drafts, that the KV cache lacks."""

    starts: list[int]  # the position from which each row's tokens are written
    missing: list[list[int]]  # committed tokens of each row
    fed: list[int]  # for each row, how many of the draft's first columns are cached already
    drafted: int  # columns of the draft
    counts: list[int]  # real columns of each row if all rows take the whole width of the draft
    width: int  # of a forward in which all rows take as many tokens, padding included

    def padded(self, draft: Tensor, table: SlotTable) -> Tensor:
        """[B, width] token ids on the model's device: what each row lacks, then its draft [B, K], then padding."""
        device, width = table.backend.device, self.width
        draft = draft.to(device)
        # input column i holds draft column i + shift; the shifts travel to the device in front of the tokens
        shifts = [skip - len(tail) for tail, skip in zip(self.missing, self.fed, strict=True)]
        lines = [[shift, *tail, *[0] * (width - len(tail))] for shift, tail in zip(shifts, self.missing, strict=True)]
        columns = torch.tensor(lines, dtype=torch.int64).to(device, non_blocking=True)
        inputs = columns[:, 1:]
        if self.drafted and len(set(shifts)) == 1:
            inputs[:, len(self.missing[0]) : self.drafted - shifts[0]] = draft[:, self.fed[0] :]
        elif self.drafted:
            source = torch.arange(width, device=device) + columns[:, :1]
            drafted = draft.gather(1, source.clamp(0, self.drafted - 1))
            inputs = torch.where((source >= 0) & (source < self.drafted), drafted, inputs)
        if table.audit:
            for slot, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
                table.audit.write(slot, start, inputs[slot, :count].tolist())
        return inputs


class BatchLayout(Protocol):
    """A way for rows of different lengths to share a forward."""

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        """Tokens of a forward that verifies `drafted` tokens of several rows; None if rows are padded."""

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, logits: bool) -> Tensor | None:
        """Read what rows lack; see `Session.prefill`."""

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """[B, keep, V] logits of the last `keep` positions of each row; see `Session.score`."""

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        """[B, K + 1] the likeliest token after the committed tokens and after each draft token."""


class Rectangle:
    """All rows as wide as the widest; prompts are read one by one."""

    def num_tokens(self, table: SlotTable, rows: int, drafted: int) -> int | None:
        return None

    def prefill(self, table: SlotTable, rows: Sequence[Row], *, logits: bool) -> Tensor | None:
        prompt_logits: dict[int, Tensor] = {}
        for slot, row in enumerate(rows):
            table.assign_slot(slot, row)
            if not table.is_far_behind(slot, row):
                logits = False
            else:
                table.read(slot, row, len(row.tokens) - (not logits), prompt_logits)
        return in_order(prompt_logits, len(rows)) if logits else None

    def score(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int], keep: int) -> Tensor:
        """Logits [B, keep, V] of one forward: each row's last `keep` columns before the padding."""
        logits, counts = table.forward(batch.padded(draft, table), batch.starts, 0, logits=True), batch.counts
        if len(set(counts)) == 1:
            return logits[:, counts[0] - keep : counts[0]]
        first = torch.tensor([count - keep for count in counts])[:, None]
        columns = (first + torch.arange(keep)).to(logits.device, non_blocking=True)
        return logits[torch.arange(len(counts), device=logits.device)[:, None], columns]

    def best(self, table: SlotTable, batch: InputBatch, draft: Tensor, lengths: Sequence[int]) -> Tensor:
        return argmax(self.score(table, batch, draft, lengths, draft.shape[1] + 1))


class PromptReader(Protocol):
    """The part of a draft model's `Session` that the loop and the scheduler use."""

    def reserve(self, rows: int, length: int) -> None:
        """Make room for rows of a length."""

    def move_to_slots(self, rows: Sequence[Row]) -> None:
        """Move what is cached of a batch's rows to their slots."""

    def read_ahead(self, rows: Mapping[int, Row], budget: int) -> None:
        """Read prompts of rows that are not in a batch yet."""

    def has_read(self, row: Row) -> bool:
        """True if a row's prompt is cached except for its last token."""

    def holds(self, row: Row) -> bool:
        """True if any token of this row is cached."""

    def forget_round(self) -> None:
        """Count only committed tokens as cached, after a round that was interrupted before its commit."""
