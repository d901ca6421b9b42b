"""Compares the run's own module with PyTorch, in the call of the first training step."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

import bridge
from bridge.parity import ParityReport
from bridge.tensor.arrays import tensor_of
from bridge.tensor.pytrees import convert
from models_torch.outside import is_outside
from train_jax.errors import UserError
from train_jax.plugin import load_object
from train_jax.run.config import RunConfig
from train_jax.run.model import build_module, build_objective
from train_jax.runtime.backend import host_device
from train_jax.task import Task

ROWS = 2
"""Number of examples in the comparison with PyTorch."""
TOLERANCE = 1e-3
"""Largest relative difference, or 8 times the difference between PyTorch's float32 and float64 if that is larger."""
JITTER = 0.02
"""Noise on the parameters, so that those that start at zero are compared, too."""


def verified(config: RunConfig, task: Task) -> str:
    """Compares a module of the user's with PyTorch, on the host; returns a line for the log, "" for a built-in one.

    Raises `UserError` where they differ, or where one of them cannot be run.
    """
    if task.comparison:
        return load_object(task.comparison, "comparison")(config, task)
    if not is_outside(config.model):
        return ""
    begun = time.perf_counter()
    try:
        with jax.default_device(host_device()):
            report = compared(config, task)
    except bridge.BridgeError as error:
        text = " ".join(str(error).split())
        raise UserError(f"{config.model} cannot be compared with PyTorch: {text}; {_REMEDY}") from error
    except UserError as error:  # the loss of the task does not call the module
        return f"{config.model} was not compared with PyTorch: {error}"
    if report.count("beyond tolerance"):
        worst = report.worst
        note = f" ({worst.note})" * bool(worst.note)
        raise UserError(
            f"{config.model} computes something else in JAX than in PyTorch, most {worst.kind} {worst.name} in call "
            f"{worst.step + 1}, by {worst.error:.0e} of {worst.scale:.0e}{note}; {_REMEDY}"
        )
    seconds = time.perf_counter() - begun
    return f"{config.model} agrees with PyTorch over two calls, {len(report.rows)} leaves compared in {seconds:.1f} s"


_REMEDY = "`python -m bridge verify package.module:factory` shows every leaf, and --no-verify trains without this check"


class _CalledError(Exception):
    """The arguments with which a task calls the module."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.args_of_call = args
        self.keywords = kwargs


def compared(config: RunConfig, task: Task) -> ParityReport:
    """Returns `bridge.verify` of the module's call in the first training step, in float32, with a tiny batch."""
    wide = _in_dtype(config, "float32")
    module = build_module(wide, task, ROWS).train()
    args, keywords = _first_call(wide, task)
    method = keywords.pop("method", "forward")
    return bridge.verify(
        module,
        *args,
        method=method,
        tolerance=TOLERANCE,
        jitter=JITTER,
        double=_in_float64(config, task, module),
        input_gradients=False,
        module_kwargs=keywords,
    )


def _in_dtype(config: RunConfig, dtype: str) -> RunConfig:
    if not hasattr(config.arch, "forward_dtype"):
        return config
    return dataclasses.replace(config, arch=dataclasses.replace(config.arch, forward_dtype=dtype))  # pyright: ignore


def _in_float64(config: RunConfig, task: Task, module: Any) -> Any:
    """Returns the same module in float64; None if it cannot be built so."""
    try:
        double = build_module(_in_dtype(config, "float64"), task, ROWS).double().train()
        double.load_state_dict(module.state_dict())
        return double
    except Exception:  # a user's module may raise anything
        return None


def _first_call(config: RunConfig, task: Task) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments of the module's call in the first training step, as PyTorch's tensors."""
    objective = build_objective(config, task, ROWS)
    batch = jax.tree.map(lambda x: x[:ROWS], task.batch(0, (0, 1)))
    carry = jax.jit(objective.initial_carry)(objective.params, objective.buffers, batch)

    def call(*args: Any, **keywords: Any) -> Any:
        raise _CalledError(args, keywords)

    try:
        task.loss(call, carry, batch)
    except _CalledError as error:
        return convert((error.args_of_call, error.keywords), _to_pytorch)
    raise UserError(f"task {config.task} does not call the module in its loss")


def _to_pytorch(value: Any) -> Any:
    if not isinstance(value, jax.Array | np.ndarray):
        return value
    tensor = tensor_of(value)
    return tensor.long() if np.issubdtype(value.dtype, np.integer) else tensor  # PyTorch has int64 indices and labels
