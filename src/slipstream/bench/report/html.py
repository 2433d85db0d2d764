"""The report as one page: speeds and parity, families, failures, plots, colored samples, settings, machine.

`report.html.jinja` is the page; this module makes the values that fill it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from slipstream import drafters
from slipstream.bench.arms import ASSISTED, HF, LLAMA, LLAMA_LOOKUP, LOOKUP, TUNED, label, parse_arm
from slipstream.bench.length_series import best_lengths
from slipstream.bench.records import Header
from slipstream.bench.report.bibliography import citations
from slipstream.bench.report.headline import advice, headline, text_verdicts
from slipstream.bench.report.plots import Chart, height_of, inline_svg
from slipstream.bench.report.report_data import Records, Sample, local_time, models, sample, sampled_texts
from slipstream.bench.report.tables import failures, families, overall, times
from slipstream.bench.summary import FEWEST_GROUPS, wrong_texts
from slipstream.checks import counted
from slipstream.config import DecoderConfig
from slipstream.sampling.params import SamplingParams
from slipstream.tokenization.tokenizer import Tokenizer

TEMPLATE = "report.html.jinja"
SAMPLES_PER_FAMILY = 2


def render(data: Records, charts: Sequence[Chart], tokenizer: Tokenizer | None, title: str = "", note: str = "") -> str:
    """The document. tokenizer: decodes the samples; without one their token ids are shown."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("slipstream.bench.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(TEMPLATE).render(
        title=title,
        note=note,
        models=models(data),
        headline=headline(data),
        opening=_opening(data),
        warnings=_warnings(data),
        verdicts=text_verdicts(data),
        advice=advice(data),
        lengths=best_lengths(data.summaries),
        overall=[overall(data, batch) for batch in data.by_batch],
        families=[families(data, batch) for batch in data.by_batch],
        failures=failures(data),
        charts=_chart_rows(charts),
        time=times(data),
        samples=_samples(data, tokenizer),
        arms=[(label(name), describe(name)) for name in data.header.settings.get("arms", [])],
        settings=settings_table(data.header),
        machine=[
            (NAMES.get(name, _spaced(name)), words(value))
            for name, value in (data.header.machine | data.header.versions).items()
        ],
        command=data.header.command,
        citations=citations(data),
    )


def _opening(data: Records) -> str:
    prompts = {prompt for run in data.runs for prompt in run.prompts}
    repeats = len({run.repeat for run in data.runs})
    machine = data.header.machine
    return (
        f"{counted(len(data.runs), 'measurement')} on {counted(len(prompts), 'prompt')}, {counted(repeats, 'repeat')}, "
        f"begun {local_time(data.header.started)}, on {machine.get('gpu') or machine.get('processor')}. In brackets: "
        f"95 % bootstrap intervals over prompts and repeats, from {FEWEST_GROUPS} prompts on. Times are medians "
        "and count prompt processing."
    )


def _warnings(data: Records) -> list[str]:
    lines = [
        f"{data.label(arm.arm)}, batch {arm.batch}: {arm.verdicts['different']} texts differ from plain decoding and "
        "are not ties."
        for arm in wrong_texts(data.summaries)
    ]
    lossy = {arm.arm for arm in data.summaries if arm.lossy}
    return lines + [f"{data.label(name)} is lossy: its output is not the target's own." for name in sorted(lossy)]


def _chart_rows(charts: Sequence[Chart]) -> list[list[tuple[str, str]]]:
    """Charts side by side, as markup with a caption; those of one kind have the same height."""
    rows = []
    for kind in ("rows", "lines"):
        alike = [chart for chart in charts if chart.kind == kind]
        height = max(map(height_of, alike), default=0.0)
        rows.append([(inline_svg(chart, height), chart.caption) for chart in alike])
    return [row for row in rows if row]


def _samples(data: Records, tokenizer: Tokenizer | None) -> dict[str, list[Sample]]:
    speeds = [(arm.speed.tokens_per_second.value if arm.speed else 0.0, arm.arm) for arm in data.summaries]
    fastest = list(dict.fromkeys(arm for _, arm in sorted(speeds, reverse=True)))
    return {
        family: [sample(run, row, tokenizer, data.label(run.arm), data.header.prompts) for run, row in texts]
        for family, texts in sampled_texts(data.runs, fastest, SAMPLES_PER_FAMILY).items()
        if texts
    }


