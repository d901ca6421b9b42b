"""Runs by name: the presets of all tasks."""

from train_jax.errors import UserError
from train_jax.plugins import load_plugin
from train_jax.run.config import RunConfig
from train_jax.tasks.task import PRESETS


def all_presets() -> dict[str, RunConfig]:
    """Every preset by name, in the order of the tasks."""
    presets: dict[str, RunConfig] = {}
    for name in PRESETS:
        presets |= load_plugin(name, "presets")
    return presets


def preset(name: str) -> RunConfig:
    """Raises `UserError` for an unknown name."""
    presets = all_presets()
    if name not in presets:
        raise UserError(f"unknown preset {name!r}; use one of {', '.join(presets)}")
    return presets[name]
