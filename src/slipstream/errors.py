"""The errors Slipstream raises: one hierarchy, each message one line that a user can act on."""

from dataclasses import MISSING, field, fields
from difflib import get_close_matches
from inspect import cleandoc
from textwrap import wrap
from typing import Any


class SlipstreamError(Exception):
    """Something failed; the message is one line a user can act on."""


class UsageError(SlipstreamError, ValueError):
    """Wrong use: the message names the field, the value and what is allowed."""


class UnknownArgumentError(UsageError, TypeError):
    """An argument of a name that is not known, one too many, or one that is missing; Python's own kind of error too."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def did_you_mean(name: str, *allowed: str) -> str:
    """The end of a message: the allowed name that a wrong one is nearest to; nothing if none is near."""
    return "".join(f"; did you mean {near!r}?" for near in get_close_matches(name, allowed, 1, 0.7) if near != name)


def setting(default: Any, text: str) -> Any:
    """A dataclass field with the help text that flags, `help()` and documentation show."""
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"help": text})
    return field(default=default, metadata={"help": text})


def explained_fields(cls: Any, settings: Any = None) -> Any:
    """A class with the help texts of its fields in its docstring, where `help()` shows them.

    settings: the dataclass whose fields these are; None for the class itself. It may be used as a decorator.
    """
    lines = []
    for item in fields(settings or cls):
        default = {} if item.default is MISSING else item.default
        lines.append(f"{item.name} = {default!r}")
        lines += wrap(item.metadata["help"], 100, initial_indent="    ", subsequent_indent="    ")
    if cls.__doc__ is not None:  # as it is where Python runs with -OO
        cls.__doc__ = "\n".join([cleandoc(cls.__doc__), "", *lines])
    return cls


def one_line(error: Exception) -> str:
    """The whole message of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
