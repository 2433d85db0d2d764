"""Command-line flags made from dataclasses, so that a default and its help text have one home.

Options that several commands share are here too, and files whose keys are flags: plans in JSON, configurations in TOML.
Flags on the command line override environment variables (SLIPSTREAM_PORT for --port), which override these files.
"""

from __future__ import annotations

import inspect
import json
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from slipstream import drafters
from slipstream.apps.cli.command_classes import why_refused
from slipstream.apps.server.server_settings import SEVERAL, ServerSettings
from slipstream.checks import UNREADABLE, check_known, read_json, why_no_file, why_no_folder, why_unreadable
from slipstream.config import DTYPES, DecoderConfig
from slipstream.constraints.constraint import Constraint
from slipstream.core.limits import RULE_NAMES
from slipstream.errors import UsageError
from slipstream.integrations.ray.ray_options import RayOptions
from slipstream.models.weights.model_files import EMBEDDED, list_models
from slipstream.models.weights.named_models import short_names
from slipstream.sampling.params import OWN_OPTIONS, SamplingParams, Unset

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
# unless a command asks for them
NOT_FLAGS = {"logits_processors", "constraint", "n", "logprobs", "prediction", "suffix"}
METAVARS = {str: "TEXT", int: "N", float: "NUMBER"}
MODELS, PROMPTS, MEASURING, OUTPUT = "Models", "Prompts", "Measuring", "Output"
NAMED = "hub id (OWNER/REPO:Q4_K_M for a GGUF file), folder, .gguf file, or a name from `slipstream models`"
STRUCTURE = "Structured output"
RAW, REPEATS = "do not apply the chat template", "runs of each arm on each prompt; times are medians"
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
    return lambda incomplete: [choice for choice in choices() if choice.startswith(incomplete)]


COMPLETIONS = {
    "drafter": _completes(lambda: ("auto", *drafters.names())),
    "acceptance": _completes(lambda: ("auto", *RULE_NAMES)),
    "dtype": _completes(lambda: DTYPES),
    "device": _completes(lambda: ("auto", "cpu", "cuda")),
}


def _same(value: Any) -> Any:
    return value


# of options that are Unset if a user leaves them out: what holds then
NOTES = {
    name: "; default: " + ("the model's own, or " if name in OWN_OPTIONS else "") + f"{value:g}"
    for name, value in SamplingParams().unset.items()
}
WRITTEN = {
    "drafter": Written(str, str, "NAME"),
    "acceptance": Written(str, str, "RULE"),
    "num_draft_tokens": Written(str, _number_or_word, "N|NAME"),
    "draft_vocabulary": Written(str, _number_or_word, "N|NAME"),
    "draft_context": Written(str, _number_or_word, "N|NAME"),
    "fast": Written(str, _switch, "SWITCH"),
    "reproducible": Written(str, _switch, "SWITCH"),
    "load_options": Written(str, partial(json_object, "--load-options"), "JSON"),
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
    "thinking_token_budget": Written(int | None, _same, "N"),
    "logprobs": Written(int | None, _same, "K"),
    "suffix": Written(str | None, _same, "TEXT"),
    "prediction": Written(str | None, _prediction, "FILE", "; a file of UTF-8 text"),
}
HELP_ALL, GREEDY = "help_all", "greedy"
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
                note = NOTES.get(option.name, "") if option.default is None else ""
                setattr(option, "help", FULL[option.name] + note)  # noqa: B010
        typer.echo(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", help="Show every option and exit.", is_eager=True, callback=_show_all)
]


Greedy = Annotated[
    bool,
    typer.Option(
        "--greedy",
        help="ignore the model's own sampling options: greedy where no other flag says otherwise",
        rich_help_panel=SECTIONS[SamplingParams],
    ),
]


