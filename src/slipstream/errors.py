"""The errors Slipstream raises: one hierarchy, each message one line that a user can act on."""

import re
from dataclasses import field
from difflib import get_close_matches
from typing import Any

LINE_BREAKS = re.compile(r"\s*\n\s*")
# what a model's own code raises on inputs and configurations that it does not take
MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    ArithmeticError,
)


class SlipstreamError(Exception):
    """Something failed; the message is one line a user can act on, even if the values in it have several."""

    def __init__(self, message: str) -> None:
        super().__init__(LINE_BREAKS.sub(" ", message))


class UsageError(SlipstreamError, ValueError):
    """Wrong use: the message names the field, the value and what is allowed."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, with its class where the message alone says little."""
    return _message(error, next(iter(str(error).strip().splitlines()), ""))


def one_line(error: BaseException) -> str:
    """The whole message of an exception on one line, with its class where the message alone says little."""
    return _message(error, " ".join(str(error).split()))


def _message(error: BaseException, text: str) -> str:
    """A message as it is; with its class if it is empty or of a KeyError, ZeroDivisionError and the like."""
    return with_class(error) if not text or isinstance(error, (LookupError, ArithmeticError)) else text


def with_class(error: BaseException) -> str:
    """The class of an exception and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def did_you_mean(name: str, *allowed: str) -> str:
    """The end of a message, which suggests the allowed name nearest to a wrong one; empty if none is near."""
    by_lower_case = {word.lower(): word for word in allowed}
    near = [by_lower_case[word] for word in get_close_matches(name.lower(), by_lower_case, 1, 0.7)]
    return "".join(f"; did you mean {word!r}?" for word in near if word != name)


def setting(default: Any, text: str, *, per_model: bool = False) -> Any:
    """A dataclass field with the help text that flags, `help()` and documentation show.

    per_model: each model of a server may have a value of its own.
    """
    metadata = {"help": text, "per_model": per_model}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def os_reason(error: OSError) -> str:
    """The system's reason for an error, worded as the end of a sentence: no such file or directory."""
    words = error.strerror or one_line(error)
    return words[:1].lower() + words[1:]
