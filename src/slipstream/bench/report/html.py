"""The report as one page: speeds beside parity, families, failures, plots, coloured samples, settings, machine.

Everything given as text is escaped. Tables scroll inside their own box, so that nothing widens the page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from slipstream.bench.arms import HF, PLAIN, counted, local_time, parse_arm
from slipstream.bench.records import VerdictName
from slipstream.bench.report import report_data as samples
from slipstream.bench.report.plots import Chart, height_of, inline_svg
from slipstream.bench.report.report_data import Data, acceptance, against, efficiency
from slipstream.bench.summary import PARTS, ArmSummary, Estimate, wrong_texts
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
CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1f23; --soft: #59616b; --grid: #d5d8dc; --box: #f4f6f8;
  --acc: #14642a; --acc-bg: #e2f3e6; --rej: #a3211a; --own: #174ea0; --bad: #a3211a; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e8ea; --soft: #a4acb5; --grid: #3a4149; --box: #1d2125;
    --acc: #8fdba3; --acc-bg: #1d3325; --rej: #ff9a91; --own: #9cc2ff; --bad: #ff9a91; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; border-bottom: 1px solid var(--grid); }
p, dd { max-width: 48rem; }
.lead { font-weight: 600; margin: 0 0 0.5rem; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.bad { color: var(--bad); font-weight: 600; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: separate; border-spacing: 0; font-size: 14px; line-height: 22px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 4px 11px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap;
  vertical-align: top; }
th:first-child, td:first-child, td.word, th.word { text-align: left; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
@media (max-width: 40rem) {
  th:first-child, td:first-child { white-space: normal; min-width: 6.5rem; max-width: 9rem; padding-left: 0;
    border-right: 1px solid var(--grid); }
}
td.wrap { white-space: normal; min-width: 16rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); gap: 1rem;
  margin-bottom: 1rem; }
.plots figure { margin: 0; background: var(--box); padding: 0.6rem; min-width: 0; }
.plots svg { display: block; width: 100%; max-width: 36rem; height: auto; color: var(--ink); }
.plots svg * { stroke-linejoin: round; }
.plots text { font-family: system-ui, sans-serif !important; }
.sample { margin: 0.8rem 0; }
.text { white-space: pre-wrap; font-family: ui-monospace, monospace; font-size: 0.85rem; background: var(--box);
  padding: 0.6rem; max-height: 24rem; overflow: auto; }
.acc { color: var(--acc); background: var(--acc-bg); }
.tree { text-decoration: underline double; }
.rej { color: var(--rej); text-decoration: line-through; }
.own { color: var(--own); text-decoration: underline dotted; }
.legend span { margin-right: 0.8rem; }
dl { display: grid; grid-template-columns: minmax(8rem, max-content) 1fr; gap: 0.1rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; min-width: 0; font-family: ui-monospace, monospace; font-size: 0.85rem; }
summary { cursor: pointer; padding: 0.3rem 0; }
"""


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
        return f"Plain decoding is fastest, {_text_verdicts(best)}"
    base = data.label(HF if HF in data.references else data.references[best.arm])
    base = "plain decoding" if base == "plain" else base
    where = f" in batches of {smallest}" if smallest > 1 else ""
    return f"{_ratio(best):.1f}x {base}{where}, {_text_verdicts(best)}"


def _ratio(one: ArmSummary) -> float | None:
    return None if one.speed is None or one.speed.speed_up is None else one.speed.speed_up.value


def _text_verdicts(one: ArmSummary) -> str:
    same = one.verdicts["identical"] + one.verdicts["reference"]
    compared = same + one.verdicts["tie"] + one.verdicts["different"]
    if not compared:
        return "texts sampled and not compared"
    ties = f", {one.verdicts['tie']} within rounding" if one.verdicts["tie"] else ""
    return f"{same} of {compared} texts identical{ties}"


def render(data: Data, charts: Sequence[Chart], tokenizer: Tokenizer | None) -> str:
    """The document. tokenizer: makes text of the samples' token ids; without one the ids are shown."""
    target, draft = data.header.settings.get("target"), data.header.settings.get("draft")
    models = f"{target}" + (f" with {draft} as draft model" if draft else "")
    parts = [
        f"<h1>{escape(headline(data))}</h1>",
        paragraph(models, "lead"),
        paragraph(_opening(data), "soft"),
        *(paragraph(line, "bad") for line in _warnings(data)),
        section("Advice by draft length", *_advice(data)),
        section("All prompts", *_overall(data), paragraph(PARITY, "soft"), paragraph(TERMS, "soft")),
        section("By family", *_families(data)),
        section("Failures", _failures(data)),
        section("Plots", _plots(charts)),
        section("Where the time went", _time(data)),
        section("Texts", _samples(data, tokenizer)),
        section("Settings", settings_list(data.header.settings)),
        section("Versions and machine", settings_list(data.header.versions | data.header.machine)),
    ]
    return page(f"Slipstream: {models}", "".join(parts))


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
    return [bullets([best.sentence for best in found])] if found else []


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
        made.append(table(f"batch size {batch}: speed, and the texts it was reached with", head, rows))
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
        made.append(table(caption, ["arm", *families], rows))
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
    return table("runs that failed; their arms have no overall speed", head, rows, words=head[3:]) if rows else ""


def _plots(charts: Sequence[Chart]) -> str:
    """The charts side by side; those of one kind are equally high."""
    blocks = []
    for kinds in ("rows", "lines"):
        own = [chart for chart in charts if chart.kind == kinds]
        height = max(map(height_of, own), default=0.0)
        figures = "".join(figure(inline_svg(chart, height), chart.caption) for chart in own)
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
    return table(caption, ["arm", "batch", *parts, "overhead of a round"], rows) if rows else ""


def _samples(data: Data, tokenizer: Tokenizer | None) -> str:
    speeds = [(one.speed.tokens_per_second.value if one.speed else 0.0, one.arm) for one in data.summaries]
    fastest = list(dict.fromkeys(arm for _, arm in sorted(speeds, reverse=True)))
    found = samples.chosen(data.runs, fastest, PER_FAMILY)
    folds = [
        folded(
            family,
            "".join(samples.sample(run, row, tokenizer, data.label(run.arm)) for run, row in texts),
            opened=number == 0,
        )
        for number, (family, texts) in enumerate(found.items())
        if texts
    ]
    return samples.LEGEND + "".join(folds) if folds else ""


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[str] = ()) -> str:
    """A table that scrolls inside its box. words: the heads of columns that hold sentences, which may wrap."""
    cells = "".join(f'<th scope="col"{_align(name, words)}>{escape(name)}</th>' for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td{_align(n, words)}>{escape(v)}</td>" for n, v in zip(head, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f"{paragraph(caption, 'soft')}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def settings_list(values: Mapping[str, Any]) -> str:
    """Names and values; what is not text is written as JSON."""
    items = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(_plain(value))}</dd>" for name, value in values.items())
    return f"<dl>{items}</dl>"


def figure(svg: str, caption: str) -> str:
    """A drawn chart with its caption. svg: trusted markup; caption: text."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def section(title: str, *parts: str) -> str:
    """A titled section; one without content is left out."""
    content = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def bullets(lines: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def folded(title: str, content: str, *, opened: bool = False) -> str:
    """Content to unfold. title: text; content: markup."""
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{content}</details>"


def page(title: str, body: str) -> str:
    """The whole document, self-contained: it may load nothing, not even from where it lies."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{CSS}</style></head><body><main>{body}</main></body></html>\n"
    )


def _align(name: str, words: Sequence[str]) -> str:
    return ' class="word wrap"' if name in words else ""


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
