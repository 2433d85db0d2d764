"""The ragged forwards that are tried and timed: which row has how many tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.interfaces import RowSegment

SHARES = (3, 1, 8, 2, 1, 5, 1)  # how many tokens are whose, over and over
FEW = 3  # rows


def ragged_rounds(total: int, starts: Sequence[int], limit: int) -> Iterator[list[RowSegment]]:
    """Forwards of `total` tokens: two consecutive ones of as many rows as there are starts, and of few.

    The second has padding. Forwards that could reach beyond position `limit` are left out.
    """
    for rows in {min(count, len(starts), total - 1) for count in (len(starts), FEW)}:
        done = [0] * rows
        for turn in range(2):
            counts = shared_out(total - turn, rows, turn)
            if max(starts[:rows]) + max(done) + max(counts) > limit:
                break
            yield [RowSegment(i, starts[i] + done[i], counts[i]) for i in range(rows)]
            done = [at + count for at, count in zip(done, counts, strict=True)]


def shared_out(total: int, rows: int, turn: int) -> list[int]:
    """Tokens of each row, at least one."""
    counts = [1] * rows
    places, shares = cycle(range(rows)), cycle((*SHARES[turn:], *SHARES[:turn]))
    while (left := total - sum(counts)) > 0:
        counts[next(places)] += min(left, next(shares) - 1)
    return counts


def end_to_end(tokens: Tensor, segments: Sequence[RowSegment], total: int) -> Tensor:
    """The segments' tokens of one text [N], one after the other and padded to `total`."""
    joined = torch.cat([tokens[segment.start : segment.start + segment.count] for segment in segments])
    return pad(joined, (0, total - len(joined)))
