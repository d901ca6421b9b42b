"""Reads the JSON files of a run: every field has the expected kind, or one line says what is wrong.

A run folder may be damaged by a loss of power, a full disk or an editor, and may come from somebody else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_jax.errors import UserError, brief
from train_jax.storage.untrusted import DamagedError, read_whole

_LARGEST = 2**63
"""Numbers are below this, so that they can be formatted, and added, as floats and as durations."""
_LARGEST_BYTES = 2**28


@dataclass(frozen=True)
class Kind:
    """The values that a field may have."""

    name: str
    fits: Callable[[Any], bool]
    optional: bool = False
    """True if the field may be missing."""


def optional(kind: Kind) -> Kind:
    return Kind(kind.name, kind.fits, optional=True)


def list_of(kind: Kind) -> Kind:
    return Kind(f"a list, each {kind.name}", lambda value: isinstance(value, list) and all(map(kind.fits, value)))


def object_of(kind: Kind) -> Kind:
    return Kind(
        f"an object, each value {kind.name}",
        lambda value: isinstance(value, dict) and all(map(kind.fits, value.values())),
    )


def record_of(fields: Mapping[str, Kind], others: Kind | None = None) -> Kind:
    """Returns the kind of the objects with these fields; `others` is the kind of further ones, None for any."""
    return Kind("an object", lambda value: not misfit(value, fields, others))


def _is_number(value: Any) -> bool:
    return _is_finite(value) or (isinstance(value, float) and not math.isfinite(value))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


NUMBER = Kind("a number", _is_number)
"""Also NaN and infinities, which a loss may be."""
FINITE = Kind("a finite number", _is_finite)
COUNT = Kind("a whole number from 0", lambda value: _is_finite(value) and value >= 0 and value == int(value))
TEXT = Kind("text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))


def misfit(value: Any, fields: Mapping[str, Kind], others: Kind | None = None) -> str:
    """Returns why a value is no object with these fields; empty if it is one. `others`: as of `record_of`."""
    if not isinstance(value, dict):
        return f"it is {brief(value)}, expected an object"
    for name, kind in fields.items():
        if name not in value and not kind.optional:
            return f"{name} is missing"
    for name, each in value.items():
        kind = fields.get(name, others)
        if kind is not None and not kind.fits(each):
            return f"{name[:40]} is {brief(each)}, expected {kind.name}"
    return ""


def read_object(path: Path, fields: Mapping[str, Kind], *, remedy: str, others: Kind | None = None) -> dict[str, Any]:
    """Reads an object with these fields, of which `others` are of one kind. Raises `UserError` with the remedy."""
    try:
        content = json.loads(read_whole(path, largest_bytes=_LARGEST_BYTES))
        reason = misfit(content, fields, others)
    except FileNotFoundError as error:
        reason = error.strerror
    except (DamagedError, ValueError, RecursionError) as error:
        reason = str(error)[:100]
    if reason:
        raise UserError(f"{path} cannot be read ({reason}); {remedy}")
    return content


def find_object(
    path: Path, fields: Mapping[str, Kind], *, remedy: str, others: Kind | None = None
) -> dict[str, Any] | None:
    """Reads an object as `read_object` does; None if there is no file."""
    return read_object(path, fields, remedy=remedy, others=others) if path.exists() else None
