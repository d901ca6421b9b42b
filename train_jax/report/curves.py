"""Line plots as SVG text: no plotting library, no script, colours from the page they stand in (see `theme.py`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from train_jax.report.figures import number

Points = Sequence[tuple[float, float]]

_TOP, _RIGHT, _BOTTOM, _LEFT = 42.0, 22.0, 38.0, 48.0
_LETTER = 6.4
"""About the width of a letter of the legend, in pixels: the text is laid out without measuring it."""


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend, its points in the order of x, its colour by number."""

    name: str
    points: Points
    colour: int = 1
    """From 1; the colours are those of `theme.py`."""
    marks: bool = False
    """A dot at every point, for values that were measured now and then."""
    labels: Sequence[str] = ()
    """What is written beside each point, of at most 800; "" for nothing. One that has no room is left out."""


@dataclass(frozen=True)
class Band:
    """What lies between two lines, shaded behind them all: its name in the legend, its edges, finite, as (x, y, y)."""

    name: str
    edges: Sequence[tuple[float, float, float]]


def plot(
    series: Sequence[Series],
    *,
    band: Band | None = None,
    title: str,
    x_label: str,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
    width: float = 440,
    height: float = 250,
) -> str:
    """An `<svg>`; "" when there is not one point to draw.

    What is not finite, or not above 0 on a logarithmic axis, is left out, and the line is broken there.
    """
    drawn = [replace(s, points=_thinned(_drawable(s.points, log_y))) for s in series]
    around = [(x, y) for x, y, _ in band.edges] + [(x, y) for x, _, y in reversed(band.edges)] if band else []
    finite = around + [point for each in drawn for point in each.points if not math.isnan(point[1])]
    if not finite:
        return ""
    x_low, x_high = _widened(min(0.0, *(x for x, _ in finite)), max(x for x, _ in finite))
    x_ticks = [tick for tick in nice_ticks(x_low, x_high, 6) if x_low <= tick <= x_high]
    if y_range is None:
        y_low, y_high = min(y for _, y in finite), max(y for _, y in finite)
        y_ticks = log_ticks(y_low, y_high) if log_y else nice_ticks(*_widened(y_low, y_high), 5)
        y_low, y_high = (min(y_low, *y_ticks), max(y_high, *y_ticks))
        if y_low == y_high:
            y_low, y_high = y_low / 2, y_high * 2
    else:
        y_low, y_high = y_range
        y_ticks = [tick for tick in nice_ticks(y_low, y_high, 5) if y_low <= tick <= y_high]

    right, bottom = width - _RIGHT, height - _BOTTOM
    upward = math.log if log_y else float

    def at_x(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (right - _LEFT)

    def at_y(y: float) -> float:
        return bottom - (upward(y) - upward(y_low)) / (upward(y_high) - upward(y_low)) * (bottom - _TOP)

    parts = [f'<text class="title" x="0" y="14">{escape(title)}</text>', _legend(drawn, band)]
    for tick in y_ticks:
        y = at_y(tick)
        parts.append(f'<path class="grid" d="M{_LEFT:.1f} {y:.1f}H{right:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 7:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{number(tick)}</text>'
        )
    parts.append(f'<path class="axis" d="M{_LEFT:.1f} {bottom:.1f}H{right:.1f}"/>')
    for tick in x_ticks:
        x = at_x(tick)
        parts.append(f'<path class="axis" d="M{x:.1f} {bottom:.1f}v4"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{number(tick)}</text>')
    parts.append(f'<text class="tick" x="{right:.1f}" y="{height - 4:.1f}" text-anchor="end">{escape(x_label)}</text>')
    labelled: list[tuple[float, float, str]] = []
    if around:
        parts.append(f'<path class="band" d="{_path([(at_x(x), at_y(y)) for x, y in around])}Z"/>')
    for each in drawn:
        on_page = [(at_x(x), at_y(y)) if not math.isnan(y) else (x, y) for x, y in each.points]
        parts.append(f'<path class="line s{each.colour}" d="{_path(on_page)}"/>')
        for (x, y), (left, top) in zip(each.points, on_page, strict=True):
            if each.marks and not math.isnan(y):
                told = escape(f"{each.name}: {number(y)} at {number(x)} {x_label}")
                parts.append(
                    f'<circle class="mark s{each.colour}" cx="{left:.1f}" cy="{top:.1f}" r="2.8">'
                    f"<title>{told}</title></circle>"
                )
        labelled += [(x, y, text) for (x, y), text in zip(on_page, each.labels, strict=False) if text]
    parts += _labels(labelled, width)
    return (
        f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}">' + "".join(parts) + "</svg>"
    )


