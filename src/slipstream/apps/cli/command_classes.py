"""Typer's commands with help that fits the terminal, and checks that Typer lacks."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from slipstream.apps.cli.consoles import out
from slipstream.errors import SlipstreamError, UsageError, did_you_mean

WIDTH = 100  # columns of help, at most
MAX_NAME_COLUMNS = 30  # of an option and its value; with more, its help begins on the next line
NARROW, MAX_NARROW_NAME_COLUMNS = 76, 22  # the same on terminals with fewer columns than NARROW
COMMANDS = {
    "Generate text": ("generate", "chat", "serve", "launch", "batch"),
    "Check": ("demo", "compare", "verify", "models", "doctor"),
    "Measure": ("bench", "sweep", "tune", "simulate", "report"),
    "Train": ("train",),
}
# sections in the order of the help; others come before the last three
FIRST = (
    "Arguments",
    "Models",
    "Prompts",
    "Server",
    "Training",
    "Measuring",
    "Sampling",
    "Structured output",
    "Decoder",
)
LAST = ("Output", "Options", "Examples")
OTHERS = {  # commands of Ollama and others, and what to write instead
    "run": "`slipstream chat --model {}`",
    **dict.fromkeys(("pull", "download"), "`slipstream models pull {}`"),
    **dict.fromkeys(("rm", "remove", "delete"), "`slipstream models rm {}`"),
    **dict.fromkeys(("list", "ls", "show"), "`slipstream models`"),
    "ps": "`slipstream models`, or GET /api/ps of a running server",
}
PREFIX = "SLIPSTREAM_"  # of variables of the environment
VARIABLES = {"MODELS", "KERNELS", "ISA", "MEMORY", "DEBUG", "API_KEY"}  # those that are no flags
NO_VARIABLES = {"DEBUG", "HELP_ALL"}  # flags without one; SLIPSTREAM_DEBUG checks caches
KINDS = {"a valid integer": "a whole number", "a valid number": "a number", "a valid boolean": "true or false"}
BOUNDS = {r"greater than or equal to (\S+)": r"\1 or more", r"less than or equal to (\S+)": r"\1 or less"}
RANGES = {r"\bx>=(\d+)": r"\1 or more", r"\b(\d+)<=x<=(\d+)": r"\1 to \2"}  # as typer writes them in help


class _Checked:
    """The common part of `Command` and `Group`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, but refuse empty values, repeat wrong ones, and suggest the option that an unknown one may mean."""
        words = list(args)  # parsing empties `args`
        for option in self.get_params(ctx):  # type: ignore[attr-defined]
            if option.param_type_name == "option" and _needs_text(option) and "" in _values(words, option.opts):
                flag = max(option.opts, key=len)
                raise UsageError(f"{flag} ''; allowed: {flag} {option.metavar or 'VALUE'}")
        names = [name for option in ctx.command.params for name in option.opts if name.startswith("--")]
        for word in words:  # pages and editors turn two hyphens into a dash
            if word[:1] in ("–", "—") and (name := f"--{word[1:].partition('=')[0]}") in names:  # noqa: RUF001
                raise UsageError(f"no such option: {word}; did you mean {name!r}?")
        try:
            return list(super().parse_args(ctx, args))  # type: ignore[misc]
        except typer.BadParameter as error:  # whose own message may lack the value
            if error.param is None:
                raise
            values = _values(words, error.param.opts)
            last = values if getattr(error.param, "multiple", False) else values[-1:]  # the last counts
            value = " ".join(last) if last else _elsewhere(ctx, error.param)
            if value is None:
                raise
            flag = max(error.param.opts, key=len)
            raise UsageError(f"{flag} {value!r}; allowed: {why_refused(error)}") from error
        except TyperException as error:
            match = re.match(r"No such option:? '?(-[^\s']*)", error.format_message())
            if match is None:
                raise
            listing = f"; `{ctx.command_path} {'--help-all' if '--help-all' in names else '--help'}` lists them"
            raise UsageError(f"no such option: {match[1]}{did_you_mean(match[1], *names) or listing}") from error

    def invoke(self, ctx: Any) -> Any:
        """Run; if the reader closes the output, as `head` does, or Ctrl-C ends the command, one line says so."""
        out.stderr = ctx.params.get("json_file") == Path("-")  # standard output is then for the JSON alone
        try:
            return super().invoke(ctx)  # type: ignore[misc]
        except KeyboardInterrupt:
            raise typer.Abort from None  # typer would exit without a word
        except BrokenPipeError as error:
            raise SlipstreamError("standard output was closed before all output was written") from error
        finally:
            out.stderr = False

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """The names of the help option, always in the same order."""
        names = super().get_help_option_names(ctx)  # type: ignore[misc]
        return [name for name in ctx.help_option_names if name in names]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples as they are, one per line."""
        if epilog := getattr(self, "epilog", None):
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in epilog.splitlines()))


