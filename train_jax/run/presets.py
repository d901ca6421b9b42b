"""The presets of all tasks, by name."""

from train_jax.errors import UserError
from train_jax.plugins import load_plugin
from train_jax.run.config import RunConfig
from train_jax.tasks.task import PRESETS


def all_presets() -> dict[str, RunConfig]:
    """Returns every preset by name, in the order of the tasks."""
    presets: dict[str, RunConfig] = {}
    for name in PRESETS:
        presets |= load_plugin(name, "presets")
    return presets


def preset(name: str) -> RunConfig:
    """Returns a preset. Raises `UserError` for an unknown name."""
    presets = all_presets()
    if name not in presets:
        raise UserError(f"unknown preset {name!r}; use one of {', '.join(presets)}")
    return presets[name]
