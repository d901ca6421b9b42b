"""Trains PyTorch modules in JAX. `load_run(path)` loads a trained model for prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train_jax.tasks.puzzles.solving import Predictor

__all__ = ["load_run"]


def load_run(path: str, step: str | int = "newest") -> Predictor:
    """Loads the averaged weights of a checkpoint of the run in the folder `path`, for prediction.

    `step`: `newest`, `best` (of a run with `keep_best`), or the step of a checkpoint. Raises
    `train_jax.errors.UserError` if there is no run or no such checkpoint.
    """
    from train_jax.tasks.puzzles.solving import Predictor  # imports JAX and PyTorch, which `trm --help` does not need

    return Predictor.load(path, step)