class Command(_Checked, TyperCommand):
    """A command whose help has the sections that its options name (`rich_help_panel`)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        params: list[Any] = self.params
        for param in params:
            if param.param_type_name == "option":
                names = [name[2:].replace("-", "_").upper() for name in param.opts if name.startswith("--")]
                param.envvar = [f"{PREFIX}{name}" for name in names if name not in NO_VARIABLES]
                param.show_envvar = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, but refuse a file that is named twice, as one of the two would be overwritten."""
        rest = super().parse_args(ctx, args)
        names = dict[Path, str]()
        for param in self.get_params(ctx):
            value = ctx.params.get(param.name)
            if _is_path(param) and value is not None and Path(value) != Path("-"):
                name = max(param.opts, key=len) if param.param_type_name == "option" else _argument(param)
                if (other := names.setdefault(Path(value).absolute(), name)) != name:
                    raise UsageError(f"{str(value)!r} is {other} and {name}; allowed: two files")
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(_argument(param) for param in ctx.command.params if param.param_type_name == "argument")]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in sections, in the order of `FIRST` and `LAST`."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for option in self.get_params(ctx):
            default_title = "Arguments" if option.param_type_name == "argument" else "Options"
            record = option.get_help_record(ctx)
            if record is not None:
                name = _argument(option) if option.param_type_name == "argument" else record[0]
                text = record[1]
                for pattern, plain in RANGES.items():
                    text = re.sub(pattern, plain, text)
                title = getattr(option, "rich_help_panel", None) or default_title
                sections.setdefault(title, []).append((name, text))
        others = [title for title in sections if title not in (*FIRST, *LAST)]
        _write(formatter, {title: sections[title] for title in (*FIRST, *others, *LAST) if title in sections})


class Group(_Checked, TyperGroup):
    """The list of commands, in sections."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; a misspelled variable of the environment is a `UsageError`."""
        if ctx.parent is None:
            if (value := os.environ.get(f"{PREFIX}DEBUG", "")) not in ("", "0", "1"):
                raise UsageError(f"{PREFIX}DEBUG={value!r}; allowed: '1' or '0'")
            _check_environment(_variables(self) | {f"{PREFIX}{name}" for name in VARIABLES})
        return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; an unknown one is a `UsageError` that lists all."""
        try:
            return super().resolve_command(ctx, args)
        except TyperException:
            raise unknown_command(self, ctx, *args) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with the first sentences of their help."""
        grouped = {name for names in COMMANDS.values() for name in names}
        others = {"Commands": tuple(name for name in self.list_commands(ctx) if name not in grouped)}
        for title, names in (COMMANDS | others).items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            lines = [
                (name, command.get_short_help_str(WIDTH))
                for name, command in commands
                if command is not None and not command.hidden
            ]
            if lines:
                _write(formatter, {title: lines})

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the group's own options."""
        self.format_commands(ctx, formatter)
        records = [record for option in self.get_params(ctx) if (record := option.get_help_record(ctx)) is not None]
        _write(formatter, {"Options": records})


def _check_environment(variables: set[str]) -> None:
    """Refuse a variable that seems to be a misspelled one of these.

    Names like none of them may be for other programs, such as SLIPSTREAM_SERVICE_HOST of Kubernetes.
    """
    names = [variable.removeprefix(PREFIX) for variable in variables]  # the prefix would make all names alike
    for variable in sorted(os.environ.keys() - variables):
        meant = get_close_matches(variable.removeprefix(PREFIX), names, 1, 0.8) if variable.startswith(PREFIX) else []
        if meant:
            raise UsageError(f"environment variable {variable} is unknown; did you mean {PREFIX}{meant[0]}?")


