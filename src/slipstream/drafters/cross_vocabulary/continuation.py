"""Translates what a draft model writes after a row's text into the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from slipstream.tokenization.vocabulary_bridge import VocabularyBridge, unfinished


class Continuation:
    """One row's draft of one round: draft tokens go in, target tokens come out."""

    def __init__(self, bridge: VocabularyBridge, committed: Sequence[int]) -> None:
        self._bridge, self._text = bridge, b""
        self._begins: list[int] = []  # byte of the draft at which each draft token begins
        self._end: int | None = None
        self.is_over = False  # the draft model has ended the text, or written a special token that stands for no text
        self._context = _context(bridge, committed)
        self._before = b"".join(bridge.target.texts[token] or b"" for token in self._context)
        self._encoded: tuple[int, list[int]] = (-1, [])  # number of draft tokens, target tokens

    def add(self, token: int) -> None:
        """Append the draft model's next token."""
        if self.is_over:
            return
        text = self._bridge.draft.texts[token]
        self._end = self._bridge.end_to_target.get(token)
        if text is None or self._end is not None:
            self.is_over = True
            self._begins += [len(self._text)] * (self._end is not None)
        else:
            self._begins.append(len(self._text))
            self._text += text

    def tokens(self) -> list[int]:
        """The draft in the target's tokens.

        It is encoded together with the text before it, so that token boundaries fall as usual; or alone, where that
        would move the boundaries of the text before it.
        """
        if self._encoded[0] != len(self._begins):
            self._encoded = len(self._begins), self._encode()
        return self._encoded[1]

    def _encode(self) -> list[int]:
        target, count = self._bridge.target, len(self._context)
        text, complete = _decodable(self._before + self._text)
        ids = target.encode(text).ids
        if ids[:count] == self._context:
            ids = ids[count:]
        elif unfinished(self._before):
            return []
        else:
            text, complete = _decodable(self._text)
            ids = target.encode(text).ids
        num_texts = next((i for i, n in enumerate(ids) if n >= target.head_size or target.texts[n] is None), len(ids))
        ended = self._end is not None and complete and num_texts == len(ids)
        return ids[:num_texts] + ([self._end] if ended and self._end is not None else [])

    def chances(self, draft_probs: Sequence[float]) -> list[float]:
        """The probability of each of `tokens()`. draft_probs: the draft model's, of each draft token.

        A draft token's probability counts for the target token in which it begins. A target token in which none begins
        has probability 1.
        """
        texts = [self._bridge.target.texts[token] or b"" for token in self.tokens()]
        bounds = [0]
        for text in texts:
            bounds.append(bounds[-1] + len(text))
        if self._end is not None and texts and not texts[-1]:
            bounds[-1] += 1
        begun = list(zip(self._begins, draft_probs, strict=False))
        return [prod(chance for begin, chance in begun if low <= begin < high) for low, high in pairwise(bounds)]


def _context(bridge: VocabularyBridge, committed: Sequence[int]) -> list[int]:
    """The last 3 to 24 committed tokens, from the beginning of a word on if there is one; never a special token."""
    texts, first = bridge.target.texts, len(committed)
    fallback = first
    while first > 0 and len(committed) - first < 24 and (text := texts[committed[first - 1]]) is not None:
        first -= 1
        if 0x80 <= text[0] < 0xC0:  # inside a character
            continue
        if len(committed) - first <= 3:
            fallback = first
        elif text[:1] == b" ":
            return list(committed[first:])
    return list(committed[fallback:])


def _decodable(data: bytes) -> tuple[str, bool]:
    """The text up to the first broken or incomplete character, and whether that is all of the data."""
    try:
        return data.decode(), True
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), False
