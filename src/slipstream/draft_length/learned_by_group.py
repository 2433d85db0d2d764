"""What drafters learn from requests, kept apart by `Row.group`, so that no caller sees another's texts in its speed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
MOST = 64  # groups remembered besides the default one; the one that was not asked for longest goes


class LearnedByGroup(Generic[T]):
    """One T for each group of rows, made when it is first asked for. "" is the default group, which always stays."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.default = make()
        self._others: dict[str, T] = {}

    def of(self, group: str) -> T:
        """What belongs to a group."""
        if not group:
            return self.default
        found = self._others.pop(group, None)
        if found is None:
            found = self._make()
            if len(self._others) >= MOST:
                del self._others[next(iter(self._others))]
        self._others[group] = found
        return found

    def __iter__(self) -> Iterator[T]:
        return iter([self.default, *self._others.values()])

    def forget_others(self) -> None:
        """Drop all but the default group's."""
        self._others.clear()
