"""`slipstream report`: the HTML page and the plots of a folder written by `bench` or `sweep`, or a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.apps.cli.application import command, quiet_libraries
from slipstream.apps.cli.consoles import out
from slipstream.apps.cli.flags import check_folder
from slipstream.errors import UsageError

if TYPE_CHECKING:
    from slipstream.bench.records import Header
    from slipstream.tokenization.tokenizer import Tokenizer


@command(
    "report",
    "slipstream report runs/today",
    "slipstream report runs/today --markdown",
    "slipstream report runs/today --markdown --reference hf",
)
def report_command(
    folder: Annotated[Path, typer.Argument(help="a folder with runs.jsonl", metavar="FOLDER")],
    ids: Annotated[
        bool, typer.Option("--ids", help="show samples as token ids; the target's tokenizer is not read")
    ] = False,
    table: Annotated[
        bool, typer.Option("--markdown", help="print a table in Markdown instead; nothing is written")
    ] = False,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="ARM", help="with --markdown: the arm that speed-ups refer to, e.g. hf"),
    ] = None,
) -> None:
    """Write an HTML page about a benchmark, or print its table.

    The page is report.html in the folder, next to plots/. No weights are loaded; the benchmark may still be running.
    """
    if table and ids:
        raise UsageError("--ids with --markdown, which shows no samples; allowed: one of the two")
    if reference is not None and not table:
        raise UsageError(f"--reference {reference} without --markdown; allowed: together with it")
    if table:
        from slipstream.bench.report.markdown import markdown
        from slipstream.bench.report.report_data import against, load

        data = load(folder)
        out.print(markdown(data if reference is None else against(data, reference)), soft_wrap=True)
        return
    if folder.is_dir():
        check_folder("folder")(folder)
    from slipstream.bench.records import read_records
    from slipstream.bench.report import write_report

    header, _ = read_records(folder)
    tokenizer = None if ids else target_tokenizer(header)
    out.print(str(write_report(folder, tokenizer)), soft_wrap=True)


def target_tokenizer(header: Header) -> Tokenizer | None:
    """The tokenizer of the target that a folder's header names; no weights are loaded."""
    quiet_libraries()
    from slipstream.models.weights.tokenizer_loading import inspect_vocabulary

    return inspect_vocabulary(str(header.settings.get("target"))).tokenizer
