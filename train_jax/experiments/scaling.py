"""The changes of an experiment at the size of another preset, in proportion to its own values."""

from __future__ import annotations

from typing import Any

from train_jax.experiments.data_sets import SUDOKU_SIZES
from train_jax.experiments.table import WARMUP_SHARE, Experiment
from train_jax.run.config import RunConfig

BASELINE = {
    "arch.hidden_size": 512, "arch.num_heads": 8, "arch.puzzle_emb_ndim": 512, "global_batch_size": 6144,
    "optim.lr": 1e-4, "optim.sparse_lr": 1e-4,
}  # fmt: skip
"""Fields that change in proportion: the value of the preset times the ratio of the experiment's value to this one."""
SMALL_WINDOW = 3
"""Attention window in the small mazes of presets."""
CURRICULUM_SHARE = 10_000 / 50_000
"""Share of the run in which the curriculum of contribution 1 ends."""


def scaled_changes(row: Experiment, preset: str, config: RunConfig, puzzles: float) -> dict[str, Any]:
    """Returns the changes of an experiment on the preset `config`, which trains on `puzzles` train puzzles.

    Cycles, layers, halting steps and decays are literal. Sizes, batch size and learning rates keep their ratio to the
    baseline. A preset with a fixed number of steps gets those of the experiment, in proportion to the baseline's.
    """
    if preset not in SUDOKU_SIZES:
        return dict(row.changes)
    changes = {name: _scaled(name, value, config) for name, value in row.changes.items()}
    batch = changes.get("global_batch_size", config.global_batch_size)
    steps = config.steps
    if row.twin != "equal_steps":
        steps = max(1, round(steps * row.puzzles / 1000 * config.global_batch_size / batch))
    changes.pop("steps", None)
    if steps != config.steps:
        changes["steps"] = steps
    if row.twin == "scaled_warmup":
        changes["optim.warmup_steps"] = int(WARMUP_SHARE * steps)
    if "task_config.curriculum_epochs" in changes:
        # Half a step more, because whole steps are counted.
        changes["task_config.curriculum_epochs"] = (CURRICULUM_SHARE * steps + 0.5) * batch / puzzles
    return changes


def _scaled(name: str, value: Any, config: RunConfig) -> Any:
    if name == "arch.attention_window":
        return SMALL_WINDOW
    if name not in BASELINE:
        return value
    owner, _, field = name.rpartition(".")
    here = getattr(getattr(config, owner) if owner else config, field)
    scaled = here * value / BASELINE[name]
    return max(1, round(scaled)) if isinstance(here, int) else scaled
