"""Plots of a report as inline SVG: scatter, bars, steps and curves.

Colors are CSS variables of the page (`var(--ink)`, `var(--s0)`, ...), so plots follow its dark and
print modes. Labels are SVG text in the page's font. A model has the same number and color in all
plots. Knows plain points. This is the only module that imports matplotlib.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

NUM_COLORS = 8
_INK, _GRID, _PAPER = "#010101", "#020202", "#030303"
_SERIES = tuple(f"#0a00{i:02x}" for i in range(NUM_COLORS))
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    _PAPER: "var(--card)",
    **{color: f"var(--s{i})" for i, color in enumerate(_SERIES)},
}
"""Placeholder colors that matplotlib draws with, and the CSS variables that replace them."""

_NEAR = 0.04
"""Distance, as a share of the width. A point with another this close to its right has its number on
the left."""
_FAR_APART = 3.0
"""Ratio of the largest to the smallest value above which the y axis is logarithmic."""
_LABEL_HEIGHT = 0.055
"""Minimum distance of the numbers at line ends, as a share of the height."""

_SIZE_IN = (4.4, 3.2)
"""Size in inches. Text of 9 points is readable at this size when a plot fills a phone's screen."""


@dataclass(frozen=True, slots=True)
class Point:
    """One model's point. `number` of the model counts from 1. `error` is the standard error of y,
    drawn in both directions."""

    number: int
    x: float
    y: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """One model's line. `number` of the model counts from 1; y is given at x = 0, 1, 2, ..."""

    number: int
    y: tuple[float, ...]


def scatter(points: Sequence[Point], *, x_label: str, y_label: str) -> str:
    """Scatter plot with the model's number beside each point. The y axis is logarithmic if the
    values span a large range."""
    with _styled():
        figure, axes = _axes(x_label, y_label)
        right = max(point.x for point in points)
        for point in points:
            color = _color(point.number)
            error = point.error or None
            axes.errorbar(
                point.x, point.y, error, fmt="o", color=color, markersize=7, capsize=3, elinewidth=1
            )
            crowded = [other for other in points if 0 < other.x - point.x < _NEAR * right]
            axes.annotate(
                f"{point.number}",
                (point.x, point.y),
                xytext=(-7, 5) if crowded else (7, 5),
                textcoords="offset points",
                ha="right" if crowded else "left",
                color=color,
                fontweight="bold",
            )
        values = [point.y for point in points]
        if max(values) > _FAR_APART * min(values):
            _make_log(axes)
        axes.margins(x=0.15, y=0.2)
        axes.set_xlim(left=0.0)  # distances from the axis show the ratio of sizes
        axes.grid(visible=True)
        return _svg(figure, f"{x_label} and {y_label}")


def bars(points: Sequence[Point], *, label: str) -> str:
    """Bar chart with one bar of length `x` per model and the value beside it; `y` is ignored."""
    with _styled():
        height = max(1.2, 0.5 + 0.34 * len(points))
        figure = Figure(figsize=(_SIZE_IN[0], height), layout="constrained")
        axes = figure.add_subplot()
        places = range(len(points))
        axes.barh(
            places,
            [point.x for point in points],
            color=[_color(p.number) for p in points],
            height=0.66,
        )
        for place, point in zip(places, points, strict=True):
            text = f"{point.x:,.0f}" if point.x >= 100 else f"{point.x:.1f}"
            axes.annotate(
                text, (point.x, place), xytext=(4, 0), textcoords="offset points", va="center"
            )
        axes.set_yticks(places, [f"{point.number}" for point in points], fontweight="bold")
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.margins(x=0.16)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        return _svg(figure, label)


def steps(lines: Sequence[Line], *, x_label: str, y_label: str) -> str:
    """Step plot with one line per model and its number at the right end."""
    with _styled():
        figure, axes = _axes(x_label, y_label)
        highest = max(max(line.y) for line in lines)
        place = _draw_lines(axes, lines, highest, drawstyle="steps-mid")
        axes.set_ylim(0.0, 1.08 * max(highest, place))
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True, axis="y")
        return _svg(figure, f"{y_label} by {x_label}")


def curves(lines: Sequence[Line], names: Sequence[str], *, x_label: str, y_label: str) -> str:
    """Curve per model with its number at the right end. `names` label x = 0, 1, 2, ..."""
    with _styled():
        figure, axes = _axes(x_label, y_label)
        values = [y for line in lines for y in line.y]
        height = max(max(values) - min(values), 1e-3)
        _draw_lines(axes, lines, height, marker="o", markersize=4)
        axes.margins(x=0.04, y=0.1)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.grid(visible=True, axis="y")
        return _svg(figure, f"{y_label} by {x_label}")


def _draw_lines(axes: Axes, lines: Sequence[Line], height: float, **style: Any) -> float:
    """Draws lines with their numbers at the right end, as far apart as readable in a plot of this
    height. Returns the highest place of a number."""
    longest = max(len(line.y) for line in lines)
    place = -math.inf
    for line in sorted(lines, key=lambda line: line.y[-1]):
        color = _color(line.number)
        axes.plot(range(len(line.y)), line.y, color=color, **style)
        place = max(line.y[-1], place + _LABEL_HEIGHT * height)
        axes.annotate(
            f"{line.number}",
            (longest - 1, place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontweight="bold",
        )
    return place


def color_index(number: int) -> int:
    """Index of a model's color among the page's series colors."""
    return (number - 1) % NUM_COLORS


def _styled() -> AbstractContextManager[None]:
    return rc_context(
        {
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 9,
            "axes.edgecolor": _INK,
            "axes.labelcolor": _INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.linewidth": 0.8,
            "axes.axisbelow": True,
            "grid.color": _GRID,
            "grid.linewidth": 0.6,
            "text.color": _INK,
            "text.parse_math": False,
            "xtick.color": _INK,
            "ytick.color": _INK,
        }
    )


def _color(number: int) -> str:
    return _SERIES[color_index(number)]


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _make_log(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _svg(figure: Figure, label: str) -> str:
    """The <svg> element without a fixed size, so that it fills its container. The ids in it depend
    on `label`, so that those of two plots on one page do not collide."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": label}):
        figure.savefig(
            buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = buffer.getvalue()
    text = text[text.index("<svg") :].rstrip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text.replace("<svg", '<svg role="img"', 1)
