"""The text of a row in the draft model's tokens, which follows the target's committed tokens.

A token of the end may become another one when the text goes on, so the end is encoded anew whenever it does: from a
boundary that no further text moves, two words back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.models.byte_tokens import Encoding
from slipstream.models.vocabulary_bridge import VocabularyBridge, unfinished

KEPT_WORDS = 2  # words at the end of a text whose tokens may still change
LONGEST_TAIL = 400  # characters of a text without spaces that are encoded again


@dataclass
class DraftText:
    """A row's text: `settled` draft tokens, then the text `tail` whose tokens may still change.

    read: how many of the target's tokens it has. beginning: whether the tail begins the text.
    """

    bridge: VocabularyBridge
    settled: int = 0
    read: int = 0
    tail: bytes = b""
    beginning: bool = True
    longest_tail: int = LONGEST_TAIL

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Take in what the target has committed since: the draft tokens that follow those settled before.

        tokens: all of the row's. A character that is not complete yet is read byte by byte.
        """
        ids = list[int]()
        done = 0  # of ids, that nothing will change any more
        for token in tokens[self.read :]:
            written = self.bridge.target.texts[token]
            if written is not None:
                self.tail += self._without_added_space(written)
                continue
            special = self.bridge.special_to_draft.get(token)
            if special is None:
                self.tail += self.bridge.special_names.get(token, b"")
                continue
            ids += [*self._tail_ids(), special]
            done, self.tail, self.beginning = len(ids), b"", False
        self.read = len(tokens)
        encoding, text, pending = self._encoded()
        first = first_unsettled(encoding, text, self.longest_tail)
        ids += encoding.ids + self.bridge.draft.spelled(pending)
        if first:
            done += first
            self.tail, self.beginning = text[encoding.starts[first] :].encode() + pending, False
        self.settled += done
        return ids

    def _without_added_space(self, text: bytes) -> bytes:
        """The first token of a text may begin with a space that the target's tokenizer has added."""
        added = self.beginning and not self.tail and self.bridge.target.tokens.adds_space
        return text.removeprefix(b" ") if added else text

    def _encoded(self) -> tuple[Encoding, str, bytes]:
        """The tail's whole characters in draft tokens and as text, and the bytes of one that is not complete."""
        whole = len(self.tail) - unfinished(self.tail)
        text = self.tail[:whole].decode(errors="replace")
        return self.bridge.draft.encode(text, beginning=self.beginning), text, self.tail[whole:]

    def _tail_ids(self) -> list[int]:
        encoding, _, pending = self._encoded()
        return encoding.ids + self.bridge.draft.spelled(pending)


def first_unsettled(encoding: Encoding, text: str, longest: int) -> int:
    """The first token that further text may change: that of the last word but one.

    Every common pre-tokenizer begins a new piece at a space after something else, and no common token reaches over one.
    """
    starts, words = encoding.starts, 0
    for at in range(len(starts) - 1, 0, -1):
        begins = starts[at] > starts[at - 1] and text[starts[at]] == " " and not text[starts[at] - 1].isspace()
        words += begins
        if begins and words == KEPT_WORDS:
            return at
    if len(text) <= longest:
        return 0
    return next((at for at in range(1, len(starts)) if starts[at] > max(starts[at - 1], len(text) // 2)), 0)
