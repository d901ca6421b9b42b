"""Plots: every value in its place, read without colour, in the colours of a light or dark page."""

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from train_jax.report.plots import Band, Series, plot
from train_jax.report.render import number, spelled


def drawn(*series: Series, **options) -> ElementTree.Element:
    return ElementTree.fromstring(plot(series, title="t", x_label="x", **options))


def group(root: ElementTree.Element, name: str) -> ElementTree.Element:
    return next(each for each in root.findall(".//{*}g") if each.get("class") == name)


def ticks(root: ElementTree.Element) -> list[str]:
    """Returns the labels of the y axis, from below."""
    return [each.text or "" for each in root.findall(".//{*}text") if "text-anchor: end" in each.get("style", "")][:-1]


def heights(path: ElementTree.Element) -> list[float]:
    return [float(y) for y in re.findall(r"[ML] [\d.]+ (-?[\d.]+)", path.get("d", ""))]


@pytest.mark.parametrize(
    ("low", "high", "log_y", "expected"),
    [
        (0, 100, False, "0 20 40 60 80 100"),
        (0.0031, 0.0094, False, "2e-3 4e-3 6e-3 8e-3 0.01"),
        (3.0, 3.1, False, "3 3.05 3.1"),
        (5, 5, False, "0 2 4 6 8 10"),
        (0.07, 1.6, True, "0.05 0.1 0.2 0.5 1 2"),
        (1e-9, 1e9, True, "1e-9 1e-6 1e-3 1 1,000 1e6 1e9"),
        (3.0, 3.1, True, "2 5"),
        (5, 5, True, "2 5 10"),
    ],
)
def test_ticks_are_round_and_cover_the_data(low, high, log_y, expected):
    assert ticks(drawn(Series("a", [(1, low), (2, high)]), log_y=log_y)) == expected.split()


def test_numbers_are_written_short():
    assert [number(x) for x in (0, 0.3, 12_000, 1e-4, 1.2e-3, 2e7)] == ["0", "0.3", "12,000", "1e-4", "1.2e-3", "2e7"]
    assert [spelled(x) for x in (47.2, 224, 7500)] == ["47 s", "3 min 44 s", "2 h 5 min"]


def test_a_band_lies_behind_the_lines_and_inside_the_axes():
    band = Band("<b>", [(0, 1, 4), (10, 2, 6)])
    drawing = plot([Series("a", [(0, 2), (10, 3)])], band=band, title="t", x_label="x")
    assert drawing.index('class="band"') < drawing.rindex("var(--s1)")
    assert "&lt;b&gt;" in drawing and "<b>" not in drawing
    outline = group(ElementTree.fromstring(drawing), "band")
    bottom = float(outline.findall(".//{*}use")[0].get("y", "nan"))
    high_left, low_left, low_right, high_right = (bottom + y for y in heights(outline.findall(".//{*}path")[0])[:4])
    assert 212 >= low_left > low_right > high_left > high_right >= 42


@pytest.mark.parametrize("log_y", [False, True])
@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5, 0.5], [0.0, 0.0], [1.0, math.nan, 2.0], [1.0, math.inf, -1.0]])
def test_every_curve_can_be_drawn(values, log_y):
    points = list(enumerate(values, 1))
    drawing = plot([Series("a", points, marks=True)], title="t", x_label="x", log_y=log_y)
    if not drawing:
        assert log_y and max(values) == 0
        return
    root = ElementTree.fromstring(drawing)
    coordinates = [value for each in root.iter() for name, value in each.items() if name in ("x", "y")]
    assert all(math.isfinite(float(value)) for value in coordinates)
    assert "nan" not in drawing and "inf" not in drawing
    finite = [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not log_y)]
    titles = [each.findtext("{*}title") for each in group(root, "points-0").findall(".//{*}use")]
    assert titles == [f"a: {number(y)} at {x} x" for x, y in finite]


