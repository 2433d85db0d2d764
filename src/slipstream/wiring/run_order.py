"""Orders the rows of a call, or the requests of a job, for speed. The order never changes their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from slipstream.core.types import Row

SHORTEST_BEGINNING = 32  # tokens; a shorter common beginning is not worth grouping prompts for
T = TypeVar("T")


class HasRows(Protocol):
    """A request of a job."""

    @property
    def rows(self) -> Sequence[Row]:
        """One row per text; those of a prompt with n > 1 are neighbors."""


def first_row(request: HasRows) -> Row | None:
    """The row by which a request's length is judged."""
    return request.rows[0] if request.rows else None


def ordered(items: Sequence[T], row_of: Callable[[T], Row | None], reuse: int) -> list[T]:
    """The items, the longest first, each followed by those whose prompts begin like its own.

    Long rows come first, so that the batch stays full to the end; rows of similar length are neighbors, which makes
    a batch cheap; and a common beginning is computed once, as it is still cached when the next row comes. row_of: the
    row by which an item's length is judged; None if it has none. reuse: see `Shapes`.
    """
    unit, rows = max(reuse, SHORTEST_BEGINNING), [row_of(item) for item in items]
    groups: dict[object, list[int]] = {}
    for number, row in enumerate(rows):
        beginning = tuple(row.tokens[:unit]) if row is not None and row.prompt_length > unit else number
        groups.setdefault(beginning, []).append(number)

    def work(number: int) -> int:
        row = rows[number]
        return 0 if row is None else row.prompt_length + row.params.max_tokens

    for group in groups.values():
        group.sort(key=work, reverse=True)
    longest_first = sorted(groups.values(), key=lambda group: work(group[0]), reverse=True)
    return [items[number] for group in longest_first for number in group]
