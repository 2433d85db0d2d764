"""Command-line flags made from dataclasses, so that a default and its help text have one home.

Options that several commands share are here too, and files whose keys are flags: plans in JSON, configurations in TOML.
Flags on the command line override environment variables (SLIPSTREAM_PORT for --port), which override these files.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from slipstream import drafters
from slipstream.apps.server.server_settings import SEVERAL, ServerSettings
from slipstream.checks import UNREADABLE, check_known, read_json, why_no_file, why_no_folder, why_unreadable
from slipstream.config import DTYPES, DecoderConfig
from slipstream.constraints.constraint import Constraint
from slipstream.core.limits import RULE_NAMES
from slipstream.errors import UsageError, one_line
from slipstream.integrations.ray.ray_options import RayOptions
from slipstream.models.weights.model_files import EMBEDDED, list_models
from slipstream.sampling.params import SamplingParams

SECTIONS = {DecoderConfig: "Decoder", SamplingParams: "Sampling", ServerSettings: "Server", RayOptions: "Many machines"}
# flags of these classes that --help shows; --help-all has the others too
USUAL = {
    DecoderConfig: ("drafter", "num_draft_tokens", "dtype", "device"),
    SamplingParams: ("temperature", "top_p", "max_tokens", "stop", "seed"),
    RayOptions: ("ray",),
    ServerSettings: ("host", "port", "api_key_file", "served_model_name", "max_model_len"),
}
# short help texts; --help-all shows the whole ones
SHORT = {
    "drafter": "what proposes tokens: auto, ngram, suffix, model, none, ...",
    "num_draft_tokens": "tokens drafted per round: auto (as many as pay off) or a number",
    "acceptance": "auto, or a rule: block, rejection, match, ...",
    "temperature": "0 is greedy; higher is more random",
    "top_p": "sample from the likeliest tokens that reach this total probability",
    "max_tokens": "maximum number of output tokens",
    "stop": "end the output before this string",
    "seed": "random seed; default: a fresh one, printed with the result (measuring commands: 0)",
}
NOT_FLAGS = {"logits_processors", "constraint", "n", "logprobs", "prediction"}  # unless a command asks for them
METAVARS = {str: "TEXT", int: "N", float: "NUMBER"}
MODELS, PROMPTS, MEASURING, OUTPUT = "Models", "Prompts", "Measuring", "Output"
NAMED = "hub id, folder, .gguf file, or a name from `slipstream models`"
STRUCTURE = "Structured output"
STANDARD = Path("-")  # standard input of files that are read, standard output of those that are written


def _number_or_word(text: str) -> int | str:
    return int(text) if re.fullmatch("-?[0-9]{1,18}", text) else text


def _switch(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def check_file(name: str) -> Callable[[Path | None], Path | None]:
    """A callback of the option `name` that refuses a file that cannot be written; nothing is created."""
    return lambda path: path if path == STANDARD else _writable(name, path, why_no_file)


def check_folder(name: str) -> Callable[[Path | None], Path | None]:
    """A callback of the option `name` that refuses a folder that can neither be used nor be made."""
    return lambda path: _writable(name, path, why_no_folder)


def _writable(name: str, path: Path | None, reason_of: Callable[[Path], str | None]) -> Path | None:
    if path is not None and (reason := reason_of(path)) is not None:
        raise UsageError(f"{name} {str(path)!r} cannot be written: {reason}")
    return path


def json_object(flag: str, text: str) -> Any:
    """The value of an option that is written as JSON."""
    try:
        return json.loads(text or "{}")
    except UNREADABLE as error:
        raise UsageError(f"{flag} {text!r:.80} is not JSON: {why_unreadable(error)}") from error


def _biases(pairs: list[str]) -> dict[int, float]:
    biases = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias {pair!r}; allowed: TOKEN_ID=NUMBER, e.g. 198=-5") from None
    return biases


def _read(flag: str, file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{flag} {str(file)!r} cannot be read: {why_unreadable(error)}; allowed: a file of UTF-8 text"
        ) from error


def _prediction(path: str | None) -> str | None:
    if path is None:
        return None
    if not (text := _read("--prediction", Path(path))):
        raise UsageError(f"--prediction {path!r} is empty; allowed: a file of UTF-8 text")
    return text


@dataclass(frozen=True)
class Written:
    """A field whose flag is written differently from its Python value."""

    kind: Any  # the type that typer reads
    parse: Callable[[Any], Any]  # makes the field's value from it
    metavar: str
    more: str = ""  # added to the field's help


def _completes(choices: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Shell completions for a value with these choices."""

    def complete(incomplete: str) -> list[str]:
        return [choice for choice in choices() if choice.startswith(incomplete)]

    return complete


