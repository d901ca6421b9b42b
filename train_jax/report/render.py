"""Templates into text. Everything that a template is given is escaped, unless a template or a drawing made it."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from train_jax.report.figures import number, percent, shown, spelled
from train_jax.report.theme import CELLS, COLOURS

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
    """A part of a page; `template`: a file of `templates/`."""
    return Markup(render_document(template, **values))


def render_document(template: str, **values: Any) -> str:
    """The same as a plain string: `Markup` escapes what is added to it."""
    return _ENVIRONMENT.get_template(template).render(values)
