"""Command-line flags made from dataclasses, so that a default and its help text have one home."""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from slipstream.apps.server.server_settings import ServerSettings
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.integrations.ray.ray_job import RayOptions
from slipstream.sampling.params import SamplingParams

SECTIONS = {DecoderConfig: "Decoder", SamplingParams: "Sampling", ServerSettings: "Server", RayOptions: "Many machines"}
NOT_FLAGS = {"logits_processors", "constraint", "n", "logprobs", "prediction"}  # unless a command asks for them
METAVARS = {str: "TEXT", int: "N", float: "NUMBER"}


def _number_or_word(text: str) -> int | str:
    return int(text) if re.fullmatch("-?[0-9]{1,18}", text) else text


def _switch(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _json_object(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise UsageError(f"--load-options {text!r} is not JSON: {error}") from error


def _biases(pairs: list[str]) -> dict[int, float]:
    found = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias {pair!r}; allowed: TOKEN_ID=NUMBER, e.g. 198=-5") from None
    return found


def _text_of(path: str | None) -> str | None:
    """The text of --prediction's file."""
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prediction {path!r} cannot be read: {error}; allowed: a file of UTF-8 text") from error
    if not text:
        raise UsageError(f"--prediction {path!r} is empty; allowed: a file of UTF-8 text")
    return text


@dataclass(frozen=True)
class Written:
    """A field whose flag is written differently from its Python value."""

    kind: Any
    parse: Callable[[Any], Any]
    metavar: str
    more: str = ""  # behind the field's help


SEVERAL = "may be given several times"
WRITTEN = {
    "drafter": Written(str, str, "NAME"),
    "acceptance": Written(str, str, "RULE"),
    "num_draft_tokens": Written(str, _number_or_word, "N|NAME"),
    "draft_vocabulary": Written(str, _number_or_word, "N|NAME"),
    "draft_context": Written(str, _number_or_word, "N|NAME"),
    "fast": Written(str, _switch, "SWITCH"),
    "reproducible": Written(str, _switch, "SWITCH"),
    "load_options": Written(str, _json_object, "JSON"),
    "logit_bias": Written(list[str], _biases, "TOKEN_ID=NUMBER", f", e.g. 198=-5; {SEVERAL}"),
    "bad_words": Written(list[str], tuple, "TEXT", f"; {SEVERAL}"),
    "stop": Written(list[str], tuple, "TEXT", f"; {SEVERAL}"),
    "stop_token_ids": Written(list[int], tuple, "TOKEN_ID", f"; {SEVERAL}"),
    "allowed_host": Written(list[str], tuple, "NAME"),
    "allowed_origin": Written(list[str], tuple, "URL"),
    "ray": Written(str, str, "ADDRESS"),
    "ray_actors": Written(str, str, "N|MIN-MAX"),
    "seed": Written(int | None, lambda value: value, "N"),
    "logprobs": Written(int | None, lambda value: value, "K"),
    "prediction": Written(str | None, _text_of, "FILE", "; a file of UTF-8 text"),
}


def flags(
    *classes: type, also: Collection[str] = (), without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace parameters annotated with a dataclass by one flag per field.

    A field is an annotated typer option, or a `setting`, whose help text becomes the flag's. defaults: other defaults
    than the dataclass's, for commands that need them. also: fields that are flags of few commands;
    without: fields that are none of this one. A field that two
    classes share becomes one flag, of the first.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        others = [p for p in signature.parameters.values() if p.annotation not in classes]
        options: dict[str, inspect.Parameter] = {}
        owners: dict[str, type] = {}
        for cls in classes:
            for option in _options(cls, defaults, NOT_FLAGS.difference(also).union(without)):
                options.setdefault(option.name, option)
                owners.setdefault(option.name, cls)
        parameters = [*options.values(), *others]

        @functools.wraps(function)
        def wrapper(**values: Any) -> Any:
            given = {name: _parsed(name, values.pop(name)) for name in options}
            for parameter in signature.parameters.values():
                cls = parameter.annotation
                if cls in classes:
                    values[parameter.name] = cls(**{name: given[name] for name in given if owners[name] is cls})
            return function(**values)

        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _options(cls: type, defaults: Mapping[str, Any], left_out: Collection[str]) -> Iterator[inspect.Parameter]:
    hints = {} if cls in SECTIONS else get_type_hints(cls, include_extras=True)
    for f in fields(cls):
        if "help" in f.metadata and f.name not in left_out:
            yield _setting_option(f, cls, defaults)
        elif f.name in hints:
            default = list(f.default) if isinstance(f.default, tuple) else f.default
            yield _parameter(f.name, hints[f.name], defaults.get(f.name, default))


def _setting_option(f: Field[Any], cls: type, defaults: Mapping[str, Any]) -> inspect.Parameter:
    default = f.default if f.default is not MISSING else {}
    default = defaults.get(f.name, default)
    kind = WRITTEN[f.name].kind if f.name in WRITTEN else type(default)
    written = WRITTEN.get(f.name, Written(kind, kind, METAVARS.get(kind, "")))
    if kind is str:
        default = json.dumps(default) if isinstance(default, dict) else str(default)
    elif kind in (list[str], list[int]):
        default = []
    option = typer.Option(
        f"--{f.name.replace('_', '-')}",
        help=f.metadata["help"] + written.more,
        metavar=written.metavar or None,
        rich_help_panel=SECTIONS[cls],
    )
    return _parameter(f.name, Annotated[kind, option], default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parsed(name: str, value: Any) -> Any:
    return WRITTEN[name].parse(value) if name in WRITTEN else value
