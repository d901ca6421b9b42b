"""The training step of a run as a program of `jax.export`, which runs without PyTorch, the bridge and this package."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from train_jax.errors import UserError
from train_jax.run.checkpoint import CARRY, STATE, Checkpoints, by_name, like_tree
from train_jax.run.config import ComputeConfig
from train_jax.run.folder import read_run
from train_jax.run.kernels import kernels
from train_jax.run.restore import choose
from train_jax.runtime.devices import Devices
from train_jax.storage.files import whole_file
from train_jax.trainer.start import Training, start

PROGRAM = "step.{platform}.program"
ARRAYS = "state.npz"
CONVENTION = "convention.json"
PLATFORMS = ("cpu", "cuda", "tpu")
"""Platforms, and their names in `jax.export`."""


@dataclasses.dataclass(frozen=True)
class ExportedStep:
    """A train step as a program, and the state that it continues from."""

    programs: dict[str, export.Exported]
    """`(arrays, batch, key) -> (arrays, metrics)` by platform: dicts of arrays by the names of a checkpoint."""
    arrays: dict[str, np.ndarray]
    """State and carry before the step, by name."""
    key: np.ndarray
    """Random key, the same for every step."""
    step: int
    """Number of optimizer steps that the state contains."""
    batch: dict[str, np.ndarray]
    """The next batch, with a leading device axis; only an example of its shapes."""


def export_step(run_dir: str, step: str, devices: int) -> ExportedStep:
    """Exports the step of a run at one of its checkpoints for this number of devices.

    Raises `UserError` if there is no such checkpoint, and for fields that cannot be exported.
    """
    folder, config = read_run(run_dir)
    with contextlib.closing(Checkpoints(folder, writes=False)) as checkpoints:
        number = choose(checkpoints, step)
        compute = dataclasses.replace(config.compute, runner="shard_map", load="", shard=(), model_devices=1)
        training = start(dataclasses.replace(config, compute=compute), devices=Devices(devices, "shard_map"))
        if compute.shard_optimizer:
            raise UserError(f"{run_dir} has compute.shard_optimizer, whose step is not exported; continue it without")
        if training.task.variants(training.total_steps).after(number) is not None:
            raise UserError(f"the train step of {run_dir} still changes after step {number}; give a later --step")
        resumed = checkpoints.restore_step(number, training.initial_state(continues=True))
    batch = training.batches.from_step(min(number, training.total_steps - compute.steps_per_dispatch))
    first = {name: x[:, 0] for name, x in batch.items()} if compute.steps_per_dispatch > 1 else batch
    carry = training.initial_carry(resumed.state, first)
    carry = training.devices.from_rows(resumed.carry_like(training.devices.to_rows(carry)), carry)
    key = np.asarray(training.devices.random_key(config.seed))
    arrays = by_name(resumed.state, STATE) | by_name(carry, CARRY)
    programs = _programs(training, resumed.state, carry, batch, key)
    return ExportedStep(programs, {name: np.asarray(x) for name, x in arrays.items()}, key, number, batch)


def _programs(training: Training, state: Any, carry: Any, batch: Any, key: Any) -> dict[str, export.Exported]:
    """Returns the step with names instead of classes, which JAX would have to know where a program is loaded.

    A program for several platforms decides at every product which one it is on, and XLA then fuses other operations.
    """
    step = training.parallel_step()
    devices = training.devices

    def by_names(arrays: dict[str, Any], batch: dict[str, Any], key: jax.Array) -> Any:
        inputs = like_tree(state, arrays, STATE), like_tree(carry, arrays, CARRY)
        state_after, carry_after, metrics = step(*inputs, batch, key)
        return by_name(state_after, STATE) | by_name(carry_after, CARRY), metrics

    arrays = by_name(devices.shapes(state), STATE) | by_name(devices.shapes(carry, sharded=True), CARRY)
    arguments = arrays, devices.shapes(batch, sharded=True), devices.shapes(key)
    program = jax.jit(by_names)
    platforms = platforms_for(training.config.compute, devices.platform)
    return {platform: export.export(program, platforms=(platform,))(*arguments) for platform in platforms}


def platforms_for(compute: ComputeConfig, platform: str) -> tuple[str, ...]:
    """Returns those of `PLATFORMS` for which a step traced on `platform` can be lowered.

    Kernels belong to one platform. So does attention traced on a GPU, which may be cuDNN's.
    """
    of_one = platform == "gpu" or kernels(compute, platform)["lowerings"]
    return (export.default_export_platform(),) if of_one else PLATFORMS


def write_step(folder: Path, exported: ExportedStep) -> None:
    """Writes the files of a step into a folder."""
    shapes = {name: [x.dtype.name, list(x.shape)] for name, x in exported.arrays.items()}
    batch = {name: [x.dtype.name, list(x.shape)] for name, x in exported.batch.items()}
    convention = {
        "call": "arrays, metrics = program.call(arrays, batch, key)",
        "step": exported.step,
        "devices": next(iter(exported.programs.values())).nr_devices,
        "platforms": list(exported.programs),
        "jax": jax.__version__,
        "arrays": shapes,
        "batch": batch,
    }
    for platform, program in exported.programs.items():
        with whole_file(folder / PROGRAM.format(platform=platform)) as scratch:
            scratch.write_bytes(program.serialize())
    with whole_file(folder / ARRAYS) as scratch, scratch.open("wb") as file:
        np.savez(file, key=exported.key, **exported.arrays)  # pyright: ignore[reportArgumentType]
    with whole_file(folder / CONVENTION) as scratch:
        scratch.write_text(json.dumps(convention, indent=1))
