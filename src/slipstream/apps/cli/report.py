"""`slipstream report`: the page and the plots of a folder written by `bench` or `sweep`, or tables for a paper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.apps.cli.application import command, write_text
from slipstream.apps.cli.consoles import out
from slipstream.apps.cli.flags import STANDARD, check_file, check_folder
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet

if TYPE_CHECKING:
    from slipstream.bench.records import Header
    from slipstream.tokenization.tokenizer import Tokenizer


def _file(name: str, text: str) -> Any:
    """An option of a file that is written."""
    return typer.Option(name, help=f"write {text}; - is standard output", metavar="FILE", callback=check_file(name))


@command(
    "report",
    "slipstream report runs/today",
    "slipstream report runs/today --markdown --reference hf",
    "slipstream report runs/today --csv runs.csv --latex tables.tex --bibtex methods.bib",
)
def report_command(
    folder: Annotated[Path, typer.Argument(help="a folder with runs.jsonl", metavar="FOLDER")],
    ids: Annotated[
        bool, typer.Option("--ids", help="show samples as token ids; the target's tokenizer is not read")
    ] = False,
    table: Annotated[
        bool, typer.Option("--markdown", help="print a table in Markdown instead; nothing is written")
    ] = False,
    csv_file: Annotated[Path | None, _file("--csv", "all figures as CSV")] = None,
    latex_file: Annotated[Path | None, _file("--latex", "the tables in LaTeX, for the package booktabs")] = None,
    bibtex_file: Annotated[Path | None, _file("--bibtex", "the papers of the methods used, as BibTeX")] = None,
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="title of the page and of LaTeX tables")] = "",
    note: Annotated[str, typer.Option("--note", metavar="TEXT", help="a remark on the page and in LaTeX tables")] = "",
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="ARM", help="the arm that speed-ups refer to in a table, e.g. hf"),
    ] = None,
) -> None:
    """Write an HTML page about a benchmark, or its tables.

    The page is report.html in the folder, next to plots/. With --markdown, --csv, --latex or --bibtex only these are
    written. No weights are loaded; the benchmark may still be running.
    """
    files = {"csv": csv_file, "latex": latex_file, "bibtex": bibtex_file}
    has_tables = table or any(files.values())
    if has_tables and ids:
        named = "--markdown" if table else next(f"--{name}" for name, file in files.items() if file)
        raise UsageError(f"--ids with {named}, which shows no samples; allowed: for the page alone")
    if reference is not None and not (table or csv_file or latex_file):
        raise UsageError(f"--reference {reference} alone; allowed: with --markdown, --csv or --latex")
    if (title or note) and has_tables and not latex_file:
        raise UsageError(f"{'--title' if title else '--note'} without a page; allowed: for the page, or with --latex")
    if table + list(files.values()).count(STANDARD) > 1:
        raise UsageError("standard output is named twice; allowed: - for one file, and not with --markdown")
    if has_tables:
        from slipstream.bench.report.bibliography import bibtex
        from slipstream.bench.report.markdown import markdown
        from slipstream.bench.report.publication import csv_text, latex
        from slipstream.bench.report.report_data import against, load

        data = load(folder)
        data = data if reference is None else against(data, reference)
        if table:
            out.print(markdown(data), soft_wrap=True)
        texts = {"csv": csv_text, "latex": lambda data: latex(data, title, note), "bibtex": bibtex}
        for name, file in files.items():
            if file is not None:
                write_text(f"--{name}", file, texts[name](data))
        return
    if folder.is_dir():
        check_folder("folder")(folder)
    from slipstream.bench.records import read_records
    from slipstream.bench.report import write_report

    header, _ = read_records(folder)
    tokenizer = None if ids else target_tokenizer(header)
    out.print(str(write_report(folder, tokenizer, title, note)), soft_wrap=True)


def target_tokenizer(header: Header) -> Tokenizer | None:
    """The tokenizer of the target that a folder's header names; no weights are loaded."""
    quiet()
    from slipstream.models.weights.tokenizer_loading import inspect_vocabulary

    return inspect_vocabulary(str(header.settings.get("target"))).tokenizer
