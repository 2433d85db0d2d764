"""The sentences of a report: its headline, and the best of all arms that were measured.

Every number is formatted as in the table of all prompts, so that a reader finds it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.bench.arms import HF, PLAIN, parse_arm
from slipstream.bench.report.report_data import Records, against
from slipstream.bench.result_tables import cell
from slipstream.bench.summary import ArmSummary, Estimate
from slipstream.checks import counted

FEW_PROMPTS = 10  # fewer say little about other prompts, and percentile intervals over so few are too narrow


@dataclass(frozen=True)
class Advice:
    """The arm to use at a batch size."""

    sentence: str
    flags: str  # options that select it; empty if none are needed


def headline(data: Records) -> str:
    """A line such as "auto: 2.63x plain decoding (1.50 to 4.50), 9.70x Hugging Face (7.10 to 12.00), 12 prompts".

    The arm is the fastest lossless one at the smallest batch size.
    """
    batch = min(data.by_batch)
    best = _fastest(_usable(data, batch))
    if best is None:
        return "No lossless arm was measured to the end"
    ratios = [] if best.arm == data.references[best.arm] else [_times(data, best, data.references[best.arm])]
    if (over_hf := over_hugging_face(data).get((best.arm, batch))) is not None:
        ratios.append(f"{_number(over_hf)} Hugging Face{_interval(over_hf)}")
    where = f", batches of {batch}" if batch > 1 else ""
    count = num_prompts(data, batch)
    measured = f"{where}, {counted(count, 'prompt')}{': too few for a claim' if count < FEW_PROMPTS else ''}"
    if not ratios:
        return f"No drafter was faster than {_name(data, best.arm)}{measured}"
    return f"{_name(data, best.arm)}: {', '.join(ratios)}{measured}"


def text_verdicts(data: Records) -> str:
    """The verdicts on the outputs of the headline's arm, or of all others if plain decoding was the fastest.

    For example "3 of 3 texts are identical to plain decoding's".
    """
    usable = _usable(data, min(data.by_batch))
    best = _fastest(usable)
    if best is None:
        return ""
    is_reference = best.arm == data.references[best.arm]
    arms = [arm for arm in usable if arm is not best] if is_reference else [best]
    count = {verdict: sum(arm.verdicts[verdict] for arm in arms) for verdict in ("identical", "tie", "different")}
    same, compared = count["identical"], sum(count.values())
    if not compared:
        return "" if is_reference else "Its texts were sampled and are not compared."
    ties = f", {count['tie']} part within rounding" if count["tie"] else ""
    return f"{same} of {compared} texts are identical to plain decoding's{ties}."


def advice(data: Records) -> list[Advice]:
    """The arm to use at each batch size and temperature."""
    kinds = dict.fromkeys((arm.batch, data.references[arm.arm]) for arm in data.summaries)
    choices = (
        _advice(data, [a for a in _usable(data, batch) if data.references[a.arm] == base]) for batch, base in kinds
    )
    return [choice for choice in choices if choice is not None]


def over_hugging_face(data: Records) -> dict[tuple[str, int], Estimate]:
    """Speed-ups over Hugging Face's `generate` by arm and batch size; empty if it was not run or is the reference."""
    if HF not in data.references or set(data.references.values()) == {HF}:
        return {}
    temperature = parse_arm(HF).temperature
    return {
        (arm.arm, arm.batch): arm.speed_up
        for arm in against(data, HF).summaries
        if arm.speed_up is not None and parse_arm(arm.arm).temperature == temperature
    }


def num_prompts(data: Records, batch: int) -> int:
    """Number of different prompts that were run at a batch size."""
    return len({prompt for run in data.runs if run.batch == batch for prompt in run.prompts})


