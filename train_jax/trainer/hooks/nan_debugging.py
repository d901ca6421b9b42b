"""The search for the operation that made a step not finite, and the check of the fields for debugging."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import jax

import bridge
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.trainer.hooks.profiling import check_port
from train_jax.trainer.session import Hook, Session
from train_jax.trainer.start import Training

_DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"


def check_debugging(config: RunConfig) -> None:
    """Raises `UserError` if `deterministic` needs an XLA flag that is not set, if `debug_nans` conflicts, or if the
    port of `profile_server` is taken."""
    if config.profile_server:
        check_port(config.profile_server)
    needs_flag = config.deterministic and jax.default_backend() == "gpu"
    if needs_flag and _DETERMINISTIC_FLAG not in os.environ.get("XLA_FLAGS", ""):
        raise UserError(
            "deterministic needs an XLA flag that must be set before the start; run again with "
            f"XLA_FLAGS={_DETERMINISTIC_FLAG}"
        )
    for name in ("steps_per_dispatch", "accumulation_steps"):
        if config.debug_nans and getattr(config.compute, name) > 1:
            raise UserError(
                f"debug_nans repeats single steps, and compute.{name} is {getattr(config.compute, name)}; use 1"
            )


class NanDebugging(Hook):
    """Checks every step, and repeats a non-finite step operation by operation (`--debug-nans`).

    This is slow: every step waits for its result and copies carry and batch to the host.
    """

    def __init__(self, training: Training):
        self._training = training
        self._carry: Any = None
        self._batch: Any = None

    def before(self, session: Session, batch: Any) -> None:
        self._carry, self._batch = self._training.devices.to_host((session.carry, batch))

    def after(self, session: Session, metrics: Any) -> None:
        """Raises `UserError` with the operation and the submodule if the step was skipped."""
        if bool(jax.device_get(metrics["skipped_steps"])):
            step = int(session.state.step)
            whole = jax.device_get(self._training.placement.whole(session.state))
            raise UserError(f"step {step + 1} is not finite: {self._locate(whole)}")

    def _locate(self, state: TrainState) -> str:
        config = self._training.config
        objective = self._training.objective
        devices = self._training.devices
        key = jax.random.fold_in(jax.random.key(config.seed), state.step + state.guard.skipped_steps - 1)
        for replica in range(len(devices.local)):
            carry, batch = jax.tree.map(lambda x, at=replica: x[at], (self._carry, self._batch))
            rows = config.global_batch_size // devices.count
            rng = bridge.ShardedKey(key, replica, devices.count, rows)
            arguments = (objective.local_rows, state.buffers, carry, batch, rng)

            def loss(params: Any, arguments: Any = arguments) -> jax.Array:
                return objective(params, *arguments).loss

            functions: dict[str, Callable[[Any], Any]] = {"forward": loss, "backward": jax.grad(loss)}
            for what, function in functions.items():
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
