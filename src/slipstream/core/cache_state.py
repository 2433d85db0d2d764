"""What a slot of the KV cache holds, and the forward shapes that computed it: plain facts about token ids.

This module knows no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.types import Row

PROMPT_UNIT = 16  # where forward shapes are fixed, prompts are padded to multiples of this


@dataclass(frozen=True)
class Shapes:
    """Which forward shapes are allowed.

    A forward is padded to the next of `widths` (of a single row to the next of `alone`, if there are any), a ragged one
    to the next of `totals`. A prompt is cut into `chunk`s. Attention reads the next of `attended_lengths` or,
    beyond them, a multiple of `attended_unit`; what another row left in it is used in units of `reuse`.
    token_by_token: drafts are read as plain decoding reads its tokens, a forward for each.
    """

    widths: tuple[int, ...]
    chunk: int
    attended_unit: int = 256
    reuse: int = 1
    alone: tuple[int, ...] = ()
    attended_lengths: tuple[int, ...] = ()
    totals: tuple[int, ...] = ()
    token_by_token: bool = False

    def pad_prompt(self, length: int) -> int:
        """The width of a prompt's last chunk: depends on its length alone, and takes few values."""
        return min(self.chunk, -(-length // PROMPT_UNIT) * PROMPT_UNIT) if self.widths else length

    def pad(self, width: int, rows: int) -> int:
        """The smallest allowed width that holds `width` tokens of each of `rows` rows."""
        widths = self.alone if rows == 1 and self.alone else self.widths
        at = bisect_left(widths, width)
        return widths[at] if at < len(widths) else width

    def pad_total(self, tokens: int) -> int | None:
        """The smallest allowed number of tokens of a ragged forward that has `tokens`; None if there is none."""
        if not self.widths:
            return tokens
        at = bisect_left(self.totals, tokens)
        return self.totals[at] if at < len(self.totals) else None

    def pad_tree(self, tokens: int, rows: int) -> int | None:
        """The same of a forward over trees: those of one row take the layers as a chain of as many tokens would."""
        if rows > 1 or not self.widths:
            return self.pad_total(tokens)
        padded = self.pad(tokens, 1)
        return padded if padded in self.widths else None


EXACT_FIT = Shapes(widths=(), chunk=512, attended_lengths=tuple(range(64, 2049, 64)))


@dataclass
class SlotState:
    """What one slot of the KV cache holds: `base` committed tokens of `row`, then draft tokens up to `written`.

    branches: how many nodes of a draft tree stand behind these, at places that are not their positions.

    Whether the draft tokens became true is read off the row's round number `round` once that is committed.
    shapes: those of the forwards that computed it. is_long: how these read the text, but for its beginning where that
    was short, if begins_short; see `LongTexts`.
    """

    row: Row | None = None
    base: int = 0
    written: int = 0
    round: int = 0
    shapes: Shapes = EXACT_FIT
    branches: int = 0
    is_long: bool = False
    begins_short: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether no row goes on here."""
        return self.row is None or self.row.finish_reason is not None

    @property
    def last_step(self) -> int:
        """The step of its row's newest round; -1 if there is none."""
        return self.row.rounds[-1].step if self.row is not None and self.row.rounds else -1

    def valid(self, row: Row) -> int:
        """How many leading tokens of `row` the slot holds."""
        if self.row is None:
            return 0
        own = max(self.base, min(self.written, self.row.true_length(self.round, self.base)))
        if self.row is row:
            return own
        # another row's slot: reuse the common beginning, but always leave one token to feed
        return common_beginning(self.row.tokens, row.tokens, max(0, min(own, len(row.tokens) - 1)))


def common_beginning(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """How many of the first `limit` tokens are the same in both; found by halving, slices being compared at once."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
