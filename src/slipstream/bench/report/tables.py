"""The tables of a report: speeds and parity, families, failures, and where the time went."""

from __future__ import annotations

from slipstream.bench.records import VerdictName
from slipstream.bench.report.headline import num_prompts, over_hugging_face
from slipstream.bench.report.report_data import Records, acceptance, efficiency
from slipstream.bench.result_tables import Row, Table, cell, time_shares
from slipstream.bench.summary import PARTS, ArmSummary
from slipstream.checks import counted

GROUPS = ("prompts", "groups of prompts that are decoded together")
VERDICTS = ("reference", "identical", "tie", "different", "not compared")


def overall(data: Records, batch: int) -> Table:
    """Speeds of all arms, and the texts they were reached with."""
    measures = ["acceptance rate", "alpha", "tokens per forward"]
    over_hf = over_hugging_face(data)
    hf = ["over Hugging Face"] if over_hf else []
    columns = ["arm", "n", "tokens per second", "speed-up", "over", *hf, "texts", *measures]
    rows: list[Row] = [
        [
            data.label(arm.arm),
            str(0 if arm.speed is None else arm.speed.groups),
            *_speeds(data, arm),
            *(cell(over_hf.get((arm.arm, batch)), unit="x") for _ in hf),
            # "reference" outputs are those that the others are compared with
            verdict_words(arm),
            *_acceptance(data, arm),
        ]
        for arm in data.by_batch[batch]
    ]
    title = (
        f"Batch size {batch}, {counted(num_prompts(data, batch), 'prompt')}: speed, and the texts it was reached with; "
        f"n is the number of {GROUPS[batch > 1]}"
    )
    bases = {data.label(reference) for reference in data.references.values()}
    if len(bases) > 1:
        return Table(title, columns, rows)
    return Table(f"{title}; speed-ups are over {bases.pop()}", columns, rows).without("over")


def verdict_words(arm: ArmSummary) -> str:
    """Counts of an arm's texts by verdict, such as "5 identical, 1 tie"."""
    return ", ".join(f"{arm.verdicts[name]} {name}" for name in VERDICTS if arm.verdicts[name]) or "-"


def _speeds(data: Records, arm: ArmSummary) -> Row:
    if arm.speed is None:
        return ["failed", "-", "-"]
    speed_up = arm.speed.speed_up
    over = data.label(data.references[arm.arm]) if speed_up is not None else "-"
    return [cell(arm.speed.tokens_per_second, ".1f"), cell(speed_up, unit="x"), over]


def _acceptance(data: Records, arm: ArmSummary) -> Row:
    if arm.stats is None or not arm.stats.num_draft_tokens:
        return ["-", "-", efficiency(arm)]
    alpha = arm.stats.alpha
    rate = cell(acceptance(data.runs_of(arm.arm, arm.batch)))
    return [rate, "-" if alpha is None else f"{alpha:.2f}", efficiency(arm)]


def families(data: Records, batch: int) -> Table:
    """Speed-ups and parity by family: a line per family, so that it fits."""
    names = dict.fromkeys(run.family for run in data.runs if run.batch == batch)
    arms = data.by_batch[batch]
    rows = [[family, *(_family(data, arm, family) for arm in arms)] for family in names]
    title = (
        f"Batch size {batch}: speed-up (geometric mean over n {GROUPS[batch > 1]}); how many of the texts compared are "
        "plain decoding's own"
    )
    return Table(title, ["family", *(data.label(arm.arm) for arm in arms)], rows)


def _family(data: Records, arm: ArmSummary, family: str) -> str:
    if family not in arm.families:
        return "failed"
    texts: dict[tuple[str, ...], list[VerdictName]] = {}
    for run in data.runs_of(arm.arm, arm.batch):
        for row, verdict in enumerate(run.verdicts if run.family == family else ()):
            texts.setdefault((*run.prompts, str(row)), []).append(verdict)
    compared = [verdicts for verdicts in texts.values() if "not compared" not in verdicts]
    same = sum(set(verdicts) <= {"identical", "reference"} for verdicts in compared)
    parity = f"{same} of {len(compared)}" if compared else "not compared"
    speed = arm.families[family]
    return f"{cell(speed.speed_up, unit='x')}, n = {speed.groups}; {parity}"


def failures(data: Records) -> Table:
    """Arms with failed runs."""
    columns = ["arm", "batch", "failed runs", "first error"]
    rows = [
        [data.label(arm.arm), str(arm.batch), str(arm.failed), arm.error or ""] for arm in data.summaries if arm.failed
    ]
    return Table("runs that failed; their arms have no overall speed", columns, rows, words=["first error"])


def times(data: Records) -> Table:
    """Shares of the measured time."""
    title = (
        "shares of the measured seconds; overhead is all that no other part covers. Last column: the share of a "
        "round's time that is neither drafting nor verifying nor accepting"
    )
    rows: list[Row] = [
        [data.label(arm.arm), str(arm.batch), *shares]
        for arm in data.summaries
        if (shares := time_shares(arm)) is not None
    ]
    return Table(title, ["arm", "batch", *PARTS, "overhead", "overhead of a round"], rows)
