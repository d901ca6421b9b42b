"""Where a PyTorch model is built for the trainer: the seed, the sizes, the export."""

from __future__ import annotations

import torch

import bridge
from models_torch.registry import build
from train_jax.config import RunConfig, sized_for
from train_jax.errors import UserError
from train_jax.objective import Objective, objective_of
from train_jax.puzzles.format import Metadata


def build_module(config: RunConfig, data: Metadata, local_batch_size: int) -> torch.nn.Module:
    """The plain PyTorch module with its loss head; the same weights for the same seed, whatever else drew numbers.

    Raises `UserError` where sizes do not go together, or a module from outside the project cannot be had.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return build(config.model, sized_for(config, data, local_batch_size))
    except ValueError as error:
        raise UserError(f"the architecture cannot be built: {error}") from error


def build_objective(config: RunConfig, data: Metadata, local_batch_size: int) -> Objective:
    return objective_of(bridge.export(build_module(config, data, local_batch_size)))
