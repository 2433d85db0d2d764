"""What a token is worth to a caller who waits for several rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from slipstream.core.types import Row

SHARPNESS = 4  # how fast a row's tokens lose worth as it gets ahead of the one that has the most to do


@contextmanager
def awaited_together(rows: Sequence[Row]) -> Iterator[None]:
    """The caller goes on when the last of these rows has ended."""
    for row in rows:
        row.together = rows
    try:
        yield
    finally:
        for row in rows:
            row.together = ()  # rows that refer to each other would outlive their call


def worth_of_tokens(rows: Sequence[Row], seconds: Callable[[int], float]) -> list[float]:
    """For each row, what a token of it is worth beside one of the row that is going to end last, at most 1.

    A caller who waits for all rows of a call gains by a token of the last one what a round costs, by a token of any
    other only what a row adds to a round: drafts that put a row ahead of the others are hardly worth their
    verification. Everywhere else (rows of their own, rows of the call that wait for a place) tokens are worth the same.
    seconds: of a forward of that many rows without drafts.
    """
    call = rows[0].together if rows else ()
    if len(rows) < 2 or not call or any(row.together is not call for row in rows):
        return [1.0] * len(rows)
    if any(not row.rounds and row.finish_reason is None for row in call):
        return [1.0] * len(rows)
    whole, longest = seconds(len(rows)), max(row.remaining for row in rows)
    least = min(1.0, max(0.0, (whole - seconds(len(rows) - 1)) * len(rows) / whole))
    return [least + (1 - least) * (row.remaining / max(longest, 1)) ** SHARPNESS for row in rows]