Rows = list[tuple[str, str]]
BASELINES = {
    HF: "Hugging Face's own generate, the same model and precision, without drafts",
    ASSISTED: "Hugging Face's assisted generation with the draft model, at its defaults",
    TUNED: "Hugging Face's assisted generation with the draft model, a fixed number of draft tokens",
    LOOKUP: "Hugging Face's prompt lookup",
    LLAMA: "llama.cpp on the same file, without drafts",
    LLAMA_LOOKUP: "llama.cpp on the same file, with prompt lookup",
}
NAMES = {
    "threads": "threads of PyTorch",
    "memory_gib": "memory (GiB)",
    "gpu": "GPU",
    "slipstream": "Slipstream",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "python": "Python",
}


def settings_table(header: Header) -> Rows:
    """The settings of the run; options of the decoder and of sampling only if they differ from the defaults."""
    settings = header.settings
    params: Mapping[str, Any] = settings.get("params", {})
    families = Counter(str(prompt).rpartition("/")[0] for prompt in settings.get("prompts", {}))
    rows: Rows = [("target", words(settings.get("target"))), ("draft model", words(settings.get("draft")))]
    rows.append(("arms", "; ".join(label(name) for name in settings.get("arms", []))))
    rows.append(("speed-ups refer to", label(settings["reference"]) if "reference" in settings else "plain"))
    rows.append(("batch sizes", words(settings.get("batch_sizes"))))
    rows.append(("repeats", words(settings.get("repeats"))))
    rows.append(("prompts", "; ".join(f"{name} {count}" for name, count in families.items()) or "none recorded"))
    rows.append(("chat template", "used" if settings.get("chat", True) else "not used (--raw)"))
    temperature = params.get("temperature", 0)
    sampled = f"temperature {words(temperature)}, seed {words(params.get('seed'))}"
    rows.append(("sampling", "greedy" if temperature == 0 else sampled))
    rows.append(("longest answer", counted(int(params.get("max_tokens") or 0), "token")))
    shown = {"target", "draft", "arms", "reference", "batch_sizes", "repeats", "prompts", "chat", "config", "params"}
    rows += [(_spaced(name), words(value)) for name, value in settings.items() if name not in shown]
    rows += _changed(settings.get("config", {}), DecoderConfig, set())
    rows += _changed(params, SamplingParams, {"temperature", "seed", "max_tokens"})
    return [*rows, ("begun", local_time(header.started))]


def describe(name: str) -> str:
    """An arm in words."""
    arm = parse_arm(name)
    if arm.baseline is not None:
        text = BASELINES[arm.baseline]
    elif arm.drafter in (None, "auto"):
        text = "the drafter and the draft length are chosen from measured costs and acceptance, round by round"
    else:
        text = drafters.summary(str(arm.drafter))
    parts = [text]
    if isinstance(arm.num_draft_tokens, int):
        parts.append(f"{counted(arm.num_draft_tokens, 'token')} per draft")
    elif arm.num_draft_tokens is not None:
        parts.append("no trees" if arm.num_draft_tokens == "chain" else f"draft length {arm.num_draft_tokens}")
    if arm.acceptance is not None:
        parts.append(f"acceptance rule {arm.acceptance}")
    if arm.fast is False:
        parts.append("weights as loaded, not packed")
    if arm.predicted:
        parts.append("with the prompts' predictions")
    return "; ".join(parts)


def words(value: Any) -> str:
    """A recorded value as a person writes it."""
    if value is None or value in ("", [], {}, ()):
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return "; ".join(f"{_spaced(str(name))} {words(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(words, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _changed(values: Mapping[str, Any], cls: type[Any], shown: set[str]) -> Rows:
    """The fields that differ from the defaults of their dataclass; fields without a default are always shown."""
    defaults = {f.name: {} if f.default is MISSING else f.default for f in fields(cls)}  # only mappings have a factory
    return [
        (_spaced(name), words(value))
        for name, value in values.items()
        if name not in shown and (name not in defaults or words(value) != words(defaults[name]))
    ]


def _spaced(name: str) -> str:
    return name.replace("_", " ")
