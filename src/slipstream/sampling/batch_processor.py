"""The base class of logits processors, which edit the scores of a whole batch. Shapes as in `sampling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from slipstream.core.types import Row
from slipstream.sampling.params import SamplingParams


def params_of(row: Row) -> SamplingParams:
    """The row's options; the loop knows fewer of them."""
    return cast(SamplingParams, row.params)


class BatchProcessor:
    """One kind of processor for a whole batch. Inactive ones are left out of the loop.

    `apply` edits scores [B, J, V] in place; draft: [B, K]; `first` draft tokens come before position 0.
    may_fail: it runs code of the request's.
    """

    active = False
    may_fail = False

    @property
    def failures(self) -> Mapping[int, tuple[int, Exception]]:
        """Rows whose processors failed: place in the batch -> how many draft tokens had been seen, and why."""
        return {}

    def taken(self, row: int, path: Sequence[int]) -> None:
        """Forget how row number `row` failed in other branches of a tree than the one with these tokens."""

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        """Edit the scores."""
        raise AssertionError(f"{type(self).__name__} is not active")

    def drafted(self) -> None:
        """Forget the failures so far; only processors that may have some need it."""

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Note the tokens that row number `row` committed; only processors with counts need them."""
