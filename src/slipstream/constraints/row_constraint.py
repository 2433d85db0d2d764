"""What a row's constraint answers, whatever library stands behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from slipstream.core.types import Row


class RowConstraint(Protocol):
    """Which tokens may follow. Every answer is a function of the tokens in the question and of nothing else.

    output: tokens behind the prompt; draft: tokens behind these. V: the target's vocabulary.
    """

    def masks(self, output: Sequence[int], draft: Sequence[int]) -> NDArray[np.uint8]:
        """[len(draft) + 1, at least V / 8] bits, the lowest first: what may follow the output and each draft token.

        What follows a token that is not allowed, or the end, is left open: all bits are set.
        """

    def num_legal(self, output: Sequence[int], draft: Sequence[int]) -> int:
        """How many tokens of the draft may follow the output, up to the first that may not."""

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens that must follow, each being the only one its mask allows; the end may be the last."""

    def problem(self, output: Sequence[int]) -> str | None:
        """Why nothing may follow an output, where the constraint itself is the reason; else None."""


def constraint_of(row: Row) -> RowConstraint | None:
    """The row's, if it has one; the loop does not know what it is."""
    return cast("RowConstraint | None", row.constraint)
