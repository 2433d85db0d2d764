"""Constraints as the first logits processor: what a row's grammar does not allow gets -inf before anything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.constraints.row_constraint import constraint_of
from slipstream.core.types import Row
from slipstream.errors import SlipstreamError
from slipstream.sampling.batch_processor import BatchProcessor
from slipstream.sampling.warpers import NEVER


class ConstraintMasks(BatchProcessor):
    """Masks every position of the constrained rows, behind their committed tokens and the draft tokens before it.

    Their drafts are read on the host, which waits for the device.
    """

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows, self._vocab_size = rows, vocab_size
        self._constraints = [constraint_of(row) for row in rows]
        self.active = any(one is not None for one in self._constraints)
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
        self._failures: dict[int, tuple[int, Exception]] = {}

    @property
    def failures(self) -> Mapping[int, tuple[int, Exception]]:
        return self._failures

    def drafted(self) -> None:
        self._failures.clear()

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        self._failures.pop(row, None)  # what failed behind a draft that was rejected says nothing about the next

    def taken(self, row: int, path: Sequence[int]) -> None:
        self._failures.pop(row, None)
        constraint = self._constraints[row]
        if constraint is not None and (why := constraint.problem([*self._rows[row].output, *path])) is not None:
            self._failures[row] = len(path), SlipstreamError(why)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, (row, constraint) in enumerate(zip(self._rows, self._constraints, strict=True)):
            if constraint is None:
                continue
            drafted: list[int] = draft[i, : first + scores.shape[1] - 1].tolist()
            masks = constraint.masks([*row.output, *drafted[:first]], drafted[first:])
            ends = np.flatnonzero(masks.max(axis=1) == 0)
            if len(ends) and (why := constraint.problem([*row.output, *drafted[: first + ends[0]]])) is not None:
                self._failures[i] = first + int(ends[0]), SlipstreamError(why)
            scores[i].masked_fill_(self._forbidden(torch.from_numpy(masks)), NEVER)

    def _forbidden(self, masks: Tensor) -> Tensor:
        """[J, V] bool from the packed bits of what is allowed."""
        packed = masks.to(self._bits.device, non_blocking=True)
        unset = packed[..., None].bitwise_and(self._bits).eq(0)
        return unset.flatten(1)[:, : self._vocab_size]