def flags(
    *classes: type, also: Collection[str] = (), without: Collection[str] = (), measures: bool = False, **defaults: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces parameters that are annotated with a dataclass by one flag per field.

    A field is a `flag`, or a `setting`, whose help text becomes the flag's. If two classes share a field, the flag
    belongs to the first. defaults: this command's own defaults. also: fields of NOT_FLAGS that are flags of this
    command. without: fields that are not flags of this command. measures: the command compares runs, so that sampling
    options that are left out are not the model's own. Commands with sampling options have --greedy, too. A JSON file of
    --config replaces the flags of `DecoderConfig`; the constraint of `Structure` becomes one of the sampling options.
    """
    if measures:
        defaults = SamplingParams().unset | defaults
    usual = DecoderConfig(**{f.name: defaults[f.name] for f in fields(DecoderConfig) if f.name in defaults})

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        others = [p for p in signature.parameters.values() if p.annotation not in classes]
        options: dict[str, inspect.Parameter] = {}
        owners: dict[str, type] = {}
        for cls in classes:
            for option in _options(cls, defaults, NOT_FLAGS.difference(also).union(without)):
                options.setdefault(option.name, option)
                owners.setdefault(option.name, cls)
        samples = SamplingParams in classes
        greedy = [_parameter(GREEDY, Greedy, False)] if samples else []
        parameters = [*options.values(), *greedy, *others, _parameter(HELP_ALL, HelpAll, False)]

        @wraps(function)
        def wrapper(**values: Any) -> Any:
            values.pop(HELP_ALL)  # its callback has ended the command if it was asked for
            is_greedy = samples and values.pop(GREEDY)
            parsed = {name: values.pop(name) for name in options}
            parsed = {name: value for name, value in parsed.items() if value is not None or name not in NOTES}
            parsed |= {name: WRITTEN[name].parse(value) for name, value in parsed.items() if name in WRITTEN}
            if is_greedy:  # options that are left out are then not the model's own
                if parsed.get("temperature"):
                    raise UsageError(f"--greedy with --temperature {parsed['temperature']:g}; allowed: one of them")
                parsed = {name: value for name, value in SamplingParams().unset.items() if name in OWN_OPTIONS} | parsed
            made: dict[type, Any] = {}
            for cls in classes:
                made[cls] = cls(**{name: parsed[name] for name in parsed if owners[name] is cls})
            if DecoderConfig in made and (file := parsed.get("config_file")) is not None:
                if made[DecoderConfig] != usual:
                    raise UsageError("--config replaces the decoder's flags; allowed: one or the other")
                made[DecoderConfig] = DecoderConfig.from_json(file, usual)
            if Structure in made:
                made[SamplingParams] = made[Structure].added_to(made[SamplingParams])
            values |= {p.name: made[p.annotation] for p in signature.parameters.values() if p.annotation in made}
            return function(**values)

        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        )
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _options(cls: type, defaults: Mapping[str, Any], left_out: Collection[str]) -> Iterator[inspect.Parameter]:
    hints = {} if cls in SECTIONS else get_type_hints(cls)
    for f in fields(cls):
        if "help" in f.metadata and f.name not in left_out:
            yield _setting_option(f, cls, defaults)
        elif "option" in f.metadata:
            default = list(f.default) if isinstance(f.default, tuple) else f.default
            yield _parameter(f.name, Annotated[hints[f.name], f.metadata["option"](_flag_of(f))], default)


def _flag_of(f: Field[Any]) -> str:
    return f"--{f.name.replace('_', '-')}"


def _setting_option(f: Field[Any], cls: type, defaults: Mapping[str, Any]) -> inspect.Parameter:
    default = f.default if f.default is not MISSING else {}
    default = defaults.get(f.name, default)
    kind = WRITTEN[f.name].kind if f.name in WRITTEN else type(default)
    note = ""
    if isinstance(default, Unset):
        kind, default, note = float if isinstance(default, float) else int, None, NOTES[f.name]
    written = WRITTEN.get(f.name, Written(kind, kind, METAVARS.get(kind, ""), note))
    if note:
        kind = kind | None
    if kind is str:
        default = json.dumps(default) if isinstance(default, dict) else str(default)
    elif kind in (list[str], list[int]):
        default = []
    option = typer.Option(
        _flag_of(f),
        help=SHORT.get(f.name, f.metadata["help"]) + written.more,
        metavar=written.metavar or None,
        rich_help_panel=SECTIONS[cls],
        hidden=f.name not in USUAL.get(cls, (f.name,)),
        autocompletion=COMPLETIONS.get(f.name),
    )
    return _parameter(f.name, Annotated[kind, option], default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(section: str, names: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    """A typer option in a section of the help. names: separated by blanks; more: see `typer.Option`."""
    return typer.Option(*names.split(), help=text, metavar=metavar, rich_help_panel=section, **more)


def flag(default: Any, section: str, text: str, metavar: str | None = None, names: str = "", **more: Any) -> Any:
    """A dataclass field that is an option, by default of the field's name. A default of several values is a tuple."""
    return field(
        default=default, metadata={"option": lambda name: option(section, names or name, text, metavar, **more)}
    )


def _model_names() -> list[str]:
    folders = [str(item["folder"]) for item in list_models() if item["name"] != EMBEDDED]
    return ["toy", EMBEDDED, *short_names(), *folders]


def read_plan(context: typer.Context, value: Path | None) -> Path | None:
    """Make the plan's values the defaults of the command; UsageError for a key that is not one of its options."""
    if value is not None:
        plan = read_json("plan", value)
        if not isinstance(plan, dict):
            raise UsageError(f"plan {str(value)!r} is not an object; allowed: one JSON object of options")
        _set_defaults(context, f"plan {str(value)!r}", plan)
    return value


def read_config(context: typer.Context, value: Path | None) -> Path | None:
    """Make a TOML file's values the defaults of the command; a JSON file is returned, for `config_from`.

    If the command serves models, their tables become `context.obj`: the options of each by its name.
    """
    if value is None or value.suffix != ".toml":
        return value
    try:
        settings = tomllib.loads(_read("--config", value))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"--config {str(value)!r} is not TOML: {why_unreadable(error)}") from error
    file = f"config file {str(value)!r}"
    per_model = {key: option for key, option in _options_by_key(context).items() if str(option.name) in PER_MODEL}
    if "models" in settings and any(option.name == "idle_minutes" for option in per_model.values()):
        context.obj = _model_tables(context, file, settings.pop("models"), per_model)
    _set_defaults(context, file, settings)
    return None


