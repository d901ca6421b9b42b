"""`--debug-nans` and `--deterministic`: finding the operation that produced a NaN, and checking XLA's flags."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Any

import jax

import bridge
from train_jax.errors import UserError
from train_jax.run.config import RunConfig

if TYPE_CHECKING:
    from train_jax.core.state import TrainState
    from train_jax.start import Training

_FLAG = "--xla_gpu_deterministic_ops=true"


def check_debugging(config: RunConfig) -> None:
    """Raises `UserError` if settings conflict, or need an XLA flag that is not set."""
    if config.deterministic and jax.default_backend() == "gpu" and _FLAG not in os.environ.get("XLA_FLAGS", ""):
        raise UserError(
            f"deterministic needs an XLA flag that must be set before the start; run again with XLA_FLAGS={_FLAG}"
        )
    if config.debug_nans:
        for name in ("steps_per_dispatch", "accumulation_steps"):
            if getattr(config.compute, name) > 1:
                raise UserError(
                    f"debug_nans repeats single steps, and compute.{name} is {getattr(config.compute, name)}; use 1"
                )


class NanDebugger:
    """Checks every step, and repeats a non-finite step operation by operation.

    This is slow: every step waits for its result and copies carry and batch to the host.
    """

    def __init__(self, training: Training):
        self._training = training
        self._carry: Any = None
        self._batch: Any = None

    def before_step(self, carry: Any, batch: Any) -> None:
        """Copies the arguments that the step donates."""
        self._carry, self._batch = self._training.devices.to_host((carry, batch))

    def after_step(self, state: TrainState, metrics: Any) -> None:
        """Raises `UserError` with the operation and the submodule if the step was skipped."""
        if bool(jax.device_get(metrics["skipped_steps"])):
            step = int(state.step)
            raise UserError(
                f"step {step + 1} is not finite: {self._locate(jax.device_get(self._training.placement.whole(state)))}"
            )

    def _locate(self, state: TrainState) -> str:
        config, objective = self._training.config, self._training.objective
        devices = self._training.devices
        key = jax.random.fold_in(jax.random.key(config.seed), state.step + state.guard.skipped_steps - 1)
        for replica in range(len(devices.local)):
            carry, batch = jax.tree.map(lambda x, at=replica: x[at], (self._carry, self._batch))
            rows = config.global_batch_size // devices.count
            rng = bridge.ShardedKey(key, replica, devices.count, rows)
            arguments = (objective.local_rows, state.buffers, carry, batch, rng)

            def loss(params: Any, arguments: Any = arguments) -> jax.Array:
                return objective(params, *arguments).loss

            for what, function in (("forward", loss), ("backward", jax.grad(loss))):
                try:
                    with jax.debug_nans(True), jax.debug_infs(True):
                        function(state.params)
                except FloatingPointError as error:
                    return f"{str(error).splitlines()[0]}, in the {what} pass, {_submodule(error)}"
        return "every operation of the forward and backward pass is finite, so the sum over devices overflows"


def _submodule(error: BaseException) -> str:
    """Returns the innermost PyTorch submodule and source line in the traceback of the error."""
    modules: list[Any] = []
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if hasattr(owner, "named_modules"):
            modules.append(owner)
            if os.sep + "torch" + os.sep not in frame.f_code.co_filename:
                line = f"{frame.f_code.co_filename}:{number}"
    if not modules:
        return "outside of the module's code"
    names = {id(module): name for name, module in modules[0].named_modules()}
    name = names.get(id(modules[-1]), "")
    return f"in {name or 'the module itself'} ({type(modules[-1]).__name__}), at {line}"
