"""The charts of a report, drawn with matplotlib: PDF, PNG and SVG files for a paper, inline SVG for the page.

Colors are Okabe and Ito's (2008), which color-blind readers can distinguish; markers and dashes differ as well, so
that a gray print can be read. Inline SVG takes ink and grid from the page, so it follows a light or a dark scheme.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slipstream.bench.arms import Arm, parse_arm
from slipstream.bench.length_series import Cell, Series, parity_of, series_of
from slipstream.bench.report.headline import FEW_PROMPTS
from slipstream.bench.report.report_data import Records, acceptance, acceptance_at, drafted_at
from slipstream.bench.summary import ArmSummary, Estimate
from slipstream.errors import SlipstreamError, UsageError, os_reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colors, so that no pair repeats within 42 lines
DASHES = ("-", "--", "-.", ":")
DODGE = 0.05  # between neighboring lines, of the distance of whole numbers x
INK, GRID = "#010203", "#d5d8dc"  # ink is used for nothing else, so `inline_svg` can replace it
WIDTH, HEIGHT, ROW, HEAD = 4.2, 3.0, 0.13, 1.4  # inches; a chart of rows grows with them
DPI = 300
LONGEST = 28  # characters of a row's name that leave room for the values
TWO_COLUMNS = 22  # characters of the longest name that fits next to another one
_STYLE: dict[str, Any] = {
    "text.parse_math": False,  # names are the user's, and a dollar sign is one
    "font.size": 9.5,
    "font.family": "sans-serif",
    "axes.titlesize": 10.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.0,
}
METADATA: dict[str, Any] = {  # without dates, so that equal charts are equal files
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": None,
    "svg": {"Date": None, "Creator": None},
}
FEWEST_POINTS = 3  # of a chart; tables show fewer better
FEWEST_DRAFTED = 20  # tokens of a repeat at a position of the draft; fewer say nothing about the position
MOST = 6  # arms in one picture
INTERVALS = "Bars are 95 % bootstrap intervals over prompts"
T = TypeVar("T")
SPEED = f"{INTERVALS} and repeats; prompt processing is counted."
Kind = Literal["lines", "rows"]


@dataclass(frozen=True)
class Point:
    """A value at x and the interval around it; both ends are None without an interval."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """Points under one name."""

    name: str
    points: tuple[Point, ...]
    look: int  # color, marker and dash, the same for an arm in every chart of a report


@dataclass(frozen=True)
class Chart:
    """The data and the words of one picture."""

    name: str  # of its files, without extension
    title: str
    caption: str  # what was measured, and what the intervals are
    x_label: str
    y_label: str
    lines: tuple[Line, ...]  # "lines": values over whole numbers x, neighbors joined; "rows": values along x
    kind: Kind = "lines"
    rows: tuple[str, ...] = ()  # one label per row, for "rows"; a point's x is its row's number
    level: float | None = None  # a value to compare with, drawn across
    share: bool = False  # the values are shares of 1


def require_matplotlib() -> None:
    """Raise if matplotlib is missing; call it before a measurement that ends in plots."""
    if find_spec("matplotlib") is None:
        raise SlipstreamError("plots need matplotlib; run: pip install matplotlib jinja2")


def save(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write every chart as PDF, PNG (300 dots per inch) and SVG into a folder, and return the files."""
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            for ending in METADATA:
                file = folder / f"{chart.name}.{ending}"
                file.write_bytes(_saved(chart, ending, "path"))
                files.append(file)
    except OSError as error:
        raise UsageError(f"plots cannot be written to {str(folder)!r}: {os_reason(error)}") from error
    return files


def height_of(chart: Chart) -> float:
    """Inches that the chart needs."""
    lines = len(chart.lines)
    if chart.kind == "rows":
        return HEAD + ROW * max(len(chart.rows) * (lines + 1.2), 6)
    return HEIGHT + ROW * lines / 2


