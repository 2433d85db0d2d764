"""Ends a thought at its budget of tokens: the only legal continuation there is the closing mark.

The mark is forced as the tokens of a grammar are, so drafts are cut before it and every acceptance rule stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipstream.constraints.compiled_grammars import RowConstraint
from slipstream.core.kv_slots import common_beginning
from slipstream.tokenization.tokenizer import AnswerTokenizer


class ThoughtBudget:
    """One row's budget, within the row's grammar if it has one; see `RowConstraint`.

    budget: tokens between the marks of the output's thoughts; the closing mark of one counts when another follows it.
    Within a grammar, a character that the budget would cut is completed. is_open: the prompt opened a thought.
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
        self._form, self._decode = thought, tokenizer.decode_marked
        self._mark_tokens = len(thought.marks.encode())  # no mark has more
        self._budget, self._words, self._inner, self._end = budget, -(-vocab_size // 32), inner, list(end)
        self._tokens = list[int]()  # those that were searched for marks
        # after each mark: its position, the tokens that the thoughts before it have used, and whether it opens one
        self._marks = [(0, 0, is_open)]
        self._stop: int | None = None  # where it is certain that no other thought begins

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
        place, used, is_open = self._marks[-1]
        over = len(tokens) - place - max(0, self._budget - used)
        if not is_open or over < 0:
            return []
        if self._inner is not None:  # a grammar lets nothing follow half a character
            limit = len(tokens) - over
            tails = (self._decode(tokens[max(place, limit - 3) : limit + more]) for more in range(min(over, 3) + 1))
            whole = (more for more, tail in enumerate(tails) if not tail.endswith("\N{REPLACEMENT CHARACTER}"))
            over -= next(whole, min(over + 1, 4))
        return self._end[over:] if over >= 0 else []

    def _search(self, tokens: Sequence[int]) -> None:
        """Find where thoughts begin and end; remembers what it knows of the same beginning."""
        same = common_beginning(self._tokens, tokens, min(len(self._tokens), len(tokens)))
        if self._stop is not None and self._stop > same:
            self._stop = None
        while self._marks[-1][0] > same:
            self._marks.pop()
        for end in range(same + 1, len(tokens) + 1):
            if self._stop is not None:
                break
            place, used, is_open = self._marks[-1]
            latest = self._marks[-2][0] if not is_open and len(self._marks) > 1 else place  # position after an opening
            recent = tokens[max(latest, end - self._mark_tokens) : end]
            if is_open:
                if self._form.closing_pattern.search(self._decode(recent)):
                    self._marks.append((end, used + end - place, False))
            elif self._form.anywhere:
                if self._form.opening_pattern.search(self._decode(recent)):
                    self._marks.append((end, used, True))
            else:
                text = self._decode(tokens[place:end]).lstrip()
                if text.startswith(self._form.opening):
                    self._marks.append((end, used, True))
                elif not self._form.opening.startswith(text):
                    self._stop = end
        self._tokens = list(tokens)
