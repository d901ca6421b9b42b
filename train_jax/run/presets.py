"""The presets of all tasks, by name."""

from train_jax.errors import UserError
from train_jax.plugins import load_plugin
from train_jax.run.config import RunConfig

PRESETS = (
    "train_jax.tasks.puzzles.presets:PRESETS",
    "train_jax.tasks.language.presets:PRESETS",
)
"""The presets of each task, as `package.module:NAME`: a dict of `RunConfig` by name. Imported in this order, until one
has the name that is asked for."""


def all_presets() -> dict[str, RunConfig]:
    """Returns every preset by name, in the order of the tasks."""
    presets: dict[str, RunConfig] = {}
    for name in PRESETS:
        presets |= load_plugin(name, "presets")
    return presets


def preset(name: str, or_else: str = "") -> RunConfig:
    """Returns a preset. Raises `UserError` for an unknown name; `or_else` is the end of the message."""
    for table in PRESETS:
        presets = load_plugin(table, "presets")
        if name in presets:
            return presets[name]
    raise UserError(f"unknown preset {name!r}; use one of {', '.join(all_presets())}{or_else}")
