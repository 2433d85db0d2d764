"""What a chart shows, without how it is drawn: points with intervals, named lines, labelled axes.

This module knows neither records nor matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "scatter", "rows"]


@dataclass(frozen=True)
class Point:
    """A value at x and the interval around it; without an interval both ends are None."""

    x: float
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """Points under one name. look: which colour, marker and dash, the same for an arm in every chart of a report.

    plain: drawn dashed and without markers, for what was computed and not measured.
    """

    name: str
    points: tuple[Point, ...]
    look: int
    plain: bool = False


@dataclass(frozen=True)
class Chart:
    """One picture. name: of its files, without ending; caption: what the intervals are and what was measured.

    lines: values over whole numbers x, neighbours joined. scatter: values over x, with the diagonal. rows: values
    along x, one row per label
    of `rows`, where a point's x is the row's number. level: a value to compare with, drawn across.
    """

    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    kind: Kind = "lines"
    rows: tuple[str, ...] = ()
    level: float | None = None
    share: bool = False  # the values are shares of 1
