"""Templates, colours and formats of numbers for all pages and drawings.

All values in templates are escaped, except the `Markup` of other templates and drawings.
"""

import math
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


class Colour(NamedTuple):
    """A colour on a light background, on a dark background, and in a terminal."""

    light: str
    dark: str
    ansi: int = 0
    """One of the 256 terminal colours; only for colours that fill cells."""


CELLS = {
    "wall": Colour("#4b5058", "#8b929e", 240),
    "path": Colour("#4a8fe6", "#3f77c4", 75),
    "end": Colour("#f2b84b", "#8a5f14", 215),
    "arc0": Colour("#1d1f23", "#0b0c0e", 233),
    "arc1": Colour("#1e7fd6", "#1e7fd6", 32),
    "arc2": Colour("#e8443a", "#e8443a", 203),
    "arc3": Colour("#3fae49", "#3fae49", 71),
    "arc4": Colour("#f4cf26", "#f4cf26", 220),
    "arc5": Colour("#a3a7ad", "#a3a7ad", 248),
    "arc6": Colour("#d936a8", "#d936a8", 169),
    "arc7": Colour("#f28a30", "#f28a30", 208),
    "arc8": Colour("#7fd3ee", "#7fd3ee", 117),
    "arc9": Colour("#8f2438", "#8f2438", 88),
}
"""The names that `Kind.colour` returns. The ten colours of ARC are in ARC's order: black, blue, red, green, yellow,
grey, magenta, orange, light blue, maroon."""

COLOURS = {
    "paper": Colour("#ffffff", "#15171b"),
    "card": Colour("#f7f7f5", "#1d2026"),
    "ink": Colour("#1d2025", "#e8e8e4"),
    "soft": Colour("#62676f", "#9ba1ab"),
    "rule": Colour("#dcdcd6", "#363b43"),
    "grid": Colour("#ebebe7", "#272b31"),
    "s1": Colour("#2563c9", "#7fabff"),
    "s2": Colour("#c25a05", "#f2a65a"),
    "s3": Colour("#23815a", "#63c99a"),
    "answer": Colour("#2563c9", "#8fb5ff"),
    "wrong": Colour("#b3261e", "#ff8a80"),
    "wrong-tint": Colour("#fbdfdc", "#4f2523"),
    "changed-tint": Colour("#e3ecfb", "#24324c"),
    **CELLS,
}
"""Colours of pages and pictures; each is a CSS variable of the same name. `s1` to `s3` are the series of a plot."""


def number(value: float) -> str:
    """Formats a number with up to six digits: `0.3`, `12,000`, `1e-4`."""
    if value == 0 or 1e-2 <= abs(value) < 1e6:
        return f"{value:,.6g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"


def spelled(seconds: float) -> str:
    """Formats a duration with its units: `47 s`, `3 min 44 s`, `2 h 5 min`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600:,} h {seconds % 3600 // 60} min"


def shown(value: Any) -> str:
    """Formats a value of a configuration: lists with commas, large numbers with separators."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)


_ENVIRONMENT = Environment(
    loader=PackageLoader("train_jax.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals |= {"colours": COLOURS, "cells": CELLS}
_ENVIRONMENT.filters |= {"number": number, "percent": percent, "shown": shown, "spelled": spelled}


def render(template: str, **values: Any) -> Markup:
    """Renders a part of a page; `template` is a file in `templates/`."""
    return Markup(render_document(template, **values))


def render_document(template: str, **values: Any) -> str:
    """Renders a document like `render`, but as a plain string, because `Markup` escapes what is added to it."""
    return _ENVIRONMENT.get_template(template).render(values)
