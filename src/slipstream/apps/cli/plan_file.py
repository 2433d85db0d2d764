"""Options of a command from a JSON file: as if its keys were flags, which those on the command line go before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.errors import UsageError, did_you_mean


def read_plan(context: typer.Context, value: Path | None) -> Path | None:
    """Make the file's values the defaults of the command; keys that are no options of it are refused."""
    if value is None:
        return None
    allowed = {key: option for option in context.command.params if (key := _key(option)) != "plan"}
    defaults: dict[str, Any] = {}
    for key, item in _object(value).items():
        if key not in allowed:
            near = did_you_mean(key, *allowed)
            raise UsageError(
                f"plan {str(value)!r} has the unknown key {key!r}; allowed: {', '.join(sorted(allowed))}{near}"
            )
        option = allowed[key]
        defaults[str(option.name)] = _default(f"plan {str(value)!r}: {key}", item, getattr(option, "multiple", False))
    context.default_map = defaults
    return value


Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        callback=read_plan,
        is_eager=True,
        help='options as a JSON file, {"target": "toy", "repeats": 2, ...}; flags given beside it win',
    ),
]


def _key(option: Any) -> str:
    """The flag's name as a key: --max-tokens is max_tokens."""
    return str(max(option.opts, key=len)).lstrip("-").replace("-", "_")


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UsageError(f"plan {str(file)!r} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"plan {str(file)!r} is not an object; allowed: one JSON object of options")
    return found


def _default(where: str, item: Any, multiple: bool) -> str | list[str]:
    """A value as the flag would be written; a list is several flags, or one value with commas between."""
    if isinstance(item, list):
        parts = [_word(where, one) for one in item]
        return parts if multiple else ",".join(parts)
    word = json.dumps(item) if isinstance(item, dict) else _word(where, item)
    return [word] if multiple else word


def _word(where: str, item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, str | int | float):
        return str(item)
    raise UsageError(f"{where}={item!r}; allowed: text, a number, true or false, or a list of these")
