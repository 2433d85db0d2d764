"""How commands and their help look: options in sections, and a refused value repeated in the message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from slipstream.errors import SlipstreamError, UsageError

WIDTH = 100  # columns of help
SETTINGS = {"max_content_width": WIDTH, "help_option_names": ["-h", "--help"]}
COMMANDS = {
    "Generate text": ("generate", "chat", "serve", "batch"),
    "Check": ("demo", "compare", "verify", "models"),
    "Measure": ("bench", "sweep", "tune", "simulate", "report"),
}
MODULES = {"batch": "batch_requests"}  # of commands whose name another module has
NUMBERS = {"a valid integer": "a whole number", "a valid number": "a number"}


class Command(TyperCommand):
    """A command whose help has the sections that its options name (`rich_help_panel`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; a value that does not fit its option is repeated."""
        given = list(args)
        try:
            return list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            values = [] if error.param is None else _values(given, error.param.opts)
            if not values or error.param is None:
                raise
            allowed = error.message.removeprefix("Input should be ").partition(",")[0]
            name, value = max(error.param.opts, key=len), " ".join(values)
            raise UsageError(f"{name} {value!r}; allowed: {NUMBERS.get(allowed, allowed)}") from error

    def invoke(self, ctx: Any) -> Any:
        """Run; a reader that closes the output, as `head` does, is told in one line."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise SlipstreamError("standard output was closed before everything was written") from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections in the order in which their first options come."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            usual = "Arguments" if one.param_type_name == "argument" else "Options"
            record = one.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(one, "rich_help_panel", None) or usual, []).append(record)
        _write(formatter, sections)


class Group(TyperGroup):
    """The list of commands, in sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with the first sentences of their help."""
        known = {name for names in COMMANDS.values() for name in names}
        others = {"Commands": tuple(name for name in self.list_commands(ctx) if name not in known)}
        for title, names in (COMMANDS | others).items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            lines = [(name, one.get_short_help_str(WIDTH)) for name, one in found if one is not None]
            if lines:
                _write(formatter, {title: lines})


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, lines in sections.items():
        with formatter.section(title):
            formatter.write_dl(lines)


def _values(args: Sequence[str], names: Sequence[str]) -> list[str]:
    """What the command line gives an option: `--name value` or `--name=value`, each time it does."""
    found = []
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name in names and (equals or i + 1 < len(args)):
            found.append(value if equals else args[i + 1])
    return found
