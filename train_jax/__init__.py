"""Trains PyTorch modules in JAX. `load_run(path)` gives a trained model that predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train_jax.tasks.puzzles.solving import Predictor

__all__ = ["load_run"]


def load_run(path: str) -> Predictor:
    """The newest checkpoint of the run in the folder `path`, with its averaged weights, ready to predict.

    Raises `train_jax.errors.UserError` if there is no run or no checkpoint.
    """
    from train_jax.tasks.puzzles.solving import Predictor  # loads JAX and PyTorch, which `trm --help` does without

    return Predictor.load(path)
