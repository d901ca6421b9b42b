"""Builds the PyTorch module of a run and exports it: seed, sizes, loss head, recomputation; and its optimizer."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import optax
import torch

import bridge
from models_torch import registry
from train_jax.core.objective import Objective, sparse_tables
from train_jax.core.optim.chain import Norm, Optimizer, dense_optimizer, logged_learning_rates, trainable
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.task import Task

BLOCKS = r".*\.(layers|h)\.\d+"
"""The layers of the built-in models, by qualified name."""


def sized(arch: Any, task: Task, local_batch_size: int) -> Any:
    """Returns the architecture's configuration with the sizes that the data and the devices determine."""
    names = {field.name for field in dataclasses.fields(arch)}
    sizes = {"batch_size": local_batch_size, **task.sizes}
    return dataclasses.replace(arch, **{name: size for name, size in sizes.items() if name in names})


def build_module(config: RunConfig, task: Task, local_batch_size: int, *, variant: Any = None) -> torch.nn.Module:
    """Builds the PyTorch module with its loss head, at a variant of the task's schedule; None for `config.arch`.

    The weights depend only on the seed, not on the state of the global random generator. Raises `UserError` if the
    sizes are inconsistent, or if an outside model cannot be imported.
    """
    try:
        arch = sized(config.arch if variant is None else task.arch_of(variant), task, local_batch_size)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            own = task.build(arch)
            return task.wrap(registry.build_model(config.model, arch), arch) if own is None else own
    except ValueError as error:
        raise UserError(f"the architecture cannot be built: {error}") from error


def build_optimizer(
    config: RunConfig, task: Task, objective: Objective, total_steps: int, norm: Norm = optax.tree.norm
) -> Optimizer:
    """Returns the optimizer of the task, or that of `config.optim`; `norm` is the norm of placed parameters."""
    own = task.optimizer(objective.fn.module, total_steps, norm)
    if own is not None:
        return own
    trained = trainable(objective.params, config.optim)
    dense = dense_optimizer(config.optim, total_steps, norm)
    return Optimizer(dense, logged_learning_rates(trained, config.optim, total_steps))


def build_objective(
    config: RunConfig, task: Task, local_batch_size: int, *, variant: Any = None, platform: str = ""
) -> Objective:
    """Builds and exports the module for devices of a platform; "" for any, without kernels of a platform.

    Raises `UserError` if `compute.remat` matches no submodule.
    """
    recompute = BLOCKS if config.compute.remat == "blocks" else config.compute.remat
    module = build_module(config, task, local_batch_size, variant=variant)
    options: dict[str, Any] = {"recompute": recompute, "name_scopes": True}
    if "fused" in (config.compute.attention, config.compute.mlp) or config.compute.choices:
        from train_jax.run.kernels import check_served, kernels  # without kernels, they are not needed

        options |= kernels(config.compute, platform)
        check_served(module, config.compute, options["lowerings"])
    try:
        fn = bridge.export(module, **options)
    except (bridge.BridgeError, re.error) as error:
        raise UserError(f"compute.remat: {error}") from error
    return Objective(fn, task, sparse_tables(fn))
