"""The presets of all plugins, by name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from train_jax.errors import UserError
from train_jax.plugin import load_object, own_plugins, users_plugins
from train_jax.run.config import RunConfig


class Presets(Mapping[str, RunConfig]):
    """Runs by name. A table may know more names than it lists; one that says nothing about a run may be a dict."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def heading(self, name: str, config: RunConfig) -> str:
        """Returns what is printed before a run, instead of its plan in a dry run; empty for nothing."""
        return ""

    def examples_per_epoch(self, name: str, config: RunConfig, base: str | None) -> float | None:
        """Returns the examples of an epoch if they are known without the data; `base` is the value of `--preset`."""
        return None

    def notes(self, name: str) -> Sequence[str]:
        """Returns lines at the end of the plan of a run."""
        return ()


def tables() -> Iterator[Mapping[str, RunConfig]]:
    """Yields the tables of all plugins, each imported when it is reached."""
    for plugins in (own_plugins, users_plugins):
        for target in [target for plugin in plugins() for target in plugin.presets]:
            table: Any = load_object(target, "presets")
            if callable(table):
                table = table()
            yield table


def table_of(name: str) -> Mapping[str, RunConfig] | None:
    """Returns the table that has a preset; None for an unknown name."""
    return next((table for table in tables() if name in table), None)


def preset_names() -> list[str]:
    """Returns the name of every preset that a table lists, in their order. No preset is built."""
    return [name for table in tables() for name in table]


def listed_presets(*, by_depth: bool = False) -> str:
    """Returns the names as text; from names that differ only in their depth, it has the first and the last.

    With `by_depth`, only such names.
    """
    grouped = itertools.groupby(preset_names(), key=lambda name: re.sub(r"\bd\d+", "d", name))
    groups = [list(names) for _, names in grouped]
    groups = [names for names in groups if len(names) > 1 or not by_depth]
    return ", ".join(names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" for names in groups)


def find_preset(name: str) -> RunConfig | None:
    """Returns a preset; None for an unknown name. Raises `UserError` for a depth that has no run."""
    table = table_of(name)
    return None if table is None else table[name]


def preset(name: str) -> RunConfig:
    """Returns the run of a preset or of an experiment. Raises `UserError` for an unknown name."""
    config = find_preset(name)
    if config is None:
        raise UserError(f"unknown preset {name!r}; use one of {listed_presets()}, or an experiment of `trm sweep list`")
    return config
