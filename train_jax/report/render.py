"""Renders templates. All values are escaped, except the `Markup` of other templates and drawings."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from train_jax.report.figures import number, percent, printable, shown, spelled
from train_jax.report.theme import CELLS, COLOURS

_ENVIRONMENT = Environment(
    loader=PackageLoader("train_jax.report"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.globals |= {"colours": COLOURS, "cells": CELLS}
_ENVIRONMENT.filters |= {
    "number": number,
    "percent": percent,
    "shown": shown,
    "spelled": spelled,
    "printable": printable,
}


def render(template: str, **values: Any) -> Markup:
    """Renders a part of a page; `template` is a file in `templates/`."""
    return Markup(render_document(template, **values))


def render_document(template: str, **values: Any) -> str:
    """Like `render`, but returns a plain string, because `Markup` escapes what is added to it."""
    return _ENVIRONMENT.get_template(template).render(values)