def _model_tables(context: typer.Context, file: str, tables: Any, allowed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options in the tables [models.NAME], as the command gets those of flags. allowed: the flags by their keys."""
    if not isinstance(tables, dict) or not tables or not all(isinstance(table, dict) for table in tables.values()):
        raise UsageError(f"{file}: models={tables!r:.80}; allowed: tables such as [models.coder]")
    models = dict[str, dict[str, Any]]()
    for name, table in tables.items():
        where = f"{file}: models.{name}"
        shared = sorted(_options_by_key(context).keys() - allowed)
        if wrong := [key for key in table if key in shared]:
            raise UsageError(f"{where} has the key {wrong[0]!r}, which is the server's; allowed: above all tables")
        check_known(f"{where} has the unknown key", table, sorted(allowed))
        values = models[name] = {}
        for key, item in table.items():
            option = allowed[key]
            word = _default(f"{where}.{key}", item, option)
            try:
                value = option.process_value(context, word)
                values[option.name] = WRITTEN[option.name].parse(value) if option.name in WRITTEN else value
            except typer.BadParameter as error:
                raise UsageError(f"{where}.{key}={item!r}; allowed: {why_refused(error)}") from error
            except UsageError as error:
                raise UsageError(f"{where}.{key}: {error}") from error
    return models


def _options_by_key(context: typer.Context) -> dict[str, Any]:
    """The options of a command that files may hold."""
    not_here = {"plan", "config", HELP_ALL}
    return {key: option for option in context.command.params for key in keys_of(option) if key not in not_here}


def _set_defaults(context: typer.Context, file: str, settings: dict[str, Any]) -> None:
    """Make the values of a file the defaults of the command. file: its kind and name, for messages."""
    allowed = _options_by_key(context)
    check_known(f"{file} has the unknown key", settings, sorted(allowed))
    defaults = dict[str, Any]()
    for key, item in settings.items():
        option = allowed[key]
        defaults[str(option.name)] = _default(f"{file}: {key}", item, option)
    context.default_map = defaults


complete_models = _completes(_model_names)
AnswerStart = Annotated[
    str, option(PROMPTS, "--answer-start", "the first words of the answer, which the model continues", "TEXT")
]
TemplateKwargs = Annotated[
    str,
    option(
        PROMPTS,
        "--chat-template-kwargs",
        "variables that the chat template reads, e.g. '{\"enable_thinking\": false}'",
        "JSON",
        show_default=False,
    ),
]
System = Annotated[str, option(PROMPTS, "--system", "system message before the prompt", "TEXT")]
Json = Annotated[
    Path | None,
    option(
        OUTPUT,
        "--json",
        "write the full result to this file; - is standard output",
        "FILE",
        callback=check_file("--json"),
    ),
]
Debug = Annotated[bool, option(OUTPUT, "--debug", "show every round: accepted, rejected and the target's own tokens")]
# flags that several classes have
target_flag = partial(
    flag, EMBEDDED, MODELS, NAMED, "MODEL", names="-m --target --model", autocompletion=complete_models
)
draft_flag = partial(
    flag,
    None,
    MODELS,
    "small model or draft head that guesses ahead: hub id, folder, .gguf file or name; mtp: the target's own MTP "
    "layers; none: draft without a model",
    "MODEL",
    autocompletion=complete_models,
)
config_flag = partial(
    flag,
    None,
    MODELS,
    "TOML file of flags (port = 8000), for `serve` also with tables [models.NAME], or JSON file of decoder settings, "
    "which replaces their flags",
    "FILE",
    names="--config",
    hidden=True,
    is_eager=True,
    callback=read_config,
)
prompt_file_flag = partial(
    flag, None, PROMPTS, "text file, or .jsonl with a prompt per line; - is standard input", "FILE"
)
category_flag = partial(flag, (), PROMPTS, "only this category of a .jsonl file; may be given several times", "NAME")
limit_flag = partial(flag, None, PROMPTS, "at most this many prompts of each category", "N", min=1)
raw_flag = partial(flag, False, PROMPTS, RAW)
repeats_flag = partial(flag, 3, MEASURING, REPEATS, "N", min=1)
batch_sizes_flag = partial(flag, "1", MEASURING, "prompts decoded together, e.g. 1,4", "NUMBERS")
runs_flag = partial(
    flag,
    None,
    OUTPUT,
    "folder of the runs; an interrupted run there continues; default: a new one in runs/",
    "FOLDER",
    names="--out",
    callback=check_folder("--out"),
)
report_flag = partial(flag, False, OUTPUT, "also write plots and report.html into the folder")


@dataclass(frozen=True)
class Models:
    """The models, and a file of decoder settings."""

    target: str = target_flag()
    draft: str | None = draft_flag()
    config_file: Path | None = config_flag()


# options that each model of a server may have for itself
PER_MODEL = {
    *("target", "draft"),
    *(f.name for f in fields(DecoderConfig)),
    *(f.name for f in fields(ServerSettings) if f.metadata["per_model"]),
}


@dataclass(frozen=True)
class PromptChoice:
    """The selected prompts of a file, or of the package's own."""

    prompt_file: Path | None = prompt_file_flag()
    category: list[str] = category_flag()
    limit: int | None = limit_flag()


PROMPT_WORDS = typer.Argument(
    metavar="PROMPT",
    help="the prompt, in quotes; several run as a batch; - or none reads standard input",
    rich_help_panel=PROMPTS,
    show_default=False,
)


@dataclass(frozen=True)
class PromptSource:
    """Prompts given one by one, or those of a file."""

    words: list[str] = field(default=(), metadata={"option": lambda _: PROMPT_WORDS})  # type: ignore[arg-type]
    prompt: list[str] = flag(
        (), PROMPTS, "prompt as an option; may be given several times", "TEXT", names="-p --prompt"
    )
    prompt_file: Path | None = prompt_file_flag()
    category: list[str] = category_flag(hidden=True)
    limit: int | None = limit_flag(hidden=True)
    raw: bool = raw_flag()


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

    json_schema: Path | None = flag(None, STRUCTURE, "JSON that matches the schema in this file", "FILE")
    json_object: bool = flag(False, STRUCTURE, "any JSON object")
    regex: str | None = flag(None, STRUCTURE, "output that matches this whole regular expression", "TEXT", hidden=True)
    choice: list[str] = flag((), STRUCTURE, "one of several outputs; give --choice for each", "TEXT", hidden=True)
    grammar: Path | None = flag(
        None, STRUCTURE, "output of the grammar in this file (llguidance's Lark)", "FILE", hidden=True
    )
    whitespace: str = flag(
        Constraint.whitespace, STRUCTURE, "whitespace in JSON: compact | spaced | flexible", "NAME", hidden=True
    )

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


ARMS = (
    "DRAFTER[@LENGTH][/RULE][.plain][.predicted][~TEMP], hf, hf-assisted, hf-assisted-tuned[@LENGTH], "
    "hf-lookup[@LENGTH], llama, llama-lookup[@LENGTH]"
)


@dataclass(frozen=True)
class BenchOptions:
    """The arms, the repeats and the output of a benchmark."""

    arms: str | None = flag(None, MEASURING, f"arms to compare, separated by commas: {ARMS}", "ARMS")
    reference: str | None = flag(
        None, MEASURING, "arm that speed-ups refer to; default: the arm `none`, else the first", "ARM"
    )
    batch_sizes: str = batch_sizes_flag()
    at_once: int | None = flag(
        None,
        MEASURING,
        "submit this many prompts at once; the batch is refilled as prompts finish",
        "N",
    )
    repeats: int = repeats_flag()
    raw: bool = raw_flag()
    out_folder: Path | None = runs_flag()
    report: bool = report_flag()


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


def _default(where: str, item: Any, option: Any) -> str | list[str]:
    """The value in the form of its flag; a list is several flags, or one value separated by commas."""
    multiple = getattr(option, "multiple", False)
    if isinstance(item, list):
        parts = [_word(where, part) for part in item]
        return parts if multiple else ",".join(parts)
    word = json.dumps(item) if isinstance(item, dict) and option.metavar == "JSON" else _word(where, item)
    return [word] if multiple else word


def _word(where: str, item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    if isinstance(item, str | int | float):
        return str(item)
    raise UsageError(f"{where}={item!r}; allowed: a string, a number, true or false, or a list of these")
