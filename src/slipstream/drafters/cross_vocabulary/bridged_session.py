"""A draft model and its KV cache over rows of a target with another vocabulary.

Each row's text is kept in the draft model's tokens as well. The last tokens may change when the text goes on, so its
end is then encoded again, from a token boundary two words back that further text does not move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from slipstream.core.interfaces import Backend
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.tokenization.byte_vocabulary import Encoding
from slipstream.tokenization.vocabulary_bridge import VocabularyBridge, unfinished

KEPT_WORDS = 2  # words at the end of a text whose tokens may still change
LONGEST_TAIL = 400  # characters of a text without spaces that are encoded again


@dataclass
class DraftText:
    """A row's text in draft tokens."""

    bridge: VocabularyBridge
    settled: int = 0  # number of final tokens; those that encode `tail` may still change
    num_read: int = 0  # tokens of the target that were read
    tail: bytes = b""
    beginning: bool = True  # the tail begins the text
    longest_tail: int = LONGEST_TAIL

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Read what the target has committed since; returns the draft tokens after those that were settled before.

        tokens: all of the row's. A character that is not complete yet is read byte by byte.
        """
        ids = list[int]()
        num_settled = 0  # how many of the ids are final
        for token in tokens[self.num_read :]:
            written = self.bridge.target.texts[token]
            if written is not None:
                self.tail += self._without_added_space(written)
                continue
            special = self.bridge.special_to_draft.get(token)
            if special is None:
                self.tail += self.bridge.special_names.get(token, b"")
                continue
            encoding, _, pending = self._encoded()
            ids += [*encoding.ids, *self.bridge.draft.spelled(pending), special]
            num_settled, self.tail, self.beginning = len(ids), b"", False
        self.num_read = len(tokens)
        encoding, text, pending = self._encoded()
        first = first_unsettled(encoding, text, self.longest_tail)
        ids += encoding.ids + self.bridge.draft.spelled(pending)
        if first:
            num_settled += first
            self.tail, self.beginning = text[encoding.starts[first] :].encode() + pending, False
        self.settled += num_settled
        return ids

    def _without_added_space(self, text: bytes) -> bytes:
        """A token's text, without the space that the target's tokenizer may add at the beginning of a text."""
        added = self.beginning and not self.tail and self.bridge.target.tokens.adds_space
        return text.removeprefix(b" ") if added else text

    def _encoded(self) -> tuple[Encoding, str, bytes]:
        """The tail's complete characters in draft tokens and as text, and the bytes of one that is not complete."""
        complete = len(self.tail) - unfinished(self.tail)
        text = self.tail[:complete].decode(errors="replace")
        return self.bridge.draft.encode(text, beginning=self.beginning), text, self.tail[complete:]


