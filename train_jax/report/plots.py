"""Draws line plots as SVG with matplotlib; the surrounding page or picture sets the colours."""

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from train_jax.report.render import COLOURS, number

COLOUR = {name: colour.light for name, colour in COLOURS.items()}
_VARIABLE = {colour: f"var(--{name})" for name, colour in reversed(COLOUR.items())}
"""Maps matplotlib's colours to CSS variables, so that a plot follows the light or dark mode of the page."""
RC: Any = {
    **{"svg.fonttype": "none", "figure.frameon": False, "font.size": 11},
    **{"lines.linewidth": 1.8, "path.simplify_threshold": 0.5},  # in pixels; limits the size of the page for long runs
    **{f"axes.spines.{side}": False for side in ("left", "right", "top")},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.facecolor": "none", "grid.linewidth": 1},
    **{"text.color": COLOUR["ink"], "grid.color": COLOUR["grid"], "axes.edgecolor": COLOUR["soft"]},
    **{"xtick.color": COLOUR["soft"], "ytick.color": COLOUR["soft"], "ytick.major.size": 0, "ytick.major.pad": 6},
}
LINES = {1: "solid", 2: (0, (5, 1.6)), 3: (0, (1.6, 1.6))}
MARKERS = {1: "o", 2: "s", 3: "^"}
"""Series differ in colour, dashes and markers, so that they can also be distinguished in black and white."""
TOP = 44
RIGHT = 22
BOTTOM = 38
LEFT = 48
"""Margins around the axes in pixels; one pixel is one point."""
FEW_POINTS = 3
STEPS = (1, 2, 5, 10)
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Series:
    """One line: its name in the legend and its points in the order of x."""

    name: str
    points: Points
    colour: int = 1
    """Colour from 1 to 3; also selects dashes and markers."""
    marks: bool = False
    """True if every point has a marker with its value as a tooltip; for values that are measured rarely. A line of few
    points always has them: a single point has no line."""
    labels: Sequence[str] = ()
    """Text beside each point, "" for none. Overlapping labels are omitted."""
    line: bool = True
    """True if a line connects the points."""


@dataclass(frozen=True)
class Band:
    """The area between two lines, shaded behind the series: its name in the legend, its finite edges as (x, y, y)."""

    name: str
    edges: Sequence[tuple[float, float, float]]


def plot(
    series: Sequence[Series],
    *,
    band: Band | None = None,
    title: str,
    x_label: str,
    log_x: bool = False,
    log_y: bool = False,
    y_range: tuple[float, float] | None = None,
    width: float = 440,
    height: float = 250,
) -> Markup:
    """Returns an `<svg>`; "" if there is no point to draw.

    Values that are not finite, or not above 0 on a logarithmic axis, are gaps in the line. With `log_x`, every x is
    above 0.
    """
    series = [replace(each, marks=each.marks or len(each.points) <= FEW_POINTS) for each in series]
    lines = [[(x, y if math.isfinite(y) and (y > 0 or not log_y) else math.nan) for x, y in s.points] for s in series]
    edges = np.array(band.edges if band else np.zeros((0, 3)))
    finite = [point for line in lines for point in line if not math.isnan(point[1])] + edges[:, :2].tolist()
    if not finite:
        return Markup("")
    titles = {
        f"points-{i}": [f"{each.name}: {number(y)} at {number(x)} {x_label}" for x, y in line if not math.isnan(y)]
        for i, (each, line) in enumerate(zip(series, lines, strict=True))
        if each.marks
    }
    with matplotlib.rc_context(RC | {"svg.hashsalt": f"{title} {x_label}"}):
        figure = Figure((width / 72, height / 72), dpi=72)
        place = (LEFT / width, BOTTOM / height, 1 - (LEFT + RIGHT) / width, 1 - (TOP + BOTTOM) / height)
        scales: Any = {"xscale": "log" if log_x else "linear", "yscale": "log" if log_y else "linear"}
        axes = figure.add_axes(place, **scales)
        if band:
            colour = {"color": COLOUR["soft"], "alpha": 0.28, "linewidth": 0}
            axes.fill_between(*edges.T, label=band.name, gid="band", **colour)
            titles["band"] = []
        _draw(axes, series, lines)
        _scale(axes, [x for x, _ in finite], log_x, log_y, y_range)
        figure.text(0, 1 - 14 / height, title, weight=700, size=13)
        figure.text(1 - RIGHT / width, 5 / height, x_label, color=COLOUR["soft"], ha="right")
        if len(series) > 1 or band:
            room = {"borderpad": 0, "borderaxespad": 0, "handlelength": 2.4, "handletextpad": 0.5, "columnspacing": 1.2}
            place = {"loc": "upper left", "bbox_to_anchor": (0, 1 - 22 / height)}
            figure.legend(ncols=9, frameon=False, labelcolor=COLOUR["soft"], **room, **place)
        _write_labels(axes, [pair for each in series for pair in zip(each.points, each.labels, strict=False)])
        return _svg(figure, _alternative(title, x_label, series, lines), titles)


