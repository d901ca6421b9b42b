"""The presets of all tasks, by name."""

import itertools
import re

from train_jax.errors import UserError
from train_jax.plugins import load_plugin
from train_jax.run.config import RunConfig

PRESETS = (
    "train_jax.tasks.puzzles.presets:PRESETS",
    "train_jax.tasks.language.presets:PRESETS",
)
"""Presets of each task, as `package.module:NAME` of a mapping; imported in this order until one has the name."""


def preset_names() -> list[str]:
    """Returns the name of every preset, in the order of the tasks. No preset is built."""
    return [name for table in PRESETS for name in load_plugin(table, "presets")]


def listed_presets() -> str:
    """Returns the names as text; from names that differ only in their depth, it has the first and the last."""
    by_depth = itertools.groupby(preset_names(), key=lambda name: re.sub(r"\bd\d+", "d", name))
    groups = [list(names) for _, names in by_depth]
    return ", ".join(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in groups)


def find_preset(name: str) -> RunConfig | None:
    """Returns a preset; None for an unknown name. Raises `UserError` for a depth that has no run."""
    found = (load_plugin(table, "presets").get(name) for table in PRESETS)
    return next((config for config in found if config is not None), None)


def preset(name: str, or_else: str = "") -> RunConfig:
    """Returns a preset. Raises `UserError` for an unknown name; `or_else` is the end of the message."""
    config = find_preset(name)
    if config is None:
        raise UserError(f"unknown preset {name!r}; use one of {listed_presets()}{or_else}")
    return config