def _advice(data: Records, arms: Sequence[ArmSummary]) -> Advice | None:
    best = _fastest(arms)
    if best is None or best.speed is None or len(arms) < 2:
        return None
    where = f"Batch size {best.batch}"
    if (temperature := parse_arm(best.arm).temperature) is not None:
        where += ", greedy" if temperature == 0 else f", temperature {temperature:g}"
    base = data.references[best.arm]
    speed = f"{cell(best.speed.tokens_per_second, '.1f').text} tokens per second"
    if best.arm == base:
        text = f"{where}: do not speculate; {_name(data, best.arm)} is the fastest, {speed}"
    else:
        ratio = best.speed_up
        is_clear = ratio is not None and ratio.is_above_one
        verb = "use" if is_clear else "measure more prompts; the fastest so far is"
        text = f"{where}: {verb} {_name(data, best.arm)}, {_times(data, best, base)}, {speed}"
        if not is_clear:
            text += "; the measurement cannot distinguish it from " + _name(data, base)
    return Advice(f"{text}{_next_best(data, best, arms)}{_faster_baselines(data, best)}.", flags(best.arm))


def _next_best(data: Records, best: ArmSummary, arms: Sequence[ArmSummary]) -> str:
    """Comparison of the best arm with the next one, prompt by prompt, as the end of a sentence."""
    second = _fastest([arm for arm in arms if arm is not best and arm.arm != data.references[best.arm]])
    if second is None:
        return ""
    compared = against(data, second.arm).summaries
    ratio = next((arm.speed_up for arm in compared if (arm.arm, arm.batch) == (best.arm, best.batch)), None)
    if ratio is None:
        return ""
    remark = "" if ratio.is_above_one else ", so the two may be equally fast"
    return f"; the next is {_name(data, second.arm)}, {cell(second.speed_up, unit='x').text}{remark}"


def _faster_baselines(data: Records, best: ArmSummary) -> str:
    """Arms of other projects that beat ours."""
    best_ratio = best.speed_up
    others = [
        arm
        for arm in data.by_batch[best.batch]
        if parse_arm(arm.arm).baseline and data.references[arm.arm] == data.references[best.arm]
    ]
    faster = [arm for arm in others if best_ratio and (ratio := arm.speed_up) and ratio.value > best_ratio.value]
    return "".join(f"; {_name(data, arm.arm)} was faster still, {cell(arm.speed_up, unit='x')}" for arm in faster)


def flags(name: str) -> str:
    """The options with which `generate`, `serve` and other commands decode like an arm."""
    arm = parse_arm(name)
    options = [
        ("--drafter", arm.drafter),
        ("--num-draft-tokens", arm.num_draft_tokens),
        ("--acceptance", arm.acceptance),
        ("--fast", None if arm.fast is None else str(arm.fast).lower()),
        ("--temperature", None if arm.temperature is None else f"{arm.temperature:g}"),
    ]
    return " ".join(f"{option} {value}" for option, value in options if value is not None)


def _usable(data: Records, batch: int) -> list[ArmSummary]:
    """Our own arms that keep the target's output, did so, and were measured to the end."""
    return [
        arm
        for arm in data.by_batch[batch]
        if arm.lossless and not arm.verdicts["different"] and arm.speed_up is not None
    ]


def _fastest(arms: Sequence[ArmSummary]) -> ArmSummary | None:
    return max(arms, key=lambda arm: ratio.value if (ratio := arm.speed_up) else 0.0, default=None)


def _times(data: Records, arm: ArmSummary, base: str) -> str:
    ratio = arm.speed_up
    assert ratio is not None
    return f"{_number(ratio)} {_name(data, base)}{_interval(ratio)}"


def _number(ratio: Estimate) -> str:
    return cell(ratio, unit="x").text


def _interval(ratio: Estimate) -> str:
    entry = cell(ratio, unit="x")
    return f" ({entry.low} to {entry.high})" if entry.low else ", no interval"


def _name(data: Records, arm: str) -> str:
    parsed = parse_arm(arm)
    is_plain = parsed.drafter == PLAIN and parsed.fast is None and not parsed.temperature
    return "plain decoding" if is_plain and data.label(arm).startswith("plain") else data.label(arm)
