"""Plots of a report as inline SVG: scatter, bars, steps and curves.

Colors are CSS variables of the page (`var(--ink)`, `var(--s0)`, ...), so plots follow its dark and
print modes. Labels are SVG text in the page's font. A model has the same number and color in all
plots. Knows plain points. This is the only module that imports matplotlib.
"""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

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

_FAR_APART = 3.0
"""Ratio of the largest to the smallest value above which the y axis is logarithmic."""
_MANY_DECADES = 4.0
"""Decades above which a logarithmic axis has ticks at a few powers of ten only."""
_WILD = 1e6
"""Ratio to the smallest value above which a point is drawn at the top, with another mark."""
_LABEL_IN = 0.15
"""Height of a number in inches, and the least distance of two that are above one another."""
_DIGIT_IN = 0.08
_MARGINS_IN = (0.8, 0.7)
"""Width and height of a plot that its axes do not cover, about."""

_SIZE_IN = (4.4, 3.2)
"""Least size in inches. Text of 9 points is readable at this size when a plot fills a phone's
screen."""


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
    values span a large range. A value of a broken model, a million times the least or infinite, is
    a triangle at the top."""
    with _styled():
        figure, axes = _axes(x_label, y_label, labels=len(points) / 2)
        highest = _WILD * min((p.y for p in points if math.isfinite(p.y)), default=1.0)
        wild = {point.number for point in points if not point.y <= highest}
        points = [replace(p, y=highest, error=0.0) if p.number in wild else p for p in points]
        for point in points:
            error = None if point.error == 0.0 else min(point.error, 0.9 * point.y)
            form = "^" if point.number in wild else "o"
            color = _color(point.number)
            axes.errorbar(
                point.x,
                point.y,
                error,
                fmt=form,
                color=color,
                markersize=7,
                capsize=3,
                elinewidth=1,
            )
        values = [point.y for point in points]
        if max(values) > _FAR_APART * min(values):
            _make_log(axes, values)
        axes.margins(x=0.15, y=0.2)
        axes.set_xlim(left=0.0)  # distances from the axis show the ratio of sizes
        axes.grid(visible=True)
        _number_points(axes, points)
        return _svg(figure, f"{x_label} and {y_label}")


def _number_points(axes: Axes, points: Sequence[Point]) -> None:
    """Puts each model's number beside its point, where no other number and no point is."""
    width, height = _axes_size_in(axes)
    places = [_axes_fraction(axes, point.x, point.y) for point in points]
    spots = [(x * width, y * height) for x, y in places]
    taken = [(x - 0.05, y - 0.05, x + 0.05, y + 0.05) for x, y in spots]
    for point, (x, y) in zip(points, spots, strict=True):
        size = _DIGIT_IN * len(str(point.number))
        sides = [
            (side * (0.1 * ring + size / 2), step * 0.12 * ring)
            for ring in range(1, 9)
            for step in (1, -1, 0)
            for side in (1, -1, 0)
            if side or step
        ]
        boxes = [
            (x + dx - size / 2, y + dy - _LABEL_IN / 2, x + dx + size / 2, y + dy + _LABEL_IN / 2)
            for dx, dy in sides
        ]
        best = min(range(len(boxes)), key=lambda i: (_overlap(boxes[i], taken), i))
        taken.append(boxes[best])
        axes.annotate(
            f"{point.number}",
            (x / width, y / height),
            xycoords="axes fraction",
            xytext=(72 * sides[best][0], 72 * sides[best][1]),
            textcoords="offset points",
            ha="center",
            va="center",
            color=_color(point.number),
            fontweight="bold",
        )


Box = tuple[float, float, float, float]
"""Left, bottom, right and top in inches."""


def _overlap(box: Box, others: Sequence[Box]) -> float:
    """Area that a box shares with others."""
    return sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
        * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in others
    )


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
        figure, axes = _axes(x_label, y_label, labels=len(lines))
        _draw_lines(axes, lines, drawstyle="steps-mid")
        axes.set_ylim(0.0, 1.08 * max(max(line.y) for line in lines))
        axes.margins(x=0.02)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=True, axis="y")
        _number_lines(axes, lines)
        return _svg(figure, f"{y_label} by {x_label}")


def curves(lines: Sequence[Line], names: Sequence[str], *, x_label: str, y_label: str) -> str:
    """Curve per model with its number at the right end. `names` label x = 0, 1, 2, ..."""
    with _styled():
        figure, axes = _axes(x_label, y_label, labels=len(lines))
        _draw_lines(axes, lines, marker="o", markersize=4)
        axes.margins(x=0.04, y=0.1)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
        axes.grid(visible=True, axis="y")
        _number_lines(axes, lines)
        return _svg(figure, f"{y_label} by {x_label}")


def _draw_lines(axes: Axes, lines: Sequence[Line], **style: Any) -> None:
    for line in lines:
        axes.plot(range(len(line.y)), line.y, color=_color(line.number), **style)


def _number_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Puts the number of each line at the right border, near its end, and at least a number's
    height from the others. Call it when the limits of the axes are set."""
    ordered = sorted(lines, key=lambda line: line.y[-1])
    gap = _LABEL_IN / _axes_size_in(axes)[1]
    places: list[float] = []
    for line in ordered:
        _, place = _axes_fraction(axes, 0.0, line.y[-1])
        places.append(max(place, places[-1] + gap) if places else place)
    top = 1.0
    for at in reversed(range(len(places))):
        places[at] = min(places[at], top)
        top = places[at] - gap
    for line, place in zip(ordered, places, strict=True):
        axes.annotate(
            f"{line.number}",
            (1.0, place),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_color(line.number),
            fontweight="bold",
            annotation_clip=False,
        )


def _axes_size_in(axes: Axes) -> tuple[float, float]:
    figure = axes.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    return float(width) - _MARGINS_IN[0], float(height) - _MARGINS_IN[1]


def _axes_fraction(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Place of a point of the data, as shares of the width and of the height of the axes."""
    x, y = (axes.transScale + axes.transLimits).transform((x, y))
    return float(x), float(y)


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


def _axes(x_label: str, y_label: str, *, labels: float) -> tuple[Figure, Axes]:
    """A figure with one plot. Its height holds `labels` lines of numbers, one above another."""
    height = max(_SIZE_IN[1], _MARGINS_IN[1] + 1.25 * _LABEL_IN * labels)
    figure = Figure(figsize=(_SIZE_IN[0], height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _make_log(axes: Axes, values: Sequence[float]) -> None:
    axes.set_yscale("log")
    decades = math.log10(max(values) / max(min(values), sys.float_info.min))
    if decades > _MANY_DECADES:
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())


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
