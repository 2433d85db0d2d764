"""The first line of a report: how fast the best arm is, and whether its texts are the target's own."""

from __future__ import annotations

from slipstream.bench.arms import HF, PLAIN, parse_arm
from slipstream.bench.report.report_data import Data, against
from slipstream.bench.summary import ArmSummary


def headline(data: Data) -> str:
    """As "4.1x Hugging Face, 42 of 42 texts identical": the fastest lossless arm at the smallest batch size.

    Speed is relative to Hugging Face's `generate` where that was run, else to the report's own reference.
    """
    smallest = min(one.batch for one in data.summaries)
    compared = against(data, HF).summaries if HF in data.references else data.summaries
    able = [one for one in compared if one.batch == smallest and one.lossless and _ratio(one) is not None]
    able = [one for one in able if not one.verdicts["different"]]
    best = max(able, key=lambda one: _ratio(one) or 0.0, default=None)
    if best is None:
        return "No lossless arm was measured to the end"
    if parse_arm(best.arm).drafter == PLAIN and HF not in data.references:
        return f"Plain decoding is fastest, {_texts(best)}"
    base = data.label(HF if HF in data.references else data.references[best.arm])
    base = "plain decoding" if base == "plain" else base
    where = f" in batches of {smallest}" if smallest > 1 else ""
    return f"{_ratio(best):.1f}x {base}{where}, {_texts(best)}"


def _ratio(one: ArmSummary) -> float | None:
    return None if one.speed is None or one.speed.speed_up is None else one.speed.speed_up.value


def _texts(one: ArmSummary) -> str:
    same = one.verdicts["identical"] + one.verdicts["reference"]
    compared = same + one.verdicts["tie"] + one.verdicts["different"]
    if not compared:
        return "texts sampled and not compared"
    ties = f", {one.verdicts['tie']} within rounding" if one.verdicts["tie"] else ""
    return f"{same} of {compared} texts identical{ties}"
