"""Marks the cases of a parametrized test that run by default, and those that run only with `-m slow`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def slow_unless(fast: Callable[[Any], bool], values: Iterable[Any]) -> list:
    """Returns the values for `pytest.mark.parametrize`; those for which `fast` is false are marked slow."""
    return [value if fast(value) else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_or_campaign(slow: Iterable[Any], campaign: Iterable[Any]) -> list:
    """The values for `pytest.mark.parametrize`: the first ones are marked slow, the others belong to a campaign."""
    return [
        *(pytest.param(value, marks=pytest.mark.slow) for value in slow),
        *(pytest.param(value, marks=pytest.mark.campaign) for value in campaign),
    ]
