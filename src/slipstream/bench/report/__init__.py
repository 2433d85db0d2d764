"""A folder of runs as a report: one self-contained HTML page, and its plots as files for a paper.

write_report(Path("bench-1"), decoder.tokenizer)     # bench-1/report.html and bench-1/plots/*.pdf, *.png, *.svg
"""

from __future__ import annotations

from pathlib import Path

from slipstream.bench.report.html import render
from slipstream.bench.report.plots import charts, require_matplotlib, save
from slipstream.bench.report.report_data import load
from slipstream.checks import save_text
from slipstream.tokenization.tokenizer import Tokenizer

__all__ = ["REPORT", "require_matplotlib", "write_report"]

REPORT = "report.html"


def write_report(folder: Path, tokenizer: Tokenizer | None = None, title: str = "", note: str = "") -> Path:
    """Write the report and the plots into a folder of runs, and return the page.

    tokenizer: of the target, to show samples as text; without one their token ids are shown. Needs matplotlib (the
    extra "bench"). title, note: the author's own. UsageError for a folder that holds no runs or cannot be written.
    """
    require_matplotlib()
    data = load(folder)
    drawn = charts(data)
    save(drawn, folder / "plots")
    file = folder / REPORT
    save_text("the report", file, render(data, drawn, tokenizer, title, note))
    return file
