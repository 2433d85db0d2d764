"""Checks of callers' values and files: numbers, strings, wording of refusals, help texts."""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from functools import wraps
from math import inf
from pathlib import Path
from textwrap import wrap
from typing import Any, Literal, ParamSpec, TypeGuard, get_args, get_origin

from slipstream.errors import UsageError, did_you_mean, first_line, os_reason

P = ParamSpec("P")
# raised by reading a JSON file that is missing, not UTF-8, not JSON, nested too deeply, or has an endless number
UNREADABLE = (OSError, ValueError, RecursionError)


class UnknownArgumentError(UsageError, TypeError):
    """An unknown, superfluous or missing argument; a TypeError as well, as Python itself would raise."""


def is_whole(value: object, low: float = 0, high: float = inf) -> TypeGuard[int]:
    """True for an int (not a bool) between `low` and `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object, low: float = -inf, high: float = inf) -> TypeGuard[float]:
    """True for a finite int or float (not a bool) between `low` and `high`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -inf < value < inf and low <= value <= high


def is_text(value: object) -> TypeGuard[str]:
    """True for a nonempty string of valid Unicode; lone surrogates are bytes, not text."""
    return isinstance(value, str) and value != "" and not any("\ud800" <= character <= "\udfff" for character in value)


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with ~ replaced by the user's folder; ~ before a name that is no user's stays."""
    return Path(os.path.expanduser(path))


def check_whole(name: str, value: object, low: int = 0, high: int | None = None, *, words: Sequence[str] = ()) -> None:
    """Raise unless the value is a whole number within the bounds, or one of `words`."""
    if not is_whole(value, low, inf if high is None else high) and value not in words:
        bounds = f", {low} or more" if high is None else f" from {low} to {high}"
        others = ", ".join(map(repr, words)) + " or " if words else ""
        raise UsageError(f"{name}={value!r}; allowed: {others}a whole number{bounds}")


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise unless the value is one of `allowed`; suggest the closest."""
    if value not in allowed:
        near = did_you_mean(str(value), *allowed)
        raise UsageError(f"{name}={value!r}; allowed: {', '.join(allowed)}{near}")


def check_known(what: str, names: Iterable[object], allowed: Sequence[str]) -> None:
    """Raise for the first name that is not in `allowed`; suggest the closest.

    what: begins the message, for example "unknown option".
    """
    for name in names:
        if name not in allowed:
            raise UsageError(f"{what} {name!r}; allowed: {', '.join(allowed)}{did_you_mean(str(name), *allowed)}")


