"""Checks of values and files that callers give: what counts as a number or a text, and one wording of refusals."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TypeGuard

from slipstream.errors import UsageError, did_you_mean, first_line


def is_whole(value: object, low: float = 0, high: float = inf) -> TypeGuard[int]:
    """Whether it is a whole number from `low` to `high`, which booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float = -inf, high: float = inf) -> TypeGuard[float]:
    """Whether it is a finite number from `low` to `high`, which booleans are not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -inf < value < inf and low <= value <= high


def is_text(value: object) -> TypeGuard[str]:
    """Whether it is a text of valid Unicode that is not empty; lone surrogates are bytes, not text."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= sign <= "\udfff" for sign in value)


def check_whole(name: str, value: object, low: int = 0, high: int | None = None, *, words: Sequence[str] = ()) -> None:
    """Refuse what is no whole number within the bounds; `words` are allowed besides."""
    if not is_whole(value, low, inf if high is None else high) and value not in words:
        bounds = f", {low} or more" if high is None else f" from {low} to {high}"
        others = ", ".join(map(repr, words)) + " or " if words else ""
        raise UsageError(f"{name}={value!r}; allowed: {others}a whole number{bounds}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse what is none of these words, and suggest the nearest."""
    if value not in allowed:
        near = did_you_mean(str(value), *allowed)
        raise UsageError(f"{name}={value!r}; allowed: {', '.join(allowed)}{near}")


def why_unreadable(error: Exception) -> str:
    """Why a file cannot be read, without its name, which the message has already."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not valid UTF-8 at byte {error.start}"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return reason[:1].lower() + reason[1:]
