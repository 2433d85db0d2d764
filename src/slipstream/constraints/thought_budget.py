"""Ends a thought at its budget of tokens: the only legal continuation there is the closing mark.

The mark is forced as the tokens of a grammar are, so drafts are cut before it and every acceptance rule stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.constraints.compiled_grammars import RowConstraint
from slipstream.core.kv_slots import common_beginning
from slipstream.tokenization.tokenizer import AnswerTokenizer


class ThoughtBudget:
    """One row's budget, within the row's grammar if it has one; see `RowConstraint`.

    budget: tokens between the marks of the output's first thought. is_open: the prompt opened it.
    """

    def __init__(
        self,
        tokenizer: AnswerTokenizer,
        budget: int,
        vocab_size: int,
        inner: RowConstraint | None,
        *,
        is_open: bool,
        end: Sequence[int],
    ) -> None:
        thought = tokenizer.answer_form().thought
        assert thought is not None
        self._opening, self._closing = ("" if is_open else thought.opening.strip()), thought.closing
        self._decode: Callable[[Sequence[int]], str] = tokenizer.decode_marked
        self._budget, self._words, self._inner, self._end = budget, -(-vocab_size // 32), inner, list(end)
        self._tokens = list[int]()  # those that were searched for marks
        self._start: int | None = 0 if is_open else None  # of the thought
        self._stop: int | None = None  # behind its closing mark, or where it is certain that there is no thought

    def masks(self, output: Sequence[int], draft: Sequence[int]) -> NDArray[np.uint8]:
        if self._inner is None:
            masks = np.full((1 + len(draft), 4 * self._words), 255, dtype=np.uint8)
        else:
            masks = self._inner.masks(output, draft)
        for count in range(1 + len(draft)):
            if forced := self._forced_end([*output, *draft[:count]]):
                allowed = np.zeros_like(masks[count])
                allowed[forced[0] // 8] = 1 << (forced[0] % 8)
                masks[count] &= allowed
        return masks

    def num_legal(self, output: Sequence[int], draft: Sequence[int]) -> int:
        count = len(draft) if self._inner is None else self._inner.num_legal(output, draft)
        for place in range(count):
            forced = self._forced_end([*output, *draft[:place]])
            if forced and forced[0] != draft[place]:
                return place
        return count

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        run = list[int]()
        while len(run) < limit:
            more = self._forced_end([*output, *run])
            if not more and self._inner is not None:
                more = self._inner.forced([*output, *run], limit - len(run))
                # the budget may end among them
                places = range(1, len(more))
                cut = next((i for i in places if self._forced_end([*output, *run, *more[:i]])), len(more))
                more = more[:cut]
            if not more:
                break
            run += more
        return run[:limit]

    def problem(self, output: Sequence[int]) -> str | None:
        return None if self._inner is None else self._inner.problem(output)

    def _forced_end(self, tokens: Sequence[int]) -> list[int]:
        """The rest of the closing mark, if nothing else may follow these tokens."""
        self._search(tokens)
        if self._stop is not None or self._start is None or len(tokens) - self._start < self._budget:
            return []
        return self._end[len(tokens) - self._start - self._budget :]

    def _search(self, tokens: Sequence[int]) -> None:
        """Find where the thought begins and ends; remembers what it knows of the same beginning."""
        same = common_beginning(self._tokens, tokens, min(len(self._tokens), len(tokens)))
        if self._stop is not None and self._stop > same:
            self._stop = None
        if self._opening and self._start is not None and self._start > same:
            self._start = None
        for place in range(same, len(tokens)):
            if self._stop is not None:
                break
            if self._start is None:
                text = self._decode(tokens[: place + 1]).lstrip()
                if text.startswith(self._opening):
                    self._start = place + 1
                elif not self._opening.startswith(text):
                    self._stop = place + 1
            else:
                window = tokens[max(self._start, place + 1 - len(self._closing.encode())) : place + 1]
                if self._closing in self._decode(window):
                    self._stop = place + 1
        self._tokens = list(tokens)