COMPLETIONS = {
    "drafter": _completes(lambda: ("auto", *drafters.names())),
    "acceptance": _completes(lambda: ("auto", *RULE_NAMES)),
    "dtype": _completes(lambda: DTYPES),
    "device": _completes(lambda: ("auto", "cpu", "cuda")),
}


def _same(value: Any) -> Any:
    return value


WRITTEN = {
    "drafter": Written(str, str, "NAME"),
    "acceptance": Written(str, str, "RULE"),
    "num_draft_tokens": Written(str, _number_or_word, "N|NAME"),
    "draft_vocabulary": Written(str, _number_or_word, "N|NAME"),
    "draft_context": Written(str, _number_or_word, "N|NAME"),
    "fast": Written(str, _switch, "SWITCH"),
    "reproducible": Written(str, _switch, "SWITCH"),
    "load_options": Written(str, functools.partial(json_object, "--load-options"), "JSON"),
    "logit_bias": Written(list[str], _biases, "TOKEN_ID=NUMBER", f", e.g. 198=-5; {SEVERAL}"),
    "bad_words": Written(list[str], tuple, "TEXT", f"; {SEVERAL}"),
    "stop": Written(list[str], tuple, "TEXT", f"; {SEVERAL}"),
    "stop_token_ids": Written(list[int], tuple, "TOKEN_ID", f"; {SEVERAL}"),
    "allowed_host": Written(list[str], tuple, "NAME"),
    "allowed_origin": Written(list[str], tuple, "URL"),
    "trusted_proxy": Written(list[str], tuple, "ADDRESS"),
    "host": Written(str, str, "ADDRESS"),
    "api_key_file": Written(str, str, "FILE"),
    "served_model_name": Written(list[str], tuple, "NAME"),
    **dict.fromkeys(("max_model_len", "default_max_tokens", "max_queued_tokens"), Written(int | None, _same, "N")),
    **dict.fromkeys(("queue_timeout", "request_timeout"), Written(float | None, _same, "NUMBER")),
    "ray": Written(str, str, "ADDRESS"),
    "ray_actors": Written(str, str, "N|MIN-MAX"),
    "seed": Written(int | None, _same, "N"),
    "logprobs": Written(int | None, _same, "K"),
    "prediction": Written(str | None, _prediction, "FILE", "; a file of UTF-8 text"),
}
HELP_ALL = "help_all"
FULL = {
    f.name: f.metadata["help"] + (WRITTEN[f.name].more if f.name in WRITTEN else "")
    for cls in reversed(SECTIONS)  # if two classes share a field, the help of the first one stays
    for f in fields(cls)
    if f.name in SHORT
}


def _show_all(context: typer.Context, is_asked: bool) -> None:
    """Print the help with all options and their full descriptions, some of which `--help` omits."""
    if is_asked:
        for option in context.command.params:
            setattr(option, "hidden", False)  # noqa: B010  # arguments have none
            if option.name in SHORT:
                setattr(option, "help", FULL[option.name])  # noqa: B010
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", help="Show every option and exit.", is_eager=True, callback=_show_all)
]


def flags(
    *classes: type, also: Collection[str] = (), without: Collection[str] = (), **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces parameters that are annotated with a dataclass by one flag per field.

    A field is an annotated typer option, or a `setting`, whose help text becomes the flag's. If two classes share a
    field, the flag belongs to the first. defaults: this command's own defaults. also: fields of NOT_FLAGS that are
    flags of this command. without: fields that are not flags of this command.
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
        parameters = [*options.values(), *others, _parameter(HELP_ALL, HelpAll, False)]

        @functools.wraps(function)
        def wrapper(**values: Any) -> Any:
            values.pop(HELP_ALL)  # its callback has ended the command if it was asked for
            parsed = {name: values.pop(name) for name in options}
            parsed |= {name: WRITTEN[name].parse(value) for name, value in parsed.items() if name in WRITTEN}
            for parameter in signature.parameters.values():
                cls = parameter.annotation
                if cls in classes:
                    values[parameter.name] = cls(**{name: parsed[name] for name in parsed if owners[name] is cls})
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
        help=SHORT.get(f.name, f.metadata["help"]) + written.more,
        metavar=written.metavar or None,
        rich_help_panel=SECTIONS[cls],
        hidden=f.name not in USUAL.get(cls, (f.name,)),
        autocompletion=COMPLETIONS.get(f.name),
    )
    return _parameter(f.name, Annotated[kind, option], default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(section: str, *names: str, text: str, **more: Any) -> Any:
    """A typer option in a section of the help."""
    return typer.Option(*names, help=text, rich_help_panel=section, **more)


def _complete_model(incomplete: str) -> list[str]:
    names = ("toy", EMBEDDED, *(str(item["folder"]) for item in list_models() if item["name"] != EMBEDDED))
    return [name for name in names if name.startswith(incomplete)]


def read_plan(context: typer.Context, value: Path | None) -> Path | None:
    """Make the plan's values the defaults of the command; UsageError for a key that is not one of its options."""
    if value is not None:
        plan = read_json("plan", value)
        if not isinstance(plan, dict):
            raise UsageError(f"plan {str(value)!r} is not an object; allowed: one JSON object of options")
        _set_defaults(context, f"plan {str(value)!r}", plan)
    return value


def read_config(context: typer.Context, value: Path | None) -> Path | None:
    """Make a TOML file's values the defaults of the command; a JSON file is returned, for `config_from`."""
    if value is None or value.suffix != ".toml":
        return value
    try:
        settings = tomllib.loads(_read("--config", value))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"--config {str(value)!r} is not TOML: {one_line(error)}") from error
    _set_defaults(context, f"config file {str(value)!r}", settings)
    return None


