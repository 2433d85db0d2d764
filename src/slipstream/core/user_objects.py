"""Drafters, acceptance rules and policies of a user's own, named `module:Name` or by an entry point."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from slipstream.errors import UsageError, did_you_mean, with_class

if TYPE_CHECKING:
    from slipstream.core.types import Row

PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# of entry points, by the setting that names the object
GROUPS = {
    "drafter": "slipstream.drafters",
    "acceptance": "slipstream.acceptance_rules",
    "num_draft_tokens": "slipstream.policies",
}


def is_users(field: str, text: str) -> bool:
    """True if `text` is spelled `module:Name` or names an entry point for this setting."""
    return PATH.fullmatch(text) is not None or text in _installed(field)


@cache
def user_object(field: str, text: str) -> Any:
    """The object that `is_users` found, imported; modules in the current folder come after installed ones.

    Raises UsageError with the reason if it cannot be imported.
    """
    module_name, _, name = _installed(field).get(text, text).partition(":")
    sys.path.append("")
    try:
        module = import_module(module_name)
    except Exception as error:
        raise UsageError(f"{field}={text!r}: module {module_name!r} cannot be imported: {with_class(error)}") from error
    finally:
        sys.path.remove("")
    if not hasattr(module, name):
        near = did_you_mean(name, *vars(module))
        raise UsageError(f"{field}={text!r}: module {module_name!r} has no {name!r}{near}")
    return getattr(module, name)


@contextmanager
def texts_kept(what: str, rows: Sequence[Row]) -> Iterator[None]:
    """Refuse, and undo, what a user's object changes in the rows' tokens. what: names the object."""
    texts = [row.tokens[:] for row in rows]
    try:
        yield
    finally:
        changed = [(row, text) for row, text in zip(rows, texts, strict=True) if row.tokens != text]
        for row, text in changed:
            row.tokens[:] = text
    if changed:
        raise UsageError(f"{what} changed row.tokens; allowed: to read them, and to change a copy")


@cache
def _installed(field: str) -> dict[str, str]:
    """The entry points for a setting: name -> module:Name."""
    return {point.name: point.value for point in entry_points(group=GROUPS[field])}
