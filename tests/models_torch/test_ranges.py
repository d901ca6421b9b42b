"""Declared ranges: what is accepted, what the one line of a refusal says, and that nothing is left undeclared."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from models_torch import registry
from models_torch.outside import OutsideConfig
from models_torch.outside_language import OutsideLanguageConfig
from models_torch.ranges import Choices, Range, check_ranges, field_rules

CONFIG_CLASSES = [each.config_class for each in registry.ARCHITECTURES.values()] + [
    OutsideConfig,
    OutsideLanguageConfig,
]


@dataclass(frozen=True)
class Nested:
    size: int = -1  # has no range: must not be looked at


@dataclass(frozen=True)
class Example:
    count: Annotated[int, Range(1, 10)] = 1
    rate: Annotated[float, Range(0, why="nothing breaks however large it is")] = 0.0
    decay: Annotated[float, Range(0, 1, high_excluded=True)] = 0.5
    seconds: Annotated[float, Range(0, 60, low_excluded=True)] = 1.0
    share: Annotated[float, Range(0, 1, expected="a share of the rate, from 0 to 1")] = 0.0
    end: Annotated[float | None, Range(0, 1)] = None
    start: Annotated[float, Range(0, 1)] | None = None
    depth: Annotated[tuple[int, int], Range(1, 4)] = (1, 2)
    widths: tuple[Annotated[int, Range(1, 4)], ...] = ()
    mode: Annotated[str, Choices(("fast", "exact"))] = "fast"
    runner: Literal["pmap", "shard_map"] = "pmap"
    verbose: bool = False
    folder: str = ""
    nested: Nested = Nested()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        check_ranges(self)


@pytest.mark.parametrize(
    "values",
    [
        {"count": 10, "rate": 3, "decay": 0, "seconds": 60.0},
        {"count": np.int64(2), "rate": np.float32(0.5)},
        {"end": 1.0, "start": 0, "depth": (4, 1), "widths": (1, 2, 3)},
        {"mode": "exact", "runner": "shard_map", "verbose": True, "folder": "anything"},
        {"rate": 1e308},
    ],
)
def test_values_in_range_are_accepted(values):
    Example(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count is 0; use at least 1"),
        ({"count": 11}, "count is 11; use at most 10"),
        ({"count": 10**400}, "count is 1000.*; use at most 10"),
        ({"count": 1.0}, "count is 1.0; use a whole number from 1 to 10"),
        ({"count": True}, "count is True; use a whole number from 1 to 10"),
        ({"count": "2"}, "count is '2'; use a whole number from 1 to 10"),
        ({"count": None}, "count is None; use a whole number from 1 to 10"),
        ({"rate": -1.0}, "rate is -1.0; use at least 0"),
        ({"rate": math.nan}, "rate is nan; use a finite value from 0"),
        ({"rate": math.inf}, "rate is inf; use a finite value from 0"),
        ({"rate": -math.inf}, "rate is -inf; use at least 0"),
        ({"rate": 10**400}, "rate is 1000.*; use a finite value from 0"),
        ({"decay": 1.0}, "decay is 1.0; use a value from 0 to below 1"),
        ({"decay": math.nan}, "decay is nan; use a value from 0 to below 1"),
        ({"seconds": 0.0}, "seconds is 0.0; use a value above 0 to 60"),
        ({"share": 1.5}, "share is 1.5; use a share of the rate, from 0 to 1"),
        ({"share": "all"}, "share is 'all'; use a share of the rate, from 0 to 1"),
        ({"end": 1.5}, "end is 1.5; use at most 1"),
        ({"start": -0.5}, "start is -0.5; use at least 0"),
        ({"depth": (1, 5)}, r"depth is \(1, 5\); use at most 4"),
        ({"depth": 3}, "depth is 3; use a sequence"),
        ({"widths": (0,)}, r"widths is \(0,\); use at least 1"),
        ({"mode": "slow"}, "mode is 'slow'; use one of fast, exact"),
        ({"mode": []}, r"mode is \[\]; use one of fast, exact"),
        ({"runner": "vmap"}, "runner is 'vmap'; use one of pmap, shard_map"),
        ({"verbose": "false"}, "verbose is 'false'; use True or False"),
    ],
)
def test_a_refused_value_is_named_with_what_to_use(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Example(**values)


def test_a_number_without_a_range_is_a_mistake_in_the_class():
    with pytest.raises(TypeError, match=r"Nested.size has no range; declare Annotated\[int, Range\(low, high\)\]"):
        check_ranges(Nested())


@pytest.mark.parametrize("bounds", [(0,), (-math.inf, 1), (0, math.nan)])
def test_a_range_without_a_finite_bound_says_why(bounds):
    with pytest.raises(ValueError, match="has no finite bound; give a bound, or the reason"):
        Range(*bounds)


def numeric_fields(config_class):
    return {name: rule for name, rule in field_rules(config_class).items() if rule.base in (int, float)}


@pytest.mark.parametrize("config_class", CONFIG_CLASSES, ids=lambda each: each.__name__)
def test_every_field_of_every_model_refuses_what_is_out_of_range(config_class):
    fields = numeric_fields(config_class)
    assert fields.keys() >= {"batch_size", "seq_len", "vocab_size"}
    for name, rule in fields.items():
        beyond = 2 * rule.declared.high
        for value in (rule.declared.low - 1, beyond, math.nan, math.inf, -math.inf, "", None):
            with pytest.raises(ValueError, match=f"^{name} is .*; use [^\n]*$"):
                config_class(**{name: value})
    for name in set(field_rules(config_class)) - set(fields) - {"options"}:
        with pytest.raises(ValueError, match=f"^{name} is ''; use [^\n]*$"):
            config_class(**{name: ""})
