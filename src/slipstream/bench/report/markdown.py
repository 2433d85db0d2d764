"""A folder of runs as Markdown for a README: a table per batch size, a column per arm, and what it was measured on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.bench.arms import counted, local_time
from slipstream.bench.records import Header
from slipstream.bench.report.report_data import Data, efficiency
from slipstream.bench.summary import ArmSummary, Estimate
from slipstream.text.round_view import percent

VERDICTS = ("identical", "tie", "different")


def markdown(data: Data) -> str:
    """Speed-ups per family and their geometric mean, parity, acceptance; then settings, machine and versions."""
    parts = [_title(data)]
    for batch in dict.fromkeys(one.batch for one in data.summaries):
        own = [one for one in data.summaries if one.batch == batch]
        parts.append("\n".join(_table(own, batch)))
    return "\n\n".join([*parts, _settings(data), _machine(data.header)])


def _title(data: Data) -> str:
    arms = ", ".join(f"`{name}`" for name in dict.fromkeys(data.references.values()))
    return (
        f"Tokens per second relative to {arms} in the same run, prompt processing included; geometric means over "
        "prompts, 95 % intervals in brackets. Texts are compared with plain decoding of the same prompt."
    )


def _table(summaries: Sequence[ArmSummary], batch: int) -> list[str]:
    families = list(dict.fromkeys(family for one in summaries for family in one.families))
    lines = [_row(f"batch size {batch}", [f"`{one.arm}`" for one in summaries])]
    lines.append("|---" * (len(summaries) + 1) + "|")
    if len(families) > 1:
        lines += [_row(family, [_family(one, family) for one in summaries]) for family in families]
    lines.append(_row("geometric mean", [_mean(one) for one in summaries]))
    lines.append(_row("tokens per second", [_speed(one) for one in summaries]))
    lines.append(_row("texts identical / tie / different", [_texts(one) for one in summaries]))
    drafted = [one.stats if one.stats is not None and one.stats.num_draft_tokens else None for one in summaries]
    lines.append(_row("acceptance rate", [percent(s.acceptance_rate) if s else "-" for s in drafted]))
    lines.append(_row("block efficiency", [efficiency(one) for one in summaries]))
    return lines


def _row(name: str, cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in (name, *cells)) + " |"


def _family(one: ArmSummary, family: str) -> str:
    return _times(one.families[family].speed_up) if family in one.families else "failed"


def _mean(one: ArmSummary) -> str:
    return "failed" if one.speed is None else _times(one.speed.speed_up, interval=True)


def _speed(one: ArmSummary) -> str:
    return "failed" if one.speed is None else f"{one.speed.tokens_per_second.value:.1f}"


def _times(ratio: Estimate | None, *, interval: bool = False) -> str:
    """A speed-up; a dash where the reference has no times."""
    if ratio is None:
        return "-"
    known = interval and ratio.low is not None and ratio.high is not None and ratio.low < ratio.high
    return f"{ratio.value:.2f}" + (f" ({ratio.low:.2f} to {ratio.high:.2f})" if known else "")


def _texts(one: ArmSummary) -> str:
    """Counts of verdicts; the reference text itself and texts that are not compared are said in words."""
    if any(one.verdicts[name] for name in VERDICTS):
        text = " / ".join(str(one.verdicts[name]) for name in VERDICTS)
    else:
        text = "the reference" if one.verdicts["reference"] else ""
    if one.verdicts["not compared"]:
        text += f"{', ' if text else ''}{one.verdicts['not compared']} not compared"
    return (text or "none") + (" (lossy)" if one.lossy else "")


def _settings(data: Data) -> str:
    settings, config = data.header.settings, data.header.settings.get("config", {})
    params = settings.get("params", {})
    draft = f" with {settings['draft']} as draft model" if settings.get("draft") else ""
    prompts = len({prompt for run in data.runs for prompt in run.prompts})
    repeats = len({run.repeat for run in data.runs})
    temperature = params.get("temperature")
    sampling = "greedy" if temperature == 0 else f"temperature {temperature}, seed {params.get('seed')}"
    return (
        f"{settings.get('target')}{draft}, dtype {config.get('dtype')}, {sampling}, up to {params.get('max_tokens')} "
        f"tokens, {counted(prompts, 'prompt')}, {counted(repeats, 'repeat')}, begun {local_time(data.header.started)}."
    )


def _machine(header: Header) -> str:
    machine, versions = header.machine, header.versions
    gpu = f"{machine['gpu']}, " if machine.get("gpu") else ""
    memory = _given(machine, "memory_gib", " GiB")
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{gpu}{machine.get('processor')}, {machine.get('cores')} cores{memory}; {libraries}."


def _given(values: dict[str, Any], name: str, unit: str) -> str:
    return f", {values[name]}{unit}" if values.get(name) is not None else ""
