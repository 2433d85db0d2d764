"""The report as one page: speeds beside parity, families, failures, plots, coloured samples, settings, machine."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from slipstream.bench.arm_labels import counted, local_time
from slipstream.bench.bootstrap import Estimate
from slipstream.bench.prediction.simulation import conclusions
from slipstream.bench.records import VerdictName
from slipstream.bench.report import page
from slipstream.bench.report import text_samples as samples
from slipstream.bench.report.charts import Chart
from slipstream.bench.report.headline import headline
from slipstream.bench.report.plots import height_of, inline_svg
from slipstream.bench.report.ratios import acceptance
from slipstream.bench.report.report_data import Data, efficiency
from slipstream.bench.summary import PARTS, ArmSummary, wrong_texts
from slipstream.bench.sweep_grid import best_of, series_of
from slipstream.text.detokenizer import Tokenizer

PER_FAMILY = 2
VERDICTS = ("reference", "identical", "tie", "different", "not compared")
PARITY = (
    "Texts are compared with plain decoding of the same prompt, each with the least favourable verdict of its repeats. "
    "A tie is a greedy text that parts where two tokens are within rounding of each other; sampled texts are compared "
    "where every token is the target's own draw."
)
TERMS = (
    "Acceptance rate: accepted of all drafted tokens. Acceptance per test (alpha): accepted of the tested "
    "tokens, which are the accepted ones and the one that each rejection stopped at. Tokens per round: output tokens "
    "per forward of the target, its own included."
)
SAME = "how many of the texts compared are plain decoding's own"


def render(data: Data, charts: Sequence[Chart], tokenizer: Tokenizer | None) -> str:
    """The document. tokenizer: makes text of the samples' token ids; without one the ids are shown."""
    target, draft = data.header.settings.get("target"), data.header.settings.get("draft")
    models = f"{target}" + (f" with {draft} as draft model" if draft else "")
    parts = [
        f"<h1>{escape(headline(data))}</h1>",
        page.paragraph(models, "lead"),
        page.paragraph(_opening(data), "soft"),
        *(page.paragraph(line, "bad") for line in _warnings(data)),
        page.section("Advice by draft length", *_advice(data)),
        page.section("All prompts", *_overall(data), page.paragraph(PARITY, "soft"), page.paragraph(TERMS, "soft")),
        page.section("By family", *_families(data)),
        page.section("Failures", _failures(data)),
        page.section("Plots", _plots(charts)),
        page.section("Where the time went", _time(data)),
        page.section("Predicted and observed", _predictions(data)),
        page.section("Simulated", *_simulations(data)),
        page.section("Texts", _samples(data, tokenizer)),
        page.section("Settings", page.settings_list(data.header.settings)),
        page.section("Versions and machine", page.settings_list(data.header.versions | data.header.machine)),
    ]
    return page.page(f"Slipstream: {models}", "".join(parts))


def estimate(value: Estimate | None, form: str = ".2f", unit: str = "") -> str:
    """A value and its interval as text; a dash where there is none."""
    if value is None:
        return "-"
    interval = "" if value.low is None or value.high is None else f" ({value.low:{form}} to {value.high:{form}})"
    return f"{value.value:{form}}{unit}{interval}"


def share(value: float | None) -> str:
    """A share as a percentage; a dash where there is none."""
    return "-" if value is None else f"{value:.1%}"


def _opening(data: Data) -> str:
    prompts = {prompt for run in data.runs for prompt in run.prompts}
    repeats = len({run.repeat for run in data.runs})
    machine = data.header.machine
    return (
        f"{counted(len(data.runs), 'measurement')} on {counted(len(prompts), 'prompt')}, {counted(repeats, 'repeat')}, "
        f"begun {local_time(data.header.started)}, on {machine.get('gpu') or machine.get('processor')}. In brackets: "
        "95 % bootstrap intervals over prompts and repeats. Times are medians and count prompt processing."
    )


def _warnings(data: Data) -> list[str]:
    lines = [
        f"{data.label(one.arm)}, batch {one.batch}: {one.verdicts['different']} texts differ from plain decoding and "
        "are no ties."
        for one in wrong_texts(data.summaries)
    ]
    lossy = {one.arm for one in data.summaries if one.stats is not None and not one.stats.lossless}
    return lines + [f"{data.label(arm)} is lossy: its text is not the target's own." for arm in sorted(lossy)]


def _advice(data: Data) -> list[str]:
    found = [best for one in series_of(data.summaries) if (best := best_of(one)) is not None]
    return [page.bullets([best.sentence for best in found])] if found else []


def _overall(data: Data) -> list[str]:
    measures = ["acceptance rate", "acceptance per test", "tokens per round"]
    head = ["arm", "tokens per second", "speed-up", "over", "texts", *measures]
    made = []
    for batch in dict.fromkeys(one.batch for one in data.summaries):
        rows = [
            [data.label(one.arm), *_speeds(data, one), _texts(one), *_acceptance(data, one)]
            for one in data.summaries
            if one.batch == batch
        ]
        made.append(page.table(f"batch size {batch}: speed, and the texts it was reached with", head, rows))
    return made


def _texts(one: ArmSummary) -> str:
    """How many texts came out how; "reference" are the texts that the others are compared with."""
    return ", ".join(f"{one.verdicts[name]} {name}" for name in VERDICTS if one.verdicts[name]) or "-"


