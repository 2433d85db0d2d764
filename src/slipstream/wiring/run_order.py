"""Orders the rows of a call, or the requests of a job, for speed. The order never changes their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from slipstream.core.types import Row

SHORTEST_BEGINNING = 32  # tokens that are worth being read once for several prompts
T = TypeVar("T")


class HasRows(Protocol):
    """A request of a job."""

    @property
    def rows(self) -> Sequence[Row]:
        """Its texts, those of a prompt with n > 1 side by side."""


def first_row(request: HasRows) -> Row | None:
    """The row that says how long a request is."""
    return request.rows[0] if request.rows else None


def ordered(items: Sequence[T], row_of: Callable[[T], Row | None], reuse: int) -> list[T]:
    """The longest first; each is followed by those whose prompts begin like its own.

    The long ones first, so that the batch stays full to the end; neighbours of like length, which is cheap in a batch;
    and a common beginning is computed once, as it is still cached when the next one comes. row_of: the row of an item
    that says how long it is, None if it has none. reuse: the unit in which what another row left in the KV cache is
    used, see `Shapes`.
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