def _set_defaults(context: typer.Context, file: str, settings: dict[str, Any]) -> None:
    """Make the values of a file the defaults of the command. file: its kind and name, for messages."""
    not_here = {"plan", "config", HELP_ALL}
    allowed = {key: option for option in context.command.params for key in keys_of(option) if key not in not_here}
    check_known(f"{file} has the unknown key", settings, sorted(allowed))
    defaults = dict[str, Any]()
    for key, item in settings.items():
        option = allowed[key]
        defaults[str(option.name)] = _default(f"{file}: {key}", item, getattr(option, "multiple", False))
    context.default_map = defaults


Target = Annotated[
    str, option(MODELS, "-m", "--target", "--model", text=NAMED, metavar="MODEL", autocompletion=_complete_model)
]
DraftModel = Annotated[
    str | None,
    option(
        MODELS,
        "--draft",
        text="draft model, of any vocabulary, or draft head, named like the target; mtp: the target's own MTP layers; "
        "none: disable MTP drafting too",
        metavar="MODEL",
        autocompletion=_complete_model,
    ),
]
ConfigFile = Annotated[
    Path | None,
    option(
        MODELS,
        "--config",
        text="TOML file of flags (port = 8000), or JSON file of decoder settings, which replaces their flags",
        metavar="FILE",
        hidden=True,
        is_eager=True,
        callback=read_config,
    ),
]
PromptWords = Annotated[
    list[str],
    typer.Argument(
        metavar="PROMPT",
        help="the prompt, in quotes; several run as a batch; - or none reads standard input",
        rich_help_panel=PROMPTS,
        show_default=False,
    ),
]
PromptTexts = Annotated[
    list[str], option(PROMPTS, "-p", "--prompt", text="prompt as an option; may be given several times", metavar="TEXT")
]
PromptFile = Annotated[
    Path | None,
    option(
        PROMPTS,
        "--prompt-file",
        text="text file, or .jsonl with a prompt per line; - is standard input",
        metavar="FILE",
    ),
]


def _category(**more: Any) -> Any:
    text = "only this category of a .jsonl file; may be given several times"
    return option(PROMPTS, "--category", text=text, metavar="NAME", **more)


def _limit(**more: Any) -> Any:
    return option(PROMPTS, "--limit", text="at most this many prompts of each category", metavar="N", min=1, **more)


Category = Annotated[list[str], _category()]
Limit = Annotated[int | None, _limit()]
# for commands that also take prompts in other ways than --prompt-file
FileCategory = Annotated[list[str], _category(hidden=True)]
FileLimit = Annotated[int | None, _limit(hidden=True)]
Raw = Annotated[bool, option(PROMPTS, "--raw", text="do not apply the chat template")]
AnswerStart = Annotated[
    str,
    option(PROMPTS, "--answer-start", text="the first words of the answer, which the model continues", metavar="TEXT"),
]
TemplateKwargs = Annotated[
    str,
    option(
        PROMPTS,
        "--chat-template-kwargs",
        text="variables that the chat template reads, e.g. '{\"enable_thinking\": false}'",
        metavar="JSON",
        show_default=False,
    ),
]
System = Annotated[str, option(PROMPTS, "--system", text="system message before the prompt", metavar="TEXT")]
Repeats = Annotated[
    int, option(MEASURING, "--repeats", text="runs of each arm on each prompt; times are medians", metavar="N", min=1)
]
BatchSizes = Annotated[
    str, option(MEASURING, "--batch-sizes", text="prompts decoded together, e.g. 1,4", metavar="NUMBERS")
]
Json = Annotated[
    Path | None,
    option(
        OUTPUT,
        "--json",
        text="write the full result to this file; - is standard output",
        metavar="FILE",
        callback=check_file("--json"),
    ),
]
Debug = Annotated[
    bool, option(OUTPUT, "--debug", text="show every round: accepted, rejected and the target's own tokens")
]
OutFolder = Annotated[
    Path | None,
    option(
        OUTPUT,
        "--out",
        text="folder of the runs; an interrupted run there continues; default: a new one in runs/",
        metavar="FOLDER",
        callback=check_folder("--out"),
    ),
]
Report = Annotated[bool, option(OUTPUT, "--report", text="also write plots and report.html into the folder")]


