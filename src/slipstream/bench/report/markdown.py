"""A folder of runs as Markdown for a README: a table per batch size, a column per arm, and the machine it ran on."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.bench.report.report_data import Records, efficiency, local_time, machine_words, models
from slipstream.bench.result_tables import Cell, Row, Table, cell, markdown_table
from slipstream.bench.summary import FEWEST_GROUPS, ArmSummary
from slipstream.checks import counted
from slipstream.text.round_view import percent

VERDICTS = ("identical", "tie", "different")


def markdown(data: Records) -> str:
    """Speed-ups per family and their geometric mean, parity, acceptance; then settings, machine and versions."""
    parts = [_title(data)]
    parts += [markdown_table(_table(arms, batch)) for batch, arms in data.by_batch.items()]
    return "\n\n".join([*parts, _settings(data), machine_words(data.header)])


def _title(data: Records) -> str:
    arms = ", ".join(f"`{name}`" for name in dict.fromkeys(data.references.values()))
    return (
        f"Tokens per second relative to {arms} in the same run, prompt processing included; geometric means over "
        f"n prompts, in brackets 95 % intervals from {FEWEST_GROUPS} prompts on. Texts are compared with "
        "plain decoding of the same prompt."
    )


def _table(summaries: Sequence[ArmSummary], batch: int) -> Table:
    families = list(dict.fromkeys(family for arm in summaries for family in arm.families))
    drafted = [arm.stats if arm.stats is not None and arm.stats.num_draft_tokens else None for arm in summaries]
    rows: list[Row] = []
    if len(families) > 1:
        rows += [[family, *(_family(arm, family) for arm in summaries)] for family in families]
    speeds = [arm.speed for arm in summaries]
    rows += [
        ["geometric mean", *(Cell("failed") if speed is None else cell(speed.speed_up) for speed in speeds)],
        ["n", *("-" if speed is None else str(speed.groups) for speed in speeds)],
        ["tokens per second", *("failed" if s is None else f"{s.tokens_per_second.value:.1f}" for s in speeds)],
        ["texts identical / tie / different", *(_texts(arm) for arm in summaries)],
        ["acceptance rate", *("-" if stats is None else percent(stats.acceptance_rate) for stats in drafted)],
        ["tokens per forward", *(efficiency(arm) for arm in summaries)],
    ]
    return Table("", [f"batch size {batch}", *(f"`{arm.arm}`" for arm in summaries)], rows)


def _family(arm: ArmSummary, family: str) -> str:
    if family not in arm.families:
        return "failed"
    speed = arm.families[family]
    return f"{cell(speed.speed_up).text} (n = {speed.groups})"


def _texts(arm: ArmSummary) -> str:
    """Counts of verdicts; the reference and outputs that are not compared are named in words."""
    if any(arm.verdicts[name] for name in VERDICTS):
        text = " / ".join(str(arm.verdicts[name]) for name in VERDICTS)
    else:
        text = "the reference" if arm.verdicts["reference"] else ""
    if arm.verdicts["not compared"]:
        text += f"{', ' if text else ''}{arm.verdicts['not compared']} not compared"
    return (text or "none") + (" (lossy)" if arm.lossy else "")


def _settings(data: Records) -> str:
    settings, config = data.header.settings, data.header.settings.get("config", {})
    params = settings.get("params", {})
    prompts = len({prompt for run in data.runs for prompt in run.prompts})
    repeats = len({run.repeat for run in data.runs})
    temperature = params.get("temperature")
    sampling = "greedy" if temperature == 0 else f"temperature {temperature}, seed {params.get('seed')}"
    return (
        f"{models(data)}, dtype {config.get('dtype')}, {sampling}, up to {params.get('max_tokens')} "
        f"tokens, {counted(prompts, 'prompt')}, {counted(repeats, 'repeat')}, begun {local_time(data.header.started)}."
    )