def _speeds(data: Data, one: ArmSummary) -> list[str]:
    if one.speed is None:
        return ["failed", "-", "-"]
    speed = one.speed
    return [
        estimate(speed.tokens_per_second, ".1f"),
        estimate(speed.speed_up, ".2f", "x"),
        data.label(data.references[one.arm]) if speed.speed_up is not None else "-",
    ]


def _acceptance(data: Data, one: ArmSummary) -> list[str]:
    if one.stats is None or not one.stats.num_draft_tokens:
        return ["-", "-", efficiency(one)]
    alpha = one.stats.alpha
    rate = estimate(acceptance(data.runs_of(one.arm, one.batch)))
    return [rate, "-" if alpha is None else f"{alpha:.2f}", efficiency(one)]


def _families(data: Data) -> list[str]:
    """Speed-ups, with the parity of the same family's texts in every cell."""
    made = []
    for batch in dict.fromkeys(one.batch for one in data.summaries):
        own = [one for one in data.summaries if one.batch == batch]
        families = list(dict.fromkeys(run.family for run in data.runs if run.batch == batch))
        rows = [[data.label(one.arm), *(_family(data, one, family) for family in families)] for one in own]
        caption = f"batch size {batch}: speed-up (geometric mean over prompts); {SAME}"
        made.append(page.table(caption, ["arm", *families], rows))
    return made


def _family(data: Data, one: ArmSummary, family: str) -> str:
    if family not in one.families:
        return "failed"
    texts: dict[tuple[str, ...], list[VerdictName]] = {}
    for run in data.runs_of(one.arm, one.batch):
        for row, verdict in enumerate(run.verdicts if run.family == family else ()):
            texts.setdefault((*run.prompts, str(row)), []).append(verdict)
    compared = [found for found in texts.values() if "not compared" not in found]
    same = sum(set(found) <= {"identical", "reference"} for found in compared)
    parity = f"{same} of {len(compared)}" if compared else "not compared"
    return f"{estimate(one.families[family].speed_up, '.2f', 'x')}; {parity}"


def _failures(data: Data) -> str:
    failed = [one for one in data.summaries if one.failed]
    rows = [[data.label(one.arm), str(one.batch), str(one.failed), one.error or ""] for one in failed]
    head = ["arm", "batch", "failed runs", "first error"]
    return page.table("runs that failed; their arms have no overall speed", head, rows, words=head[3:]) if rows else ""


def _plots(charts: Sequence[Chart]) -> str:
    """The charts side by side; those of one kind are equally high."""
    blocks = []
    for kinds in (("rows",), ("lines", "scatter")):
        own = [chart for chart in charts if chart.kind in kinds]
        height = max(map(height_of, own), default=0.0)
        figures = "".join(page.figure(inline_svg(chart, height), chart.caption) for chart in own)
        blocks.append(f'<div class="plots">{figures}</div>' if own else "")
    return "".join(blocks)


def _time(data: Data) -> str:
    parts = (*PARTS, "overhead")
    timed = [(one, one.time_split) for one in data.summaries if one.time_split is not None]
    rows = [
        [data.label(one.arm), str(one.batch), *(f"{split[part]:.1%}" for part in parts), share(one.round_overhead)]
        for one, split in timed
    ]
    caption = (
        "shares of the measured seconds, overhead being all that no other part names; in the last column what a round "
        "takes besides drafting, verifying and accepting, as a share of the round"
    )
    return page.table(caption, ["arm", "batch", *parts, "overhead of a round"], rows) if rows else ""


def _predictions(data: Data) -> str:
    known = [(one, one.prediction) for one in data.summaries if one.prediction is not None]
    rows = [
        [
            data.label(one.arm),
            str(one.batch),
            f"{p['predicted']:.2f}x",
            f"{p['observed']:.2f}x",
            f"{p['predicted'] / p['observed'] - 1:+.0%}",
        ]
        for one, p in known
    ]
    caption = "speed-up over plain decoding, prompt processing not counted"
    return page.table(caption, ["arm", "batch", "predicted", "observed", "deviation"], rows) if rows else ""


def _simulations(data: Data) -> list[str]:
    """Per arm the speed-ups over draft length and batch, and what follows from them."""
    made = []
    for one in data.simulations:
        found = one.simulation
        first = ["tree depth", "draft tokens"] if found.chains else ["draft length"]
        head = [*first, "tokens per round", *(f"batch {batch}" for batch in found.batches)]
        sizes = {n: [f"{found.nodes[n]:.3g}"] if found.chains else [] for n in found.lengths}
        rows = [
            [str(n), *sizes[n], f"{found.tokens[n]:.2f}", *(found.marked(batch, n) for batch in found.batches)]
            for n in found.lengths
        ]
        name = data.label(one.arm)
        caption = f"{name}, from what it accepted in these runs: predicted speed-up (* best, - slower than plain)"
        made += [page.table(caption, head, rows), page.bullets(conclusions(one.costs, found))]
    return made


def _samples(data: Data, tokenizer: Tokenizer | None) -> str:
    speeds = [(one.speed.tokens_per_second.value if one.speed else 0.0, one.arm) for one in data.summaries]
    fastest = list(dict.fromkeys(arm for _, arm in sorted(speeds, reverse=True)))
    found = samples.chosen(data.runs, fastest, PER_FAMILY)
    folds = [
        page.folded(
            family,
            "".join(samples.sample(run, row, tokenizer, data.label(run.arm)) for run, row in texts),
            opened=number == 0,
        )
        for number, (family, texts) in enumerate(found.items())
        if texts
    ]
    return samples.LEGEND + "".join(folds) if folds else ""
