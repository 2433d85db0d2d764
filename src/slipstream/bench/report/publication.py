"""A folder of runs for a paper: tables in LaTeX, and all figures as CSV."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from slipstream.bench.report.report_data import Records, acceptance, local_time, machine_words, models
from slipstream.bench.report.tables import GROUPS, VERDICTS, overall, verdict_words
from slipstream.bench.result_tables import Cell, Row, Table, cell
from slipstream.bench.summary import FEWEST_GROUPS, ArmSummary, Estimate

ALL = "all"
SHORT = {"tokens per second": "Tokens/s", "acceptance rate": "Accepted", "tokens per forward": "Tokens/forward"}
SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def csv_text(data: Records) -> str:
    """A line per batch size, family of prompts (and all of them) and arm; what is unknown is empty."""
    lines = [_line(data, ALL, arm) for arm in data.summaries]
    for family in dict.fromkeys(run.family for run in data.runs):
        part = data.of_family(family)
        lines += [_line(part, family, arm) for arm in part.summaries]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(lines, key=lambda line: list(data.by_batch).index(line["batch_size"])))
    return buffer.getvalue()


def _line(data: Records, family: str, arm: ArmSummary) -> dict[str, Any]:
    speed, stats = arm.speed, arm.stats
    drafted = stats is not None and stats.num_draft_tokens > 0
    return {
        "batch_size": arm.batch,
        "family": family,
        "arm": arm.arm,
        "n": None if speed is None else speed.groups,
        "tokens": None if speed is None else speed.tokens,
        **_columns("tokens_per_second", None if speed is None else speed.tokens_per_second),
        **_columns("speed_up", arm.speed_up),
        "speed_up_over": data.references[arm.arm],
        **{name.replace(" ", "_"): arm.verdicts[name] for name in VERDICTS},
        **_columns("acceptance_rate", acceptance(data.runs_of(arm.arm, arm.batch)) if drafted else None),
        "alpha": stats.alpha if stats is not None and drafted else None,
        "tokens_per_forward": arm.block_efficiency,
        "lossless": arm.lossless if stats is not None else None,
        "failed_runs": arm.failed,
        "error": arm.error,
    }


def _columns(name: str, estimate: Estimate | None) -> dict[str, float | None]:
    values = (None, None, None) if estimate is None else (estimate.value, estimate.low, estimate.high)
    return dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))


def latex(data: Records, title: str = "", note: str = "") -> str:
    """Two tables per batch size, speeds and families, for the package booktabs, with captions and labels."""
    header = data.header
    about = f"{title or models(data)}. Measured {local_time(header.started)} on {header.machine.get('processor')}."
    intervals = f"In brackets: 95 % bootstrap intervals over prompts, from {FEWEST_GROUPS} prompts on."
    lines = [r"% needs \usepackage{booktabs}", f"% {machine_words(header)}", ""]
    for batch in data.by_batch:
        for name, table in (("speed", overall(data, batch).without("alpha")), ("families", _by_family(data, batch))):
            caption = " ".join(filter(None, (about, f"{table.title}.", intervals, note)))
            lines += [latex_table(table, caption, f"tab:{name}-batch-{batch}"), ""]
    return "\n".join(lines)


def _by_family(data: Records, batch: int) -> Table:
    """A line per family and arm, so that a column fits."""
    rows: list[Row] = []
    for family in dict.fromkeys(run.family for run in data.runs if run.batch == batch):
        for arm in data.of_family(family).summaries:
            if arm.batch == batch:
                n = "0" if arm.speed is None else str(arm.speed.groups)
                speed_up = "failed" if arm.speed is None else cell(arm.speed_up, unit="x")
                rows.append([family, data.label(arm.arm), n, speed_up, verdict_words(arm)])
    title = f"Batch size {batch}: speed-ups (geometric means over n {GROUPS[batch > 1]})"
    return Table(title, ["family", "arm", "n", "speed-up", "texts"], rows, words=["arm"])


def latex_table(table: Table, caption: str, label: str) -> str:
    """A table in LaTeX; names are escaped."""
    rows = [" & ".join(map(_latex_cell, row)) for row in table.cells]
    names = [SHORT.get(name, name[:1].upper() + name[1:]) for name in table.columns]
    head = " & ".join("$n$" if name == "N" else _escaped(name) for name in names)
    columns = "l" + "".join("l" if name in (*table.words, "texts") else "r" for name in table.columns[1:])
    lines = [
        r"\begin{table}",
        r"  \centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"  \caption{{{_escaped(caption)}}}",
        rf"  \label{{{label}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        rf"    {head} \\",
        r"    \midrule",
        *(rf"    {row} \\" for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines)


def _latex_cell(entry: Cell) -> str:
    text = re.sub(r"\b(\d+\.\d+)x", r"\1$\\times$", _escaped(entry.text))
    interval = rf" [{entry.low}, {entry.high}]" if entry.low != entry.high else ""
    return (text if text != "-" else "--") + interval


def _escaped(text: str) -> str:
    return "".join(SPECIAL.get(character, character) for character in " ".join(text.split()))