def arguments_named(owner: str, other_names: Mapping[str, str]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorates a constructor, which then refuses unknown arguments in one line that suggests the right one.

    owner: of the constructor. other_names: what to write instead of names that other libraries use.
    """

    def decorate(construct: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(construct)
        allowed = list(signature.parameters)[1:]

        @wraps(construct)
        def __init__(*values: P.args, **options: P.kwargs) -> None:
            for name in options:
                if name not in allowed:
                    near = f"; did you mean {other_names[name]}?" if name in other_names else ""
                    near = near or did_you_mean(name, *allowed)
                    raise UnknownArgumentError(f"unknown option {name!r}; allowed: {', '.join(allowed)}{near}")
            try:
                signature.bind(*values, **options)
            except TypeError as error:
                raise UnknownArgumentError(f"{owner}: {error}; allowed: {_usage(owner, signature)}") from None
            construct(*values, **options)

        return __init__

    return decorate


def _usage(owner: str, signature: inspect.Signature) -> str:
    """A constructor's call without its optional keywords, for messages."""
    parameters = list(signature.parameters.values())[1:]
    by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    return f"{owner}({', '.join([*by_place, 'name=value', '...'])})"


def explained_fields(cls: Any, settings: Any = None) -> Any:
    """A class with the help texts of its fields in its docstring, where `help()` shows them.

    settings: the dataclass whose fields these are; None for the class itself. It may be used as a decorator.
    """
    lines = []
    for item in fields(settings or cls):
        default = {} if item.default is MISSING else item.default
        lines.append(f"{item.name} = {default!r}")
        lines += wrap(item.metadata["help"], 100, initial_indent="    ", subsequent_indent="    ")
    if cls.__doc__ is not None:  # it is None if Python runs with -OO
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", *lines])
    return cls


def changed_repr(settings: Any) -> str:
    """The repr of a dataclass of settings, with the fields that differ from the defaults."""
    defaults = {f.name: {} if f.default is MISSING else f.default for f in fields(settings)}
    shown = {f.name: getattr(settings, f.name) for f in fields(settings) if f.repr}
    changed = [
        f"{name}={value!r}"
        for name, value in shown.items()
        if value != defaults[name] or type(value) is not type(defaults[name])  # an option that was set to its default
    ]
    return f"{type(settings).__name__}({', '.join(changed)})"


def counted(number: int, noun: str) -> str:
    """1 token, 2 tokens."""
    return f"{number} {noun}{'s' * (number != 1)}"


def why_unreadable(error: Exception) -> str:
    """Reason for a read error; the caller adds the file name."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not valid UTF-8 at byte {error.start}"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError):
        return os_reason(error)
    reason = first_line(error)
    return reason[:1].lower() + reason[1:]


def read_json(what: str, file: Path) -> Any:
    """The content of a JSON file; `UsageError` if it cannot be read.

    what: the kind of file, which begins the message.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except UNREADABLE as error:
        raise UsageError(f"{what} {str(file)!r} cannot be read: {why_unreadable(error)}") from error


def check_fields(where: str, item: Mapping[str, Any], kinds: Mapping[str, Any], low: int = 0) -> None:
    """Raise UsageError unless a JSON object has these fields.

    where: the beginning of the message. kinds: the type of each field. low: the smallest number allowed in them.
    """
    for name, kind in kinds.items():
        if name not in item or not _fits(item[name], kind, low):
            value = repr(item[name])[:60] if name in item else "nothing"
            raise UsageError(f"{where}: {name} is {value}; allowed: {inspect.formatannotation(kind)}")


def _fits(value: Any, kind: Any, low: int) -> bool:
    """True if a JSON value is of this kind; numbers are finite and at least `low`."""
    parts = get_args(kind)
    if get_origin(kind) is Literal:
        return value in parts
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(part, parts[0], low) for part in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_fits(part, parts[1], low) for part in value.values())
    if parts:  # a union
        return any(_fits(value, part, low) for part in parts)
    if kind in (int, float):
        return is_whole(value, low) if kind is int else is_number(value, low)
    return kind is Any or isinstance(value, kind)


def save_text(what: str, file: Path, text: str) -> None:
    """Write a file of text; `UsageError` if it cannot be written. what: as in `read_json`."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{what} {str(file)!r} cannot be written: {os_reason(error)}") from error


def why_no_file(path: Path) -> str | None:
    """Reason why this file cannot be written, as far as that is known without writing; None if it can."""
    try:
        if path.is_dir():
            return "it is a folder"
        with suppress(FileNotFoundError):
            path.stat()  # raises if links form a circle
        if path.exists():
            return None if os.access(path, os.W_OK) else _denied(path, "permission denied")
        if not path.parent.exists():
            return f"the folder {str(path.parent)!r} does not exist"
    except (OSError, ValueError) as error:
        return why_unreadable(error)
    return why_no_folder(path.parent)


def why_no_folder(path: Path) -> str | None:
    """Reason why the folder, or the nearest existing one above it, cannot be written into; None if it can."""
    try:
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except (OSError, ValueError) as error:
        return why_unreadable(error)
    if not nearest.is_dir():
        return f"{str(nearest)!r} is not a folder"
    if os.access(nearest, os.W_OK | os.X_OK):
        return None
    return _denied(nearest, f"no permission to write into {str(nearest)!r}")


def _denied(path: Path, otherwise: str) -> str:
    is_read_only = sys.platform != "win32" and os.statvfs(path).f_flag & os.ST_RDONLY
    return "read-only file system" if is_read_only else otherwise
