"""In which order the requests of a job are decoded. It changes their speed, never their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from slipstream.core.types import Row

SHORTEST_BEGINNING = 32  # tokens that are worth being read once for several prompts


class HasRows(Protocol):
    """A request of a job."""

    @property
    def rows(self) -> Sequence[Row]:
        """Its texts, those of a prompt with n > 1 side by side."""


R = TypeVar("R", bound=HasRows)


def ordered(requests: Sequence[R], reuse: int) -> list[R]:
    """Those with the most to do first, and right behind each those whose prompts begin like its own.

    The long ones first, so that the batch stays full to the end; neighbours of like length, which is cheap in a batch;
    and a common beginning is computed once, as it is still cached when the next one comes. reuse: the unit in which
    what another row left in the KV cache is used, see `Shapes`.
    """
    unit = max(reuse, SHORTEST_BEGINNING)
    groups: dict[object, list[R]] = {}
    for at, request in enumerate(requests):
        row = _first(request)
        beginning = tuple(row.tokens[:unit]) if row is not None and row.prompt_length > unit else at
        groups.setdefault(beginning, []).append(request)
    for group in groups.values():
        group.sort(key=_work, reverse=True)
    return [request for group in sorted(groups.values(), key=_most, reverse=True) for request in group]


def _first(request: HasRows) -> Row | None:
    return request.rows[0] if request.rows else None


def _work(request: HasRows) -> int:
    row = _first(request)
    return 0 if row is None else row.prompt_length + row.params.max_tokens


def _most(group: Sequence[HasRows]) -> int:
    return _work(group[0])