@dataclass(frozen=True)
class Models:
    """The models, and a file of decoder settings."""

    target: Target = EMBEDDED
    draft: DraftModel = None
    config_file: ConfigFile = None


@dataclass(frozen=True)
class PromptChoice:
    """The selected prompts of a file, or of the package's own."""

    prompt_file: PromptFile = None
    category: Category = ()  # type: ignore[assignment]
    limit: Limit = None


@dataclass(frozen=True)
class PromptSource:
    """Prompts given one by one, or those of a file."""

    words: PromptWords = ()  # type: ignore[assignment]
    prompt: PromptTexts = ()  # type: ignore[assignment]
    prompt_file: PromptFile = None
    category: FileCategory = ()  # type: ignore[assignment]
    limit: FileLimit = None
    raw: Raw = False


def read_batch_sizes(text: str, max_batch_size: int) -> list[int]:
    """Parse --batch-sizes. max_batch_size: the decoder's."""
    sizes = [int(size) for size in text.split(",")] if re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text) else []
    if not sizes or len(set(sizes)) < len(sizes):
        raise UsageError(f"--batch-sizes {text!r}; allowed: different whole numbers, separated by commas, e.g. 1,4,8")
    if max(sizes) > max_batch_size:
        raise UsageError(f"batch size {max(sizes)}; allowed: up to max_batch_size ({max_batch_size})")
    return sizes


@dataclass(frozen=True)
class Structure:
    """The constraint on the output; at most one kind."""

    json_schema: Annotated[
        Path | None,
        option(STRUCTURE, "--json-schema", text="JSON that matches the schema in this file", metavar="FILE"),
    ] = None
    json_object: Annotated[bool, option(STRUCTURE, "--json-object", text="any JSON object")] = False
    regex: Annotated[
        str | None,
        option(
            STRUCTURE, "--regex", text="output that matches this whole regular expression", metavar="TEXT", hidden=True
        ),
    ] = None
    choice: Annotated[
        list[str],
        option(
            STRUCTURE, "--choice", text="one of several outputs; give --choice for each", metavar="TEXT", hidden=True
        ),
    ] = ()  # type: ignore[assignment]
    grammar: Annotated[
        Path | None,
        option(
            STRUCTURE,
            "--grammar",
            text="output of the grammar in this file (llguidance's Lark)",
            metavar="FILE",
            hidden=True,
        ),
    ] = None
    whitespace: Annotated[
        str,
        option(
            STRUCTURE,
            "--whitespace",
            text="whitespace in JSON: compact | spaced | flexible",
            metavar="NAME",
            hidden=True,
        ),
    ] = Constraint.whitespace

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """The sampling options with the constraint of these flags, if there is one."""
        kinds: dict[str, Any] = {
            "json_schema": self.json_schema and _read("--json-schema", self.json_schema),
            "json_object": self.json_object,
            "regex": self.regex,
            "choice": list(self.choice) or None,
            "grammar": self.grammar and _read("--grammar", self.grammar),
        }
        if all(value in (None, False) for value in kinds.values()):
            if self.whitespace != Constraint.whitespace:
                raise UsageError(
                    f"--whitespace {self.whitespace!r} alone; allowed: with --json-schema or --json-object"
                )
            return params
        return replace(params, constraint=Constraint(**kinds, whitespace=self.whitespace))


Plan = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        callback=read_plan,
        is_eager=True,
        metavar="FILE",
        help='options as a JSON file, {"target": "toy", "repeats": 2, ...}; flags on the command line override it',
    ),
]


def keys_of(option: Any) -> list[str]:
    """The long names of a flag as keys of files: max_tokens for --max-tokens; an argument has its own name."""
    names = [name.lstrip("-") for name in option.opts if name.startswith("--")] or option.opts
    return [name.replace("-", "_") for name in names]


def _default(where: str, item: Any, multiple: bool) -> str | list[str]:
    """The value in the form of its flag; a list is several flags, or one value separated by commas."""
    if isinstance(item, list):
        parts = [_word(where, part) for part in item]
        return parts if multiple else ",".join(parts)
    word = json.dumps(item) if isinstance(item, dict) else _word(where, item)
    return [word] if multiple else word


def _word(where: str, item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, str | int | float):
        return str(item)
    raise UsageError(f"{where}={item!r}; allowed: a string, a number, true or false, or a list of these")
