"""Charts drawn with matplotlib: PNG and SVG files for a paper, inline SVG for the report.

Colours are Okabe and Ito's (2008), told apart by colour-blind readers; markers and dashes differ as well, so that a
grey print can be read. Inline SVG takes ink and grid from the page, so it follows a light or a dark scheme.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.bench.report.charts import Chart, Line, Point
from slipstream.errors import SlipstreamError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours, so that no pair comes back before 42 lines
DASHES = ("-", "--", "-.", ":")
INK, GRID = "#010203", "#d5d8dc"  # ink is a colour of its own, to be found again in the SVG
WIDTH, HEIGHT, ROW, HEAD = 4.2, 3.0, 0.13, 1.4  # inches; a chart of rows grows with them
DPI = 300
LONGEST = 28  # characters of a row's name that leave room for the values
TWO_COLUMNS = 22  # characters of the longest name that fits beside another one
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


def require_matplotlib() -> None:
    """Refuse in one line where matplotlib is missing; call it before a measurement that ends in plots."""
    if find_spec("matplotlib") is None:
        raise SlipstreamError("plots need matplotlib; run: pip install 'slipstream-lm[bench]'")


def save(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write every chart as PNG (300 dots per inch) and SVG into a folder, and return the files."""
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            for ending in ("png", "svg"):
                file = folder / f"{chart.name}.{ending}"
                file.write_bytes(_saved(chart, ending, "path"))
                files.append(file)
    except OSError as error:
        raise UsageError(f"plots cannot be written to {str(folder)!r}: {error.strerror}") from error
    return files


def height_of(chart: Chart) -> float:
    """Inches that the chart needs."""
    lines = len(chart.lines)
    if chart.kind == "rows":
        return HEAD + ROW * max(len(chart.rows) * (lines + 1.2), 6)
    return HEIGHT + ROW * lines / 2


def inline_svg(chart: Chart, height: float | None = None) -> str:
    """The chart as an <svg> element for a page: text as text, ink and grid taken from the page's colours.

    height: in inches, if not what the chart needs.
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
        {"lines": _draw_lines, "scatter": _draw_scatter, "rows": _draw_rows}[chart.kind](axes, chart)
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
    metadata = {"Date": None, "Creator": None} if ending == "svg" else None
    with _drawn(chart, fonts, height) as figure, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name in another script: the page's fonts have it
        figure.savefig(buffer, format=ending, dpi=DPI, metadata=metadata, transparent=fonts == "none")
    return buffer.getvalue()


def _draw_lines(axes: Axes, chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in chart.lines:
        look = _look(line)
        for points in _neighbours(line.points):
            if line.plain:
                marker = "x" if len(points) == 1 else None  # a line of one point cannot be seen
                axes.plot(*_columns(points), **look | {"marker": marker})
            else:
                axes.errorbar(*_columns(points), yerr=_errors(points), **look)
            look["label"] = "_"  # one entry in the legend
    if chart.level is not None:
        axes.axhline(chart.level, color=INK, linewidth=0.9, linestyle=(0, (1, 1)))
    axes.set_ylim(bottom=0, top=1.02 if chart.share else None)
    places = [point.x for line in chart.lines for point in line.points]
    axes.set_xlim(min(places) - 0.5, max(places) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_scatter(axes: Axes, chart: Chart) -> None:
    for line in chart.lines:
        axes.errorbar(*_columns(line.points), yerr=_errors(line.points), **_look(line) | {"linestyle": "none"})
    largest = max(max(p.x, p.high or p.value) for line in chart.lines for p in line.points) * 1.05
    axes.plot([0, largest], [0, largest], color=INK, linewidth=0.9, linestyle=(0, (1, 1)))
    axes.set_xlim(0, largest)
    axes.set_ylim(0, largest)


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


def _neighbours(points: tuple[Point, ...]) -> Iterator[tuple[Point, ...]]:
    """Runs of points whose x are neighbouring whole numbers: between others nothing was measured."""
    start = 0
    for at in range(1, len(points) + 1):
        if at == len(points) or points[at].x - points[at - 1].x != 1:
            yield points[start:at]
            start = at


def _columns(points: tuple[Point, ...]) -> tuple[list[float], list[float]]:
    return [p.x for p in points], [p.value for p in points]


def _errors(points: tuple[Point, ...]) -> list[list[float]]:
    """Distances from the values down and up to the ends of their intervals; nothing where there is none."""
    below = [0.0 if p.low is None else max(0.0, p.value - p.low) for p in points]
    above = [0.0 if p.high is None else max(0.0, p.high - p.value) for p in points]
    return [below, above]


def _look(line: Line) -> dict[str, Any]:
    colour = COLOURS[line.look % len(COLOURS)]
    if line.plain:
        return {"color": colour, "linestyle": (0, (4, 2)), "label": line.name}
    dash = DASHES[line.look // len(COLOURS) % len(DASHES)]
    marker = MARKERS[line.look % len(MARKERS)]
    return {"color": colour, "marker": marker, "linestyle": dash, "label": line.name}