def _labels(points: Sequence[tuple[float, float, str]], width: float) -> Iterator[str]:
    """To the lower right of their points, which a rising curve leaves free; none over another, the first ones first."""
    taken: list[tuple[float, float, float]] = []
    for x, y, text in points:
        length = _LETTER * len(text)
        left = min(x + 5, width - length)
        if all(left > right or left + length < start or abs(y - top) > 10 for start, right, top in taken):
            taken.append((left, left + length, y))
            yield f'<text class="point" x="{left:.1f}" y="{y + 12:.1f}">{escape(text)}</text>'


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most about `most`, the first at or below `low`, the last at or
    above `high`."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5) if m * power >= rough * (1 - 1e-9)), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, over few decades also their doubles and fives: those in [low, high], one more on either side."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    multiples = (1,) if last - first > 3 else (1, 2, 5)
    ticks = [float(f"{m}e{power}") for power in range(first, last + 1) for m in multiples]
    start = max((i for i, tick in enumerate(ticks) if tick <= low), default=0)
    end = min((i for i, tick in enumerate(ticks) if tick >= high), default=len(ticks) - 1)
    ticks = ticks[start : end + 1]
    return ticks[:: -(-len(ticks) // 8)]


def _drawable(points: Points, log_y: bool) -> list[tuple[float, float]]:
    return [(x, y if math.isfinite(y) and (y > 0 or not log_y) else math.nan) for x, y in points]


def _thinned(points: Points, most: int = 800) -> Points:
    """The lowest and the highest of every few points, so that a long run makes no large page and no peak is lost."""
    if len(points) <= most:
        return points
    width = -(-2 * len(points) // most)
    kept = []
    for start in range(0, len(points), width):
        bucket = [point for point in points[start : start + width] if not math.isnan(point[1])]
        kept += (
            sorted({min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}) if bucket else [points[start]]
        )
    return kept


def _widened(low: float, high: float) -> tuple[float, float]:
    if low < high:
        return low, high
    return min(0.0, 2 * low), max(0.0, 2 * high) or 1.0


def _path(points: Points) -> str:
    """The line through the points, in pieces where a y is not a number."""
    commands, pen_down = [], False
    for x, y in points:
        if math.isnan(y):
            pen_down = False
        else:
            commands.append(f"{'L' if pen_down else 'M'}{x:.1f} {y:.1f}")
            pen_down = True
    return "".join(commands)


def _legend(series: Sequence[Series], band: Band | None) -> str:
    """Nothing for one line, which the title names."""
    if len(series) < 2 and band is None:
        return ""
    parts, x = [], 0.0
    for each in series:
        parts.append(f'<path class="line s{each.colour}" d="M{x:.1f} 27h16"/>')
        if each.marks:
            parts.append(f'<circle class="mark s{each.colour}" cx="{x + 8:.1f}" cy="27" r="2.8"/>')
        parts.append(f'<text class="tick" x="{x + 21:.1f}" y="30.5">{escape(each.name)}</text>')
        x += 21 + _LETTER * len(each.name) + 14
    if band:
        parts.append(f'<path class="band" d="M{x:.1f} 22h16v10h-16Z"/>')
        parts.append(f'<text class="tick" x="{x + 21:.1f}" y="30.5">{escape(band.name)}</text>')
    return "".join(parts)