def first_unsettled(encoding: Encoding, text: str, longest: int) -> int:
    """The first token that further text may change: it begins the last word but one.

    Every common pre-tokenizer begins a new piece at a space that follows another character, and no common token
    stretches over such a space.
    """
    starts, words = encoding.starts, 0
    for token in range(len(starts) - 1, 0, -1):
        start = starts[token]
        begins = start > starts[token - 1] and text[start] == " " and not text[start - 1].isspace()
        words += begins
        if begins and words == KEPT_WORDS:
            return token
    if len(text) <= longest:
        return 0
    # a long text without words: its first half is taken to be final
    return next((token for token in range(1, len(starts)) if starts[token] > max(starts[token - 1], len(text) // 2)), 0)


@dataclass
class _Counterpart:
    """The draft model's row for a row of the target. drafted: draft tokens that were fed after its text."""

    text: DraftText
    row: Row
    opening: int
    drafted: list[int] = field(default_factory=list)


class BridgedSession:
    """The draft model's session for rows of the target: each has a counterpart in the draft model's own tokens.

    When a row's end is encoded again, the cache keeps its tokens up to the first that changed.
    """

    def __init__(self, session: Session, bridge: VocabularyBridge) -> None:
        self.session, self.bridge = session, bridge
        self._rows: WeakKeyDictionary[Row, _Counterpart] = WeakKeyDictionary()
        self._reserved = (0, 0)

    @property
    def backend(self) -> Backend:
        return self.session.backend

    @property
    def longest_draft(self) -> int:
        """Most draft tokens of a round, which leave room for a text in the draft model's context."""
        return max(1, self.backend.max_length // 4)

    def reserve(self, rows: int, length: int) -> None:
        """Reserve slots. length: in the target's tokens; more is reserved where a text turns out longer."""
        length = max(self._reserved[1], min(length, self.backend.max_length))
        self._reserved = max(self._reserved[0], rows), length
        self.session.reserve(rows, length)

    def move_to_slots(self, rows: Sequence[Row]) -> None:
        self.session.move_to_slots([self._counterpart(row).row for row in rows])

    def read_ahead(self, rows: Mapping[int, Row], budget: int) -> None:
        counterparts = {slot: self._updated(row, 1) for slot, row in rows.items()}
        self._make_room(max(counterparts, default=0) + 1, list(counterparts.values()), 1)
        self.session.read_ahead(counterparts, budget)

    def has_read(self, row: Row) -> bool:
        return self.session.has_read(self._updated(row, 1))

    def holds(self, row: Row) -> bool:
        counterpart = self._rows.get(row)
        return counterpart is not None and self.session.holds(counterpart.row)

    def forget_round(self) -> None:
        self.session.forget_round()

    def draft_rows(self, rows: Sequence[Row], steps: int) -> list[Row]:
        """The rows' counterparts, up to date with the committed tokens, with room for a draft of `steps` tokens."""
        counterparts = [self._updated(row, steps) for row in rows]
        self._make_room(len(counterparts), counterparts, steps)
        return counterparts

    def note_drafted(self, rows: Sequence[Row], drafted: Sequence[Sequence[int]]) -> None:
        """Note all draft tokens of this round so far, which are about to be fed after the rows' texts."""
        for row, tokens in zip(rows, drafted, strict=True):
            self._rows[row].drafted = list(tokens)

    def _make_room(self, count: int, counterparts: Sequence[Row], steps: int) -> None:
        rows, length = self._reserved
        needed = max((len(row.tokens) for row in counterparts), default=0) + steps
        if count > rows or needed > length:
            self.reserve(max(rows, count), max(length, min(needed + needed // 4 + 64, self.backend.max_length)))

    def _counterpart(self, row: Row) -> _Counterpart:
        counterpart = self._rows.get(row)
        if counterpart is None:
            counterpart = self._rows[row] = self._make_counterpart(row)
        return counterpart

    def _make_counterpart(self, row: Row) -> _Counterpart:
        """Render chat messages by the draft model's own template; begin other texts with its tokenizer's opening."""
        target, draft = self.bridge.target, self.bridge.draft
        tail = min(LONGEST_TAIL, max(1, self.backend.max_length // 4))
        rendered = self._rendered(row)
        if rendered is not None:
            text = DraftText(self.bridge, len(rendered), row.prompt_length, beginning=False, longest_tail=tail)
            return _Counterpart(
                text, Row(row.index, rendered, row.params, row.seed, group=row.group), len(draft.tokens.opening)
            )
        opening = list(draft.tokens.opening)
        num_opening = len(target.tokens.opening)
        num_read = num_opening if tuple(row.tokens[:num_opening]) == target.tokens.opening else 0
        text = DraftText(self.bridge, len(opening), num_read, longest_tail=tail)
        return _Counterpart(text, Row(row.index, opening, row.params, row.seed, group=row.group), len(opening))

    def _rendered(self, row: Row) -> list[int] | None:
        render = self.bridge.draft.render
        if row.messages is None or render is None:
            return None
        try:
            return render(row.messages)
        except UsageError:  # its template refuses what the target's takes
            return None

    def _updated(self, row: Row, steps: int) -> Row:
        """The row's counterpart, up to date with the committed tokens."""
        counterpart = self._counterpart(row)
        draft_row, start = counterpart.row, counterpart.text.settled
        tail = counterpart.text.follow(row.tokens)
        cached = draft_row.tokens[start:] + counterpart.drafted
        pairs = enumerate(zip(cached, tail, strict=False))
        num_same = next((i for i, (a, b) in pairs if a != b), min(len(cached), len(tail)))
        self.session.keep(draft_row, start + num_same)
        # a draft model cannot read nothing: it begins as if an earlier document had ended
        draft_row.tokens[start:] = tail if start or tail else [*self.bridge.draft.end_ids, 0][:1]
        counterpart.drafted = []
        self._shorten(counterpart, steps)
        draft_row.open_end = max(1, len(draft_row.tokens) - counterpart.text.settled)
        return draft_row

    def _shorten(self, counterpart: _Counterpart, steps: int) -> None:
        """Forget the beginning of a text that does not fit the draft model's context."""
        max_length, tokens = self.backend.max_length, counterpart.row.tokens
        if len(tokens) + steps <= max_length:
            return
        removed = min(len(tokens) - max_length // 2, counterpart.text.settled - counterpart.opening)
        self.session.keep(counterpart.row, counterpart.opening)
        del tokens[counterpart.opening : counterpart.opening + removed]
        counterpart.text.settled -= removed
