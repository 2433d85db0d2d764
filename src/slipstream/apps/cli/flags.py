"""Command-line flags made from dataclasses, so that a default and its help text have one home."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

# fields whose flag is written differently from the Python value: the type of the flag, and how to read it


def _number_or_word(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _switch(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _json_object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UsageError(f"--load-options {text!r} is not JSON: {error}") from error


def _bias(pairs: list[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, _, bias in (pair.partition("=") for pair in pairs)}
    except ValueError:
        raise UsageError(f"--logit-bias {' '.join(pairs)!r}; allowed: TOKEN_ID=NUMBER") from None


_FLAGS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "num_draft_tokens": (str, _number_or_word),
    "fast": (str, _switch),
    "reproducible": (str, _switch),
    "load_options": (str, _json_object),
    "logit_bias": (list[str], _bias),
    "bad_words": (list[str], tuple),
    "stop": (list[str], tuple),
    "stop_token_ids": (list[int], tuple),
    "seed": (int | None, lambda value: value),
}
_NOT_ON_THE_COMMAND_LINE = {"logits_processors", "n"}


def flags(*classes: type, **defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace parameters annotated with a dataclass by one flag per field.

    defaults: other defaults than the dataclass's, for commands that need them. A field that two classes share becomes
    one flag, of the first class.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        kept = [p for p in signature.parameters.values() if p.annotation not in classes]
        named: dict[str, Field[Any]] = {}
        for cls in classes:
            for f in fields(cls):
                named.setdefault(f.name, f)
        chosen = {name: f for name, f in named.items() if name not in _NOT_ON_THE_COMMAND_LINE}
        options = [_option(f, defaults) for f in chosen.values()]

        @functools.wraps(function)
        def wrapper(**values: Any) -> Any:
            given = {name: _parse(name, values.pop(name)) for name in chosen}
            for parameter in signature.parameters.values():
                if parameter.annotation in classes:
                    own = {f.name for f in fields(parameter.annotation)} & given.keys()
                    if parameter.annotation is SamplingParams and DecoderConfig in classes:
                        own.discard("num_draft_tokens")
                    values[parameter.name] = parameter.annotation(**{name: given[name] for name in own})
            return function(**values)

        wrapper.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in [*kept, *options]}
        return wrapper

    return decorate


def _option(f: Field[Any], defaults: Mapping[str, Any]) -> inspect.Parameter:
    default = f.default if f.default is not MISSING else {}
    default = defaults.get(f.name, default)
    kind = _FLAGS[f.name][0] if f.name in _FLAGS else type(default)
    if kind is str:
        default = json.dumps(default) if isinstance(default, dict) else str(default)
    elif kind in (list[str], list[int]):
        default = []
    option = typer.Option(f"--{f.name.replace('_', '-')}", help=f.metadata["help"])
    return inspect.Parameter(
        f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _parse(name: str, value: Any) -> Any:
    return _FLAGS[name][1](value) if name in _FLAGS else value
