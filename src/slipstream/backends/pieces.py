"""What a backend is told of a forward in which rows take different numbers of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """Some tokens of one row in a forward of several: `count` of them, written to `slot` from `start` on."""

    slot: int
    start: int
    count: int


@runtime_checkable
class Ragged(Protocol):
    """What a backend is besides if a forward can take a different number of tokens of each row.

    ragged: whether it can with this model here.
    """

    ragged: bool

    def forward_ragged(
        self, tokens: Tensor, pieces: Sequence[Piece], *, widths: Sequence[int] | None, columns: Tensor | None = None
    ) -> Tensor:
        """One forward of tokens [T], the pieces' one behind the other; any behind the last piece continue it.

        widths: for rounds, whose slots follow each other: in how many columns attention may take a row's tokens,
        ascending; none for as many as there are. None for prompts, each of which attends as if alone. Returns logits
        [T, V], or [C, V] of the given columns [C].
        """
