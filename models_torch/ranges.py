"""Declared ranges of configuration fields, and the function that checks them.

A frozen dataclass declares the accepted values of a field in its annotation:

    lr: Annotated[float, Range(0, 1)] = 1e-4
    optimizer: Annotated[str, Choices(("adamw", "lion"))] = "adamw"

and calls `check_ranges(self)` in `__post_init__`. Command-line parsers ignore the metadata.
"""

import math
import numbers
import types
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, fields
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """The numbers that a field accepts: from `low` to `high`, inclusive. NaN and infinities are never accepted."""

    low: float
    high: float = math.inf
    _: KW_ONLY
    low_excluded: bool = False
    high_excluded: bool = False
    expected: str = ""  # replaces the bounds in an error message: "use {expected}"
    why: str = ""  # the reason for a missing bound; required if one is missing

    def __post_init__(self):
        if not (math.isfinite(self.low) and math.isfinite(self.high)) and not self.why:
            raise ValueError(
                f"a range from {self.low} to {self.high} has no finite bound; give a bound, or the reason in `why`"
            )

    def accepts(self, value: Any) -> bool:
        """Returns whether the number `value` is in the range."""
        above = self.low < value if self.low_excluded else self.low <= value
        below = value < self.high if self.high_excluded else value <= self.high
        return above and below and _is_finite(value)

    def advice(self, value: Any, kind: str) -> str:
        """Returns what to use instead of `value` (None if not a number); `kind` is "value" or "whole number"."""
        if self.expected:
            return self.expected
        open_ended = self.low_excluded or self.high_excluded
        if value is not None and not open_ended and value < self.low:
            return f"at least {self.low}"
        if value is not None and not open_ended and value > self.high:
            return f"at most {self.high}"
        low = f"above {self.low}" if self.low_excluded else f"from {self.low}"
        if math.isinf(self.high):
            return f"a finite {kind} {low}"
        return f"a {kind} {low} to {'below ' if self.high_excluded else ''}{self.high}"


@dataclass(frozen=True)
class Choices:
    """The values that a field accepts."""

    allowed: tuple[Any, ...]


@dataclass(frozen=True)
class FieldRule:
    """The values that a field accepts, from its annotation."""

    base: Any  # bool, int, float, str or another type; for a tuple the type of its elements
    declared: Range | Choices | None
    optional: bool  # true if None is accepted
    repeated: bool  # true if the field is a tuple, whose elements are all checked


def check_ranges(config: Any) -> None:
    """Checks every field of the dataclass instance `config` against its declared range; nested dataclasses are skipped.

    Raises ValueError with one line for an invalid value: "L_cycles is 0; use at least 1". Raises TypeError for a class
    that declares an int or a float without a `Range`.
    """
    for name, rule in field_rules(type(config)).items():
        value = getattr(config, name)
        if rule.repeated and not isinstance(value, tuple | list):
            raise ValueError(f"{name} is {value!r}; use a sequence")
        for element in value if rule.repeated else (value,):
            if advice := _advice(element, rule):
                raise ValueError(f"{name} is {value!r}; use {advice}")


@cache
def field_rules(config_class: type) -> dict[str, FieldRule]:
    """Returns the rule of each field of a dataclass, by name.

    Raises TypeError for an int or a float without a `Range`.
    """
    hints = get_type_hints(config_class, include_extras=True)
    rules = {each.name: _rule(hints[each.name]) for each in fields(config_class)}
    for name, rule in rules.items():
        if rule.base in (int, float) and not isinstance(rule.declared, Range | Choices):
            kind = rule.base.__name__
            raise TypeError(f"{config_class.__name__}.{name} has no range; declare Annotated[{kind}, Range(low, high)]")
    return rules


def _rule(hint: Any) -> FieldRule:
    base, metadata, optional = _unwrap(hint)
    repeated = get_origin(base) is tuple
    if repeated:
        base, of_elements, _ = _unwrap(get_args(base)[0])
        metadata += of_elements
    if get_origin(base) is Literal:
        metadata.append(Choices(get_args(base)))
    declared = next((each for each in metadata if isinstance(each, Range | Choices)), None)
    return FieldRule(base, declared, optional, repeated)


def _unwrap(hint: Any) -> tuple[Any, list[Any], bool]:
    """Returns the type inside `Annotated` and `| None`, the metadata, and whether None is accepted."""
    metadata = []
    optional = False
    while True:
        arguments = get_args(hint)
        if get_origin(hint) is Annotated:
            hint = arguments[0]
            metadata += arguments[1:]
        elif get_origin(hint) in (Union, types.UnionType) and len(arguments) == 2 and types.NoneType in arguments:
            hint = arguments[0] if arguments[1] is types.NoneType else arguments[1]
            optional = True
        else:
            return hint, metadata, optional


def _advice(value: Any, rule: FieldRule) -> str:
    """Returns what to use instead of `value`; empty if it is accepted."""
    if value is None and rule.optional:
        return ""
    if rule.base is bool:
        return "" if isinstance(value, bool) else "True or False"
    if rule.base is str and not isinstance(value, str):
        return "text"
    if get_origin(rule.base) is dict and not isinstance(value, dict):
        return "an object of values by name"
    if isinstance(rule.declared, Choices):
        allowed = rule.declared.allowed
        return "" if _is_one_of(value, allowed) else f"one of {', '.join(str(each) for each in allowed)}"
    if isinstance(rule.declared, Range):
        whole = rule.base is int
        kind = "whole number" if whole else "value"
        is_number = isinstance(value, numbers.Integral if whole else numbers.Real) and not isinstance(value, bool)
        if not is_number:
            return rule.declared.advice(None, kind)
        return "" if rule.declared.accepts(value) else rule.declared.advice(value, kind)
    return ""


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer above the largest float
        return False


def _is_one_of(value: Any, allowed: Iterable[Any]) -> bool:
    # `1 == True` and `1 == 1.0`, and an unhashable value from a JSON file must not raise.
    return any(type(value) is type(each) and value == each for each in allowed)