def inline_svg(chart: Chart, height: float | None = None) -> str:
    """The chart as an <svg> element for a page: text as text, ink and grid taken from the page's colors.

    height: in inches, if not the chart's own.
    """
    svg = _saved(chart, "svg", "none", height).decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<style type="text/css">.*?</style>', "", svg, flags=re.DOTALL)  # would style the whole page
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{chart.name}-", svg)  # one page holds many charts
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    opening = f'<svg role="img" aria-label="{escape(chart.title)}" '
    return opening + re.sub(r' (width|height)="[^"]*pt"', "", svg[len("<svg ") :], count=2)


@contextmanager
def _drawn(chart: Chart, fonts: str, height: float | None = None) -> Iterator[Figure]:
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = len(chart.lines)
    style: Any = _STYLE | {"svg.fonttype": fonts, "svg.hashsalt": chart.name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height or height_of(chart)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        {"lines": _draw_lines, "rows": _draw_rows}[chart.kind](axes, chart)
        axes.set_title(chart.title, loc="left")
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        if lines > 1:
            handles, names = axes.get_legend_handles_labels()
            order = sorted(range(lines), key=lambda i: [line.name for line in chart.lines].index(names[i]))
            columns = 2 if max(map(len, names)) <= TWO_COLUMNS else 1
            figure.legend(
                [handles[i] for i in order], [names[i] for i in order], loc="outside lower left", ncols=columns
            )
        yield figure


def _saved(chart: Chart, ending: str, fonts: str, height: float | None = None) -> bytes:
    buffer = io.BytesIO()
    with _drawn(chart, fonts, height) as figure, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in another script: the page's fonts have it
        figure.savefig(buffer, format=ending, dpi=DPI, metadata=METADATA[ending], transparent=fonts == "none")
    return buffer.getvalue()


def _draw_lines(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, line in enumerate(chart.lines):
        look = _look(line)
        shift = DODGE * (number - (len(chart.lines) - 1) / 2)  # else equal points would hide each other
        for points in _neighbors(line.points):
            positions, values = _columns(points)
            axes.errorbar([position + shift for position in positions], values, yerr=_errors(points), **look)
            look["label"] = "_"  # one entry in the legend
    if chart.level is not None:
        axes.axhline(chart.level, color=INK, linewidth=0.9, linestyle=(0, (1, 1)))
    axes.set_ylim(bottom=0, top=1.02 if chart.share else None)
    places = [point.x for line in chart.lines for point in line.points]
    axes.set_xlim(min(places) - 0.5, max(places) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_rows(axes: Axes, chart: Chart) -> None:
    step = 0.8 / max(len(chart.lines), 1)
    for number, line in enumerate(chart.lines):
        shift = (number - (len(chart.lines) - 1) / 2) * step
        positions, values = _columns(line.points)
        places = [position + shift for position in positions]
        axes.errorbar(values, places, xerr=_errors(line.points), **_look(line) | {"linestyle": "none"})
    if chart.level is not None:
        axes.axvline(chart.level, color=INK, linewidth=0.9, linestyle=(0, (1, 1)))
    names = [row if len(row) <= LONGEST else f"{row[: LONGEST - 3]}..." for row in chart.rows]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(chart.rows) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.grid(visible=False, axis="y")


def _neighbors(points: tuple[Point, ...]) -> Iterator[tuple[Point, ...]]:
    """Runs of points at neighboring whole numbers x; nothing was measured in the gaps between them."""
    start = 0
    for end in range(1, len(points) + 1):
        if end == len(points) or points[end].x - points[end - 1].x != 1:
            yield points[start:end]
            start = end


def _columns(points: tuple[Point, ...]) -> tuple[list[float], list[float]]:
    return [p.x for p in points], [p.value for p in points]


def _errors(points: tuple[Point, ...]) -> list[list[float]]:
    """Distances from the values down and up to the ends of their intervals; 0 without an interval."""
    below = [0.0 if p.low is None else max(0.0, p.value - p.low) for p in points]
    above = [0.0 if p.high is None else max(0.0, p.high - p.value) for p in points]
    return [below, above]


def _look(line: Line) -> dict[str, Any]:
    color = COLORS[line.look % len(COLORS)]
    dash = DASHES[line.look // len(COLORS) % len(DASHES)]
    marker = MARKERS[line.look % len(MARKERS)]
    return {"color": color, "marker": marker, "linestyle": dash, "label": line.name}


def charts(data: Records) -> list[Chart]:
    """All charts with at least `FEWEST_POINTS` points, or a line of as many, in the order of a report."""
    all_charts: list[Chart] = []
    for batch, arms in data.by_batch.items():
        series = [entry for entry in series_of(data.summaries) if entry.batch == batch]
        for chart in (*_families(data, arms), *_over_length(data, series), *_by_position(data, arms)):
            points = [len(line.points) for line in chart.lines]
            if (sum(points) if chart.kind == "rows" else max(points)) < FEWEST_POINTS:
                continue
            title = f"{chart.title}, batch size {batch}"
            all_charts.append(replace(chart, name=f"{chart.name}_batch_{batch}", title=title))
    return all_charts


def selected(summaries: Sequence[ArmSummary]) -> list[ArmSummary]:
    """All arms if there are few; else only the fastest draft length of each drafter, rule and temperature."""
    timed = [arm for arm in summaries if arm.speed is not None]
    if len(timed) <= MOST:
        return timed
    fastest: dict[Arm, ArmSummary] = {}
    for arm in timed:
        kind = replace(parse_arm(arm.arm), name="", num_draft_tokens=None)
        if kind not in fastest or _speed(arm) > _speed(fastest[kind]):
            fastest[kind] = arm
    return list(fastest.values())


def _speed(arm: ArmSummary) -> float:
    return arm.speed.tokens_per_second.value if arm.speed is not None else 0.0


def _families(data: Records, summaries: Sequence[ArmSummary]) -> Iterator[Chart]:
    """Speed-up by family, several arms per picture."""
    shown = [arm for arm in selected(summaries) if arm.arm != data.references[arm.arm]]
    for number, part in enumerate(_parts(shown), 1):
        families = list(dict.fromkeys(family for arm in part for family in arm.families))
        lines = _filled(Line(data.label(arm.arm), _family_points(arm, families), look) for look, arm in enumerate(part))
        if lines:
            name, title = _numbered("speed_up_by_family", "Speed-up", number, len(shown))
            bases = {data.label(data.references[arm.arm]) for arm in part}
            compared = next(iter(bases)) if len(bases) == 1 else "plain decoding at the same temperature"
            label = f"speed-up over {compared} (times)"
            caption = f"Geometric mean over prompts. {SPEED} The dotted line is the speed of {compared}."
            caption = f"{caption} Texts: {parity_of(part)}."
            yield Chart(name, title, caption, label, "", lines, "rows", (*families, "all"), level=1.0)


def _family_points(arm: ArmSummary, families: Sequence[str]) -> tuple[Point, ...]:
    speeds = [arm.families.get(family) for family in families] + [arm.speed]
    ratios = [(row, speed.speed_up) for row, speed in enumerate(speeds) if speed is not None]
    return tuple(_point(row, ratio) for row, ratio in ratios if ratio is not None)


def _over_length(data: Records, all_series: Sequence[Series]) -> Iterator[Chart]:
    """Tokens per second and acceptance rate over draft length."""
    for number, part in enumerate(_parts(all_series), 1):
        speeds = _filled(Line(data.label(series.name), _speeds(series.cells), look) for look, series in enumerate(part))
        rates = _filled(
            Line(data.label(series.name), _rates(data, series.cells), look) for look, series in enumerate(part)
        )
        x = "draft length (tokens)"
        if speeds:
            name, title = _numbered("speed_by_draft_length", "Tokens per second", number, len(all_series))
            parity = parity_of(cell.summary for series in part for cell in series.cells if cell.length > 0)
            caption = f"Output tokens per second; length 0 is plain decoding. {SPEED} Texts: {parity}."
            yield Chart(name, title, caption, x, "tokens per second", speeds)
        if rates:
            name, title = _numbered("acceptance_by_draft_length", "Acceptance rate", number, len(all_series))
            caption = f"Accepted of all drafted tokens. {INTERVALS}."
            label = "accepted / drafted"
            yield Chart(name, title, caption, x, label, rates, share=True)


def _speeds(cells: Sequence[Cell]) -> tuple[Point, ...]:
    timed = [(cell.length, cell.summary.speed) for cell in cells]
    return tuple(_point(length, speed.tokens_per_second) for length, speed in timed if speed is not None)


def _rates(data: Records, cells: Sequence[Cell]) -> tuple[Point, ...]:
    rates = [(c.length, acceptance(data.runs_of(c.summary.arm, c.summary.batch))) for c in cells if c.length > 0]
    return tuple(_point(length, rate) for length, rate in rates if rate is not None)


def _by_position(data: Records, summaries: Sequence[ArmSummary]) -> Iterator[Chart]:
    """Share of draft tokens accepted at each position of the draft."""
    drafting = [arm for arm in summaries if arm.stats is not None and arm.stats.num_draft_tokens]
    if len(drafting) > MOST:
        longest: dict[Arm, ArmSummary] = {}
        for arm in sorted(drafting, key=lambda s: len(s.acceptance_by_position)):
            longest[replace(parse_arm(arm.arm), name="", num_draft_tokens=None)] = arm
        drafting = [arm for arm in drafting if arm in longest.values()]
    for number, part in enumerate(_parts(drafting), 1):
        lines = _filled(Line(data.label(arm.arm), _positions(data, arm), look) for look, arm in enumerate(part))
        if not lines:
            continue
        names = [data.label(arm.arm) for arm in part]
        left_out = ", ".join(name for name in names if name not in {line.name for line in lines})
        name, title = _numbered("acceptance_by_position", "Acceptance by position", number, len(drafting))
        has_bars = any(point.low is not None for line in lines for point in line.points)
        intervals = (
            f"{INTERVALS}, where there are {FEW_PROMPTS} or more." if has_bars else "Too few prompts for intervals."
        )
        caption = f"Positions with fewer than {FEWEST_DRAFTED} drafted tokens are left out"
        caption += f", and with them {left_out}. {intervals}" if left_out else f". {intervals}"
        label = "accepted / drafted"
        yield Chart(name, title, caption, "position in the draft (tokens)", label, lines, share=True)


def _positions(data: Records, arm: ArmSummary) -> tuple[Point, ...]:
    """The positions where enough was drafted, with intervals where enough prompts have drafts that long."""
    runs = data.runs_of(arm.arm, arm.batch)
    points = []
    repeats = len({run.repeat for run in runs})
    for place in range(len(arm.acceptance_by_position)):
        drafted, ratio = drafted_at(runs, place), acceptance_at(runs, place)
        if ratio is not None and sum(drafted) >= FEWEST_DRAFTED * repeats:
            is_sure = sum(tokens > 0 for tokens in drafted) >= FEW_PROMPTS
            points.append(_point(place + 1, ratio if is_sure else Estimate(ratio.value)))
    return tuple(points)


def _point(x: float, estimate: Estimate) -> Point:
    return Point(x, estimate.value, estimate.low, estimate.high)


def _filled(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(line for line in lines if line.points)


def _parts(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + MOST] for start in range(0, len(items), MOST)]


def _numbered(name: str, title: str, number: int, count: int) -> tuple[str, str]:
    """File name and title of a picture; those of several pictures of one kind are numbered."""
    pictures = -(-count // MOST)
    return (name, title) if pictures == 1 else (f"{name}_{number}", f"{title} ({number} of {pictures})")