def _variables(group: Any) -> set[str]:
    """The names of the variables that hold flags of a group's commands."""
    names = set[str]()
    for command in group.commands.values():
        names |= _variables(command) if isinstance(command, Group) else set()
        names.update(*(param.envvar or () for param in command.params))
    return names


def why_refused(error: typer.BadParameter) -> str:
    """The values that an option allows, from the error about its value."""
    allowed = error.message.rpartition("; allowed: ")[2]
    if allowed.startswith("Input should be "):
        allowed = allowed.removeprefix("Input should be ").partition(",")[0]
    for pattern, plain in BOUNDS.items():
        allowed = re.sub(pattern, plain, allowed)
    return KINDS.get(allowed, allowed)


def _elsewhere(ctx: Any, param: Any) -> str | None:
    """The value that an option has from the environment or a file, if it has one."""
    if (value := param.resolve_envvar_value(ctx)) is not None:
        return str(value)
    return str(ctx.default_map[param.name]) if param.name in (ctx.default_map or {}) else None


def _needs_text(option: Any) -> bool:
    """True if an empty value is refused because it would mean no value or the current folder."""
    return _is_path(option) or (_kind(option) is not None and option.default == "" and option.metavar != "TEXT")


def _is_path(param: Any) -> bool:
    kind = _kind(param)
    return kind is not None and kind.annotation in (Path, Path | None)


def _kind(param: Any) -> Any:
    return getattr(param, "type_descriptor", None)  # the parser's own --help has none


def _argument(param: Any) -> str:
    """An argument's form in usage and help: [PROMPT]... if there may be none or several."""
    name = param.metavar or str(param.name).upper()
    return f"{name if param.required else f'[{name}]'}{'...' if param.nargs == -1 else ''}"


def unknown_command(group: Any, ctx: Any, name: str, *words: str) -> UsageError:
    """The error for an unknown command of a group. words: what follows it."""
    if (meant := OTHERS.get(name)) is not None:
        model, *prompt = [word for word in words if not word.startswith("-")] or ["MODEL"]
        if name == "run" and prompt:
            meant = f"`slipstream generate --model {{}} {shlex.quote(' '.join(prompt))}`"
        return UsageError(f"unknown command {name!r}; did you mean {meant.format(shlex.quote(model))}?")
    names = [command for command in group.list_commands(ctx) if not group.get_command(ctx, command).hidden]
    near = did_you_mean(name, *names)
    if ctx.parent is not None and group.invoke_without_command:
        names.append(f"or `{ctx.command_path}` alone")
    return UsageError(f"unknown command {name!r}; allowed: {', '.join(names)}{near}")


def definition_lines(lines: Iterable[tuple[str, str]], width: int, indent: int = 0) -> list[str]:
    """Names and their explanations in two columns, broken only between words; a long name has its own line."""
    lines = list(lines)
    columns = MAX_NAME_COLUMNS if width >= NARROW else MAX_NARROW_NAME_COLUMNS
    first = min(columns, max((len(name) for name, _ in lines), default=0)) + 2
    written: list[str] = []
    for name, text in lines:
        parts = wrapped(text, max(20, width - indent - first))
        if len(name) > first - 2:
            written.append(" " * indent + name)
            name = ""
        written += [f"{'':{indent}}{name if number == 0 else '':{first}}{part}" for number, part in enumerate(parts)]
    return [line.rstrip() for line in written]


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at blanks; a longer word only before [ or after a comma, if at all."""
    lines = [""]
    for word in text.split():
        pieces = re.split(r"(?<=\])(?=\[)|(?<=,)(?=.)", word) if len(word) > width else [word]
        for number, piece in enumerate(pieces):
            gap = " " if lines[-1] and number == 0 else ""
            if lines[-1] and len(lines[-1]) + len(gap) + len(piece) > width:
                lines.append(piece)
            else:
                lines[-1] += gap + piece
    return lines


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, lines in sections.items():
        with formatter.section(title):
            formatted = definition_lines(lines, formatter.width, formatter.current_indent)
            formatter.write("".join(f"{line}\n" for line in formatted))


def _values(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """All values of an option on the command line, from `--name value` and `--name=value`."""
    values = []
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name in names and (equals or i + 1 < len(args)):
            values.append(value if equals else args[i + 1])
    return values
