"""Formats numbers and values for a reader."""

import math
from typing import Any


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


def printable(text: str) -> str:
    """Replaces control characters, which a model may write, by U+FFFD, except for line ends and tabs."""
    return "".join(x if x.isprintable() or x in "\n\t " else "\ufffd" for x in text)
