"""Where a PyTorch model is built for the trainer: the seed, the sizes, the export."""

from __future__ import annotations

import dataclasses
import re

import torch

import bridge
from models_torch.registry import build
from train_jax.core.objective import Objective, objective_of
from train_jax.errors import UserError
from train_jax.run.config import RunConfig, sized_for
from train_jax.tasks.puzzles.format import Metadata

BLOCKS = r".*\.layers\.\d+"
"""The layers of the models here, by qualified name."""


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
    """The module as the trainer sees it. Raises `UserError` for a `compute.remat` that names nothing."""
    recompute = BLOCKS if config.compute.remat == "blocks" else config.compute.remat
    try:
        fn = bridge.export(build_module(config, data, local_batch_size), recompute=recompute)
    except (bridge.BridgeError, re.error) as error:
        raise UserError(f"compute.remat: {error}") from error
    return objective_of(fn, bootstrapped_halting=not getattr(config.arch, "no_ACT_continue", True))


def at_depth(config: RunConfig, depth: tuple[int, int]) -> RunConfig:
    """The same run with other numbers of H-cycles and L-cycles."""
    cycles = dict(zip(("H_cycles", "L_cycles"), depth, strict=True))
    return dataclasses.replace(config, arch=dataclasses.replace(config.arch, **cycles))


def exploration_of(module: torch.nn.Module) -> str:
    """The dotted path of the module's halting exploration. Raises `UserError` if it has none."""
    name = "halt_exploration_prob"
    for path, submodule in module.named_modules():
        for owner, step in ((submodule, ""), (getattr(submodule, "config", None), "config.")):
            if isinstance(getattr(owner, name, None), (int, float)):
                return f"{path}.{step}{name}".removeprefix(".")
    raise UserError(f"halt_exploration_end changes {name} during training, which the model has not; leave it out")
