"""`slipstream report`: the HTML page and the plots of a folder that `bench` or `sweep` has written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slipstream.bench.records import read_records
from slipstream.cli.common import app, out
from slipstream.report import write_report
from slipstream.text import Tokenizer
from slipstream.vocabulary import inspect_vocabulary


@app.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(help="a folder with runs.jsonl")],
    ids: Annotated[
        bool, typer.Option("--ids", help="show samples as token ids; the target's tokenizer is not read")
    ] = False,
) -> None:
    """Write report.html and plots/ into a folder of runs. No weights are loaded; runs may still be going on."""
    header, _ = read_records(folder)
    tokenizer: Tokenizer | None = None if ids else inspect_vocabulary(str(header.settings.get("target"))).tokenizer
    out.print(escape(str(write_report(folder, tokenizer))), soft_wrap=True)
