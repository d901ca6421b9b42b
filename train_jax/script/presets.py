"""The run of each training script that is given on the command line."""

from __future__ import annotations

from train_jax.plugin import scripts
from train_jax.run.config import RunConfig
from train_jax.script.optim_fields import ADAMW
from train_jax.script.task import ScriptConfig, ScriptModelConfig


def presets() -> dict[str, RunConfig]:
    """Returns runs by the name of the script, such as `mine` for mine.py."""
    return {name: run_of(name) for name in scripts()}


def run_of(name: str) -> RunConfig:
    """Returns the run of the script in the module `name`."""
    return RunConfig(
        data_dir="",
        run_dir=f"runs/{name}",
        task="script",
        task_config=ScriptConfig(),
        model=f"{name}:model",
        arch=ScriptModelConfig(),
        optim=ADAMW,
        epochs=1,
        global_batch_size=32,
        eval_batch_size=32,
        log_every_steps=10,
        checkpoint_every_steps=1000,
        wandb_project=name,
    )