def test_a_long_curve_is_thinned_and_keeps_its_peaks():
    points = [(float(x), 1.0) for x in range(50_000)]
    points[31_234] = (31_234.0, 9.0)
    drawing = plot([Series("a", points)], title="t", x_label="x")
    assert len(drawing) < 20_000
    lines = [each for each in ElementTree.fromstring(drawing).findall(".//{*}path") if "--s1" in each.get("style", "")]
    levels = set(heights(lines[0]))
    assert max(levels) - min(levels) > 100
    noise = np.random.default_rng(0).normal(size=50_000)
    assert len(plot([Series("a", list(enumerate(noise.tolist())))], title="t", x_label="x")) < 60_000


def test_points_are_labelled_where_there_is_room():
    points, labels = [(1.0, 1.0), (1.001, 1.0), (3.0, 2.0), (4.0, 2.0)], ("one", "two", "", "4<")
    root = drawn(Series("a", points, marks=True, labels=labels))
    texts = [each.find("{*}text") for each in root.findall(".//{*}g") if each.get("class") == "label"]
    assert [each.text for each in texts if each is not None] == ["one", "4<"]
    assert texts[-1] is not None and float(texts[-1].get("x", "nan")) + 6.4 * 2 <= 440


def test_a_drawing_follows_the_page_and_is_the_same_every_time():
    series = [Series("a", [(0, 1), (5, 30)]), Series("b", [(0, 2)], 2, True)]
    drawing = plot(series, title="t, %", x_label="steps")
    assert drawing == plot(series, title="t, %", x_label="steps")
    assert not re.search("#[0-9a-f]{6}|font-family|date", drawing)
    root = ElementTree.fromstring(drawing)
    assert root.get("aria-label") == "t, %, over steps: a from 1 at 0 to 30 at 5; b from 2 at 0 to 2 at 0"
    ids = re.findall(' id="([^"]*)"', drawing)
    others = re.findall(' id="([^"]*)"', plot(series, title="t, %", x_label="minutes"))
    assert ids and not set(ids) & set(others), "two drawings of a page must not share an id"


def marks(root: ElementTree.Element) -> list[float]:
    """Returns the horizontal places of the markers of the first series."""
    return [float(each.get("x", "nan")) for each in group(root, "points-0").findall(".//{*}use")]


def test_a_logarithmic_axis_has_equal_steps_for_equal_ratios():
    first, second, third = marks(drawn(Series("a", [(10, 1), (100, 2), (1000, 3)]), log_x=True))
    assert second - first == pytest.approx(third - second, abs=0.2)
    near = plot([Series("a", [(20, 1), (30, 2)])], title="t", x_label="x", log_x=True)
    assert ">20<" in near and ">30<" in near, "between powers of ten, the values themselves are ticks"


def test_series_differ_in_more_than_colour_and_may_have_points_without_a_line():
    series = [Series(name, [(0, 1), (1, 2), (2, 1), (3, 2)], n, True) for n, name in enumerate("abc", 1)]
    groups = [group(drawn(*series), f"points-{n}") for n in range(3)]
    dashes = [
        re.findall(r"stroke-dasharray: ([\d.,]+)", each.findall(".//{*}path")[0].get("style", "")) for each in groups
    ]
    assert dashes[0] == [] and len({str(each) for each in dashes}) == 3
    assert len({each.findall("{*}defs/{*}path")[0].get("d") for each in groups}) == 3
    without = drawn(replace(series[0], line=False))
    assert marks(without) == marks(drawn(series[0]))
    assert len(group(without, "points-0").findall(".//{*}path")) == len(groups[0].findall(".//{*}path")) - 1
    # A line of many points has markers only if that is asked; a single point has no line.
    many = drawn(Series("a", [(x, 2) for x in range(20)]))
    assert "points-0" not in {each.get("class") for each in many.iter()}
    assert len(marks(drawn(Series("a", [(10, 2)])))) == 1