def _draw(axes: Axes, series: Sequence[Series], lines: Sequence[Sequence[tuple[float, float]]]) -> None:
    for i, (each, line) in enumerate(zip(series, lines, strict=True)):
        style = {"color": COLOUR[f"s{each.colour}"], "linestyle": LINES[each.colour], "markersize": 5.2}
        style |= {} if each.line else {"linestyle": "none"}
        marker = MARKERS[each.colour] if each.marks else ""
        axes.plot(*np.reshape(line, (-1, 2)).T, label=each.name, marker=marker, gid=f"points-{i}", **style)


def _scale(axes: Axes, xs: Sequence[float], log_x: bool, log_y: bool, y_range: tuple[float, float] | None) -> None:
    """Sets limits and ticks: x starts at 0 unless it is logarithmic, y ends at ticks.

    Ticks are 1, 2 or 5 times a power of ten, over many decades the powers of ten.
    """
    if log_x:
        axes.set_xlim(min(xs) / 1.2, max(xs) * 1.2)
        axes.xaxis.set_minor_locator(NullLocator())
        if max(xs) < 10 * min(xs):  # then there may be no power of ten
            axes.set_xticks(sorted(set(xs))[:: -(-len(set(xs)) // 6)])
    else:
        axes.set_xlim(min(0, *xs), max(xs) if max(xs) > min(0, *xs) else 1)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    low, high = map(float, y_range or axes.dataLim.intervaly)
    if low == high:
        low, high = (low / 2, high * 2) if log_y else (min(0, 2 * low), max(0, 2 * high) or 1)
    multiples = (1, 2, 5) if high < 100 * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) if log_y else ()
    ticks = [float(f"{m}e{p}") for p in powers for m in multiples] or MaxNLocator(5, steps=STEPS).tick_values(low, high)
    ticks = np.asarray(ticks)
    slack = 0 if log_y else 1e-9 * (high - low)
    ticks = ticks[np.sum(ticks <= low + slack) - 1 : np.sum(ticks < high - slack) + 1]
    axes.set_ylim(ticks[0], ticks[-1])
    axes.set_yticks(ticks[:: -(-len(ticks) // 8)])
    axes.yaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _write_labels(axes: Axes, labels: Sequence[tuple[tuple[float, float], str]]) -> None:
    """Writes labels to the lower right of their points, where a rising curve leaves space, or above near the axis.

    A label that would overlap an earlier one is omitted.
    """
    taken = []
    for point, text in labels:
        if text:
            style = {"color": COLOUR["soft"], "size": 10.5, "gid": "label"}
            label = axes.annotate(text, point, (5, -12), textcoords="offset points", **style)
            box = label.get_window_extent()
            beyond = max(0, box.x1 - axes.figure.bbox.x1)
            label.set_position((5 - beyond, -12 if box.y0 > axes.bbox.y0 else 5))
            box = label.get_window_extent()
            if box.count_overlaps(taken):
                label.remove()
            else:
                taken.append(box)


def _alternative(title: str, x_label: str, series: Sequence[Series], lines: Sequence[Points]) -> str:
    """Returns the text alternative: the first and the last value of each line."""
    parts = []
    for each, line in zip(series, lines, strict=True):
        drawn = [(x, y) for x, y in line if not math.isnan(y)]
        if drawn:
            first, last = (f"{number(float(f'{y:.3g}'))} at {number(x)}" for x, y in (drawn[0], drawn[-1]))
            parts.append(f"{each.name or 'the line'} from {first} to {last}")
    return f"{title}, over {x_label}: {'; '.join(parts)}"


def _svg(figure: Figure, label: str, titles: Mapping[str, Sequence[str]]) -> Markup:
    """Converts matplotlib's SVG for a page: colours and font of the page, a text alternative, only ids of markers.

    `titles` are the tooltips of the marks in the group with that id, which becomes its class.
    """
    file = StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(file.getvalue())
    for child in (*root.findall(f"{{{SVG}}}metadata"), *root.findall(f"{{{SVG}}}defs")):
        root.remove(child)  # metadata, clip paths, and a style that would apply to the whole page
    for element in root.iter():
        element.text, element.tail = ((text or "").strip() or None for text in (element.text, element.tail))
        element.attrib.pop("clip-path", None)
        for name in {"d", "x", "y"} & element.attrib.keys():
            text = " ".join(element.attrib[name].split())
            element.set(name, re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.1f}", text))
        if "style" in element.attrib:
            style = re.sub(r"font-family: [^;]*;? ?", "", element.get("style", ""))
            element.set("style", re.sub("#[0-9a-f]{6}", lambda m: _VARIABLE.get(m[0], m[0]), style))
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        if element.tag == f"{{{SVG}}}g":
            name = element.attrib.pop("id", "")
            if name in titles or name == "label":
                element.set("class", name)
    for name, texts in titles.items():
        group = root.find(f".//*[@class='{name}']")
        marks = [] if group is None else group.findall(f".//{{{SVG}}}use") or group.findall(f".//{{{SVG}}}path")
        for mark, text in zip(marks, texts, strict=False):
            ElementTree.SubElement(mark, f"{{{SVG}}}title").text = text
    size = {"width": f"{72 * figure.get_figwidth():g}", "height": f"{72 * figure.get_figheight():g}"}
    root.attrib = {"class": "plot", "viewBox": root.get("viewBox", ""), **size, "role": "img", "aria-label": label}
    return Markup(ElementTree.tostring(root, encoding="unicode"))
