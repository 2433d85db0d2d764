"""`slipstream help`: what `--help` shows, for those who ask like this."""

from __future__ import annotations

from typing import Annotated

import typer

from slipstream.apps.cli.application import command
from slipstream.apps.cli.command_classes import Group, unknown_command
from slipstream.errors import UsageError


@command("help", hidden=True)
def help_command(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="as in `slipstream help chat`")
    ] = None,
) -> None:
    """Explain a command; without one, list all."""
    shown = context.find_root()
    for word in words or ():
        group = shown.command
        if not isinstance(group, Group):
            raise UsageError(f"unexpected argument {word!r}; allowed: slipstream help [COMMAND]")
        subcommand = group.get_command(shown, word)
        if subcommand is None:
            raise unknown_command(group, shown, word)
        shown = subcommand.make_context(word, [], parent=shown, resilient_parsing=True)
    typer.echo(shown.get_help())
