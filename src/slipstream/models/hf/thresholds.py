"""Positions at which a model's computation may change, taken from the numbers in its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from slipstream.checks import is_whole
from slipstream.errors import UsageError

THRESHOLDS = re.compile(r"max_position|max_seq|n_positions|max_sequence|chunk|window(?!_layers)")


def longest_text(config: Any) -> int | None:
    """The maximum length in a text configuration, in tokens; None if it is missing or -1, for no limit."""
    length = getattr(config, "max_position_embeddings", None) or -1
    if not is_whole(length, -1):
        raise UsageError(
            f"max_position_embeddings of the configuration is {length!r:.60}; allowed: whole numbers from 1"
        )
    return None if length == -1 else int(length)


def thresholds(config: Any, end: int) -> list[int]:
    """Positions below `end` at which the computation may change, and `end`, ascending."""
    named = {value for name, value in _fields(config.to_dict()) if THRESHOLDS.search(name) and type(value) is int}
    return sorted({value for value in named if 0 < value < end} | {end})


def _fields(values: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """All fields, including those of nested dictionaries."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _fields(value)
        else:
            yield str(name), value
