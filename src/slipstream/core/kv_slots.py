"""Tracks the content of each KV cache slot: assigns slots, reads prompts, moves branches, and is the prefix cache.

Committed tokens are the only truth. A slot caches a prefix of them, and after it leftovers of rejected drafts, which
the next forward overwrites. SLIPSTREAM_DEBUG=1 checks the ids at each write.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slipstream.core.interfaces import (
    Backend,
    Checkpoints,
    LongTexts,
    PromptLogits,
    SeesImages,
    set_attended_lengths,
)
from slipstream.core.trees import TreeForwards
from slipstream.core.types import Row
from slipstream.errors import SlipstreamError

PROMPT_UNIT = 16  # where forward shapes are fixed, prompts are padded to multiples of this
IDLE_CANDIDATES = 16  # least recently used idle slots, of which one may be overwritten to keep an ended row's cache
CATCH_UP = 8  # rows that lack more tokens than this are brought up to date on their own first


@dataclass(frozen=True)
class Shapes:
    """The forward shapes that are allowed."""

    widths: tuple[int, ...]  # a forward is padded to the next of these; empty: any width is allowed
    chunk: int  # tokens; a prompt is cut into pieces of this size
    attended_unit: int = 256  # beyond `attended_lengths`, attention reads a multiple of this
    reuse: int = 1  # a common prefix with another row is reused in multiples of this
    alone: tuple[int, ...] = ()  # the widths of a single row, if they differ
    attended_lengths: tuple[int, ...] = ()  # attention reads the next of these
    totals: tuple[int, ...] = ()  # a ragged forward is padded to the next of these
    token_by_token: bool = False  # each draft token is verified in a forward of its own, as plain decoding computes it

    def prompt_width_for(self, length: int) -> int:
        """The width of a prompt's last chunk: depends on its length alone, and takes few values."""
        return min(self.chunk, -(-length // PROMPT_UNIT) * PROMPT_UNIT) if self.widths else length

    def width_for(self, width: int, rows: int) -> int:
        """The smallest allowed width that holds `width` tokens of each of `rows` rows."""
        widths = self.alone if rows == 1 and self.alone else self.widths
        index = bisect_left(widths, width)
        return widths[index] if index < len(widths) else width

    def total_for(self, tokens: int) -> int | None:
        """The smallest allowed size of a ragged forward that holds `tokens` tokens; None if all are too small."""
        if not self.widths:
            return tokens
        index = bisect_left(self.totals, tokens)
        return self.totals[index] if index < len(self.totals) else None

    def tree_total_for(self, tokens: int, rows: int) -> int | None:
        """The smallest allowed size of a forward over trees that holds `tokens` tokens; None if all are too small.

        A single row's tree goes through the layers like a chain of as many tokens.
        """
        if rows > 1 or not self.widths:
            return self.total_for(tokens)
        padded = self.width_for(tokens, 1)
        return padded if padded in self.widths else None


EXACT_FIT = Shapes(widths=(), chunk=512, attended_lengths=tuple(range(64, 2049, 64)))


@dataclass
class SlotState:
    """The content of one slot of the KV cache."""

    row: Row | None = None
    base: int = 0  # committed tokens of `row` that the slot holds; `assign_slot` adds the draft's accepted ones
    written: int = 0  # position after the last draft token that follows them
    round: int = 0  # number of the row's round that drafted them; once committed, it tells which were accepted
    shapes: Shapes = EXACT_FIT  # of the forwards that filled the slot
    branches: int = 0  # nodes of a draft tree that are stored after them, at places that are not their positions
    is_long: bool = False  # the forwards read the text as a long one (see `LongTexts`)
    begins_short: bool = False  # they read its beginning as a short one, before it became long
    used_at: int = 0  # how many prompt tokens had been read, in all slots, when the last one was read into this slot

    @property
    def is_idle(self) -> bool:
        """True if no row is being decoded here."""
        return self.row is None or self.row.finish_reason is not None

    @property
    def last_step(self) -> int:
        """The step of its row's newest round; -1 if there is none."""
        return self.row.rounds[-1].step if self.row is not None and self.row.rounds else -1

    def valid(self, row: Row) -> int:
        """Number of leading tokens of `row` that the slot holds."""
        if self.row is None:
            return 0
        num_true = max(self.base, min(self.written, self.row.true_length(self.round, self.base)))
        if self.row is row:
            return num_true
        # another row's slot: reuse the common beginning, but always leave one token to feed
        return common_prefix(self.row, row, max(0, min(num_true, len(row.tokens) - 1)))


def common_beginning(first: Sequence[int], second: Sequence[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`; found by bisection, which compares whole slices."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_prefix(first: Row, second: Row, limit: int) -> int:
    """Length of the common prefix of two rows, at most `limit`; it ends where one has another image than the other."""
    length = common_beginning(first.tokens, second.tokens, limit)
    images, others = ({} if row.images is None else row.images.digests for row in (first, second))
    return min([length, *(start for start in {**images, **others} if images.get(start) != others.get(start))])


class CacheAudit:
    """The token ids cached in each slot."""

    def __init__(self, slot_states: Sequence[SlotState]) -> None:
        self._slot_states = slot_states
        self._ids: dict[int, list[int]] = {}

    def write(self, slot: int, start: int, tokens: list[int]) -> None:
        """Note a write to a slot from `start` on; raises if the tokens before are not the row's committed ones."""
        cached = self._ids.setdefault(slot, [])
        if len(cached) < start:
            raise SlipstreamError(f"KV cache: slot {slot} holds {len(cached)} tokens, written at {start}")
        slot_state = self._slot_states[slot]
        committed = slot_state.row.tokens if slot_state.row is not None else []
        count = min(start, len(committed))
        if cached[:count] != committed[:count]:
            position = next(i for i in range(count) if cached[i] != committed[i])
            token, expected = cached[position], committed[position]
            raise SlipstreamError(
                f"KV cache: slot {slot} position {position} holds token {token}, committed is {expected}"
            )
        self._ids[slot] = cached[:start] + tokens

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """Note that the tokens at these places of a slot are moved to `start` and the positions that follow."""
        cached = self._ids[slot]
        self._ids[slot] = cached[:start] + [cached[place] for place in places]

    def copy(self, source: int, destination: int, length: int) -> None:
        """Note that the first `length` tokens of one slot are copied to another."""
        self._ids[destination] = self._ids.get(source, [])[:length]


@dataclass
class SlotTable:
    """The slots of one model."""

    backend: Backend
    shapes: Shapes = EXACT_FIT
    shows_images: bool = False  # the backend is the target's, and reads prompts with images
    states: list[SlotState] = field(default_factory=list)
    prefill_tokens: int = 0  # prompt tokens read so far
    audit: CacheAudit | None = None

    def __post_init__(self) -> None:
        # the forwards that read a new prompt can return the logits after it
        self.returns_prompt_logits = self.shapes.reuse == 1 and isinstance(self.backend, PromptLogits)
        self._checkpoints = self.backend if isinstance(self.backend, Checkpoints) else None
        self.has_checkpoints = self._checkpoints is not None
        self._long_texts = self.backend if isinstance(self.backend, LongTexts) else None
        self.longest_short = None if self._long_texts is None else self._long_texts.longest_short
        if self.audit is None and os.environ.get("SLIPSTREAM_DEBUG") == "1":
            self.audit = CacheAudit(self.states)

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; what is cached stays."""
        set_attended_lengths(self.backend, self.shapes.attended_unit, self.shapes.attended_lengths)
        self.backend.reserve(rows, length + max(self.shapes.widths or (0,)) + self.shapes.chunk)
        self.states.extend(SlotState() for _ in range(rows - len(self.states)))

    def is_far_behind(self, slot: int, row: Row) -> bool:
        """True if a slot lacks so many of a row's tokens that they are read in forwards of their own first."""
        base = self.states[slot].base
        lacks_image = row.images is not None and any(base < end for _, end in self.blocks(row))
        return base == 0 or len(row.tokens) - base > CATCH_UP or lacks_image

    def blocks(self, row: Row) -> tuple[tuple[int, int], ...]:
        """The images of a row whose tokens the model reads in one forward each."""
        return row.images.blocks if self.shows_images and row.images is not None else ()

    def num_missing(self, slot: int, row: Row) -> int:
        """Upper bound on the committed tokens of a row that the next scoring forward is fed before its draft."""
        state = self.states[slot]
        return max(1, len(row.tokens) - state.base) if state.row is row else CATCH_UP

    def longest_draft(self, rows: Sequence[Row]) -> int | None:
        """The longest draft that fits the allowed widths with the tokens that these rows lack; None without a limit."""
        missing = (self.num_missing(slot, row) for slot, row in enumerate(rows))
        return max(0, self.shapes.widths[-1] - max(missing)) if self.shapes.widths else None

    def read(self, slot: int, row: Row, end: int, prompt_logits: dict[int, Tensor]) -> None:
        """Read a row's tokens up to `end`, chunk by chunk.

        prompt_logits: gets the logits after the row, if its last token is among them.
        """
        while self.states[slot].base < end:
            self.read_chunk(slot, row, end, prompt_logits)

    def read_chunk(self, slot: int, row: Row, end: int, prompt_logits: dict[int, Tensor]) -> None:
        """Read one chunk of a row's tokens; see `read`."""
        state = self.states[slot]
        stop = min(end, state.base + self.shapes.chunk)
        block = next((block for block in self.blocks(row) if state.base < block[1] and block[0] < stop), None)
        if block is not None:
            stop = block[0] if block[0] > state.base else block[1]
        chunk = row.tokens[state.base : stop]
        width = self.shapes.prompt_width_for(len(chunk))
        inputs = torch.tensor([chunk + [0] * (width - len(chunk))], device=self.backend.device)
        self.mark_final(slot, min(state.base + len(chunk), len(row.tokens) - row.open_end))
        if self.audit:
            self.audit.write(slot, state.base, chunk)
        if stop == end == len(row.tokens):
            prompt_logits[slot] = self._logits_after(inputs, state.base, slot, len(chunk) - 1)
        else:
            self.forward(inputs, [state.base], slot, logits=False)
        self.note_read(slot, len(chunk))

    def note_read(self, slot: int, count: int) -> None:
        """Advance a slot by `count` cached tokens."""
        state = self.states[slot]
        state.base = state.written = state.base + count
        self.prefill_tokens += count
        state.used_at = self.prefill_tokens

    def _logits_after(self, inputs: Tensor, start: int, slot: int, last: int) -> Tensor:
        """Logits [1, 1, V] of one column, computed among as many columns as the narrowest forward has (same bits)."""
        assert isinstance(self.backend, PromptLogits)
        width = self.shapes.width_for(1, 1)
        columns = torch.arange(width, device=self.backend.device) + max(0, last + 1 - width)
        logits = self.backend.answer(self.clamp_to_vocabulary(inputs), start, slot=slot, columns=columns)
        return logits[:, min(last, width - 1), None]

    def assign_slot(self, slot: int, row: Row) -> None:
        """Assign a slot to a row, copying the longest reusable prefix from any slot.

        Rows of a batch only ever move to lower slots, so a slot is never overwritten before it has been copied.
        """
        state, is_long = self.states[slot], False
        if self.shows_images or self.longest_short is not None:
            is_long = self.set_reading(slot, row)
        if state.row is row:
            if state.is_long != is_long and not self._still_holds(state, row):
                # the text has become long, and is read again
                self.states[slot] = SlotState(row, round=len(row.rounds), shapes=self.shapes, is_long=is_long)
                return
            state.is_long, state.begins_short = is_long, state.begins_short or is_long > state.is_long
            if state.round != len(row.rounds):
                # the round of its draft is committed: what was accepted stays, the rest is overwritten
                num_cached = self._compact_accepted_path(slot, state, row) if state.branches else state.valid(row)
                state.base = state.written = self.checkpoint(slot, num_cached)
            return
        cached = [self.reusable_prefix(i, row) for i in range(len(self.states))]
        # on a tie take the row's own slot, which is emptied below, so that nothing is cached twice
        source = max(range(len(self.states)), key=lambda i: (cached[i], self.states[i].row is row))
        self._save(slot, source, row)
        old, count = self.states[source], cached[source]
        begins_short = old.row is row and (old.begins_short or is_long > old.is_long)
        new = SlotState(
            row,
            count,
            count,
            len(row.rounds),
            self.shapes,
            is_long=is_long,
            begins_short=begins_short,
            used_at=self.prefill_tokens,
        )
        self.copy(source, slot, new)
        if source != slot and (old.row is row or (old.is_idle and not self._keep_value(source, row))):
            self.states[source] = SlotState()

    def _save(self, slot: int, source: int, row: Row) -> None:
        """Before a row takes a slot, copy what an ended row has left there to the idle slot that is worth least."""
        ended, value = self.states[slot], self._keep_value(slot, row)
        idle = [i for i, state in enumerate(self.states) if value and i not in (slot, source) and state.is_idle]
        longest_ago = sorted(idle, key=lambda i: self.states[i].last_step)[:IDLE_CANDIDATES]
        least_value, place = min(((self._keep_value(i, row), i) for i in longest_ago), default=(value, slot))
        if ended.row is not None and least_value < value:
            count = self.checkpoint(slot, ended.valid(ended.row))
            kept = replace(ended, base=count, written=count, round=len(ended.row.rounds), branches=0)
            self.copy(slot, place, kept)

    def _keep_value(self, slot: int, entering: Row) -> int:
        """Value of keeping an idle slot: higher the later it was used and the more tokens would have to be read again.

        A prompt is kept until about as many other tokens have been read. 0 if no later request could reuse it.
        """
        state = self.states[slot]
        if state.row is None or not state.is_idle:  # in use, or its row was abandoned before it ended
            return 0
        row, length = state.row, min(state.valid(state.row), state.row.prompt_length - 1)
        # the entering row has the same prompt, and its own slot will hold it soon
        if entering.group == row.group and common_prefix(entering, row, length) >= length:
            return 0
        # another slot may hold the prompt as well
        others = (other for other in self.states if other is not state and other.row and other.row.group == row.group)
        return 0 if any(other.valid(row) >= length for other in others) else 1 + state.used_at + length

    def copy(self, source: int, slot: int, state: SlotState) -> None:
        """Make a slot hold what `state` describes, copied from `source`, which holds at least that."""
        if source != slot:
            self.states[slot] = SlotState()  # its content is about to be overwritten
            self.backend.copy(source, slot, state.base)
        if self.audit:
            self.audit.copy(source, slot, state.base)
        self.states[slot] = state

    def _compact_accepted_path(self, slot: int, state: SlotState, row: Row) -> int:
        """Move the accepted nodes of a tree to their positions; returns how many tokens are cached then."""
        round = row.rounds[state.round]
        path, in_place = (round.path or ())[: round.num_accepted_tokens], round.num_accepted_on_chain
        if len(path) > in_place:
            assert isinstance(self.backend, TreeForwards)
            places, start = [state.base + node for node in path[in_place:]], state.base + in_place
            self.backend.move(slot, places, start)
            if self.audit:
                self.audit.move(slot, places, start)
        state.branches = 0
        return state.base + len(path)

    def checkpoint(self, slot: int, limit: int) -> int:
        """The last position, at most `limit`, from which a forward of a slot can begin."""
        return limit if self._checkpoints is None else self._checkpoints.checkpoint(slot, limit)

    def mark_final(self, slot: int, position: int) -> None:
        """Before a forward: the text of a slot is final up to `position`, and no later forward begins earlier."""
        if self._checkpoints is not None:
            self._checkpoints.mark_final(slot, position)

    def is_long(self, row: Row) -> bool:
        """True if the model reads a row's text as it reads long ones."""
        return self.longest_short is not None and len(row.tokens) > self.longest_short

    def _still_holds(self, state: SlotState, row: Row) -> bool:
        """True if a row's cache is still valid: a text that has become long may have to be read again."""
        is_long = self.is_long(row)
        if state.is_long == is_long:
            return True
        return is_long and self._long_texts is not None and not self._long_texts.reads_anew

    def set_reading(self, slot: int, row: Row) -> bool:
        """Before a forward of a slot: tell the model of a row's images and whether its text is long; returns that."""
        is_long = self.is_long(row)
        if self.shows_images:
            assert isinstance(self.backend, SeesImages)
            self.backend.show(slot, row.images)
        if self._long_texts is not None and self.longest_short is not None:
            self._long_texts.read_as(slot, is_long=is_long)
        return is_long

    def reusable_prefix(self, slot: int, row: Row) -> int:
        """Number of leading tokens of an entering row that may be copied from a slot."""
        state = self.states[slot]
        count = state.valid(row)
        count = next((first for first, end in self.blocks(row) if first < count < end), count)
        owner, count = state.row, self.checkpoint(slot, count)
        if owner is row:
            return count if self._still_holds(state, row) else 0
        # the keys and values of the same tokens differ between long and short texts
        if owner is None or state.is_long != self.is_long(row) or state.begins_short:
            return 0
        # other shapes may round differently, and groups share nothing
        if state.shapes != self.shapes or owner.group != row.group:
            return 0
        if self.shapes.reuse > 1:
            # reuse what any prefill of this prompt would have computed bit for bit: the same prompt, or whole chunks
            count = min(count, owner.prompt_length - 1)
            is_same_prompt = count == row.prompt_length - 1 == owner.prompt_length - 1
            if not is_same_prompt:
                count = 0 if self.blocks(row) or self.blocks(owner) else count - count % self.shapes.reuse
        return count

    def first_missing(self, slot: int, row: Row, width: int) -> int:
        """The first position whose key and value the slot lacks; at least one token is always fed.

        width: columns of the draft if the caller scores it column by column within a round, else 0.
        """
        state = self.states[slot]
        this_round = state.round == len(row.rounds) and state.base == len(row.tokens)
        if this_round and state.written < state.base + width:
            return self.checkpoint(slot, state.written)  # columns written earlier in this round are still valid
        return self.checkpoint(slot, min(state.base, len(row.tokens) - 1))

    def note_cached(self, rows: Sequence[Row], lengths: Sequence[int], nodes: Sequence[int] | None = None) -> None:
        """Note that the slots hold the rows' committed tokens and lengths[i] draft tokens after them.

        nodes: for trees, how many nodes each row has; the first lengths[i] are its main chain.
        """
        for slot, row in enumerate(rows):
            base, branches = len(row.tokens), 0 if nodes is None else nodes[slot] - lengths[slot]
            before = self.states[slot]  # assigned to the row, so it knows how the text is read
            self.states[slot] = SlotState(
                row,
                base,
                base + lengths[slot],
                len(row.rounds),
                self.shapes,
                branches,
                before.is_long,
                before.begins_short,
                before.used_at,
            )

    def forward(self, inputs: Tensor, starts: list[int], first_slot: int, *, logits: bool) -> Tensor:
        """A forward of the model over tokens [B, W]; see `Backend.forward`."""
        return self.backend.forward(self.clamp_to_vocabulary(inputs), starts, first_slot=first_slot, logits=logits)

    def clamp_to_vocabulary(self, inputs: Tensor) -> Tensor:
        """Token ids within the model's vocabulary; a draft model's may be smaller than the target's."""
        return inputs.clamp(max=self.backend.vocab_size - 1)


def in_order(logits: Mapping[int, Tensor], count: int) -> Tensor | None:
    """The logits [1, 1, V] of rows 0 to count - 1 as [count, 1, V]; None if one row's are missing."""
    return torch.cat([logits[i] for i in range(count)]) if len(logits) == count else None
