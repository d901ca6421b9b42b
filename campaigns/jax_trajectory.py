"""A script: runs the training step on virtual devices with `pmap`, and records its random numbers.

python -m campaigns.jax_trajectory JOBS.json

Jobs have the format of `torch_trajectory.py`, except that `draws` is written here. With `leaky`, operations under
`torch.no_grad` have gradients.
"""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

DEVICES = 2
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

import bridge  # noqa: E402
from bridge.dispatch import computation  # noqa: E402
from train_jax.core.objective import Objective, sparse_tables  # noqa: E402
from train_jax.puzzles.task import PuzzleTask  # noqa: E402
from train_jax.run.config import from_json  # noqa: E402
from train_jax.run.model import build_module  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402
from train_jax.trainer.start import start  # noqa: E402


def train(config, weights, seed, devices, snapshots):
    """Trains and returns the same results with the same names as in PyTorch."""
    task = PuzzleTask(config)
    module = build_module(config, task, devices.local_batch_size(config.global_batch_size))
    if config.arch.forward_dtype == "float64":
        module.double()
    module.load_state_dict({name: torch.tensor(array) for name, array in weights.items()}, strict=True)
    fn = bridge.export(module)
    objective = Objective(fn, task, sparse_tables(fn))
    training = dataclasses.replace(start(config, task, devices), objective=objective)
    step = training.parallel_step()
    state = training.initial_state()
    carry = devices.shard(training.initial_carry(state, training.batches.at(0)))
    state, key, (table,), results = devices.replicate(state), devices.random_key(seed), objective.tables, {}
    for number in range(1, config.steps + 1):
        state, carry, metrics = step(state, carry, training.batches.at(number - 1), key)
        halting = metrics["q_halt_loss"] + metrics.get("q_continue_loss", 0.0)
        for name, value in (metrics | {"loss": metrics["lm_loss"] + 0.5 * halting}).items():
            results.setdefault(name, []).append(np.asarray(value))
        if number in snapshots:
            rows = {"weights": state.buffers[table.weights]}
            for kind, arrays in (("params", state.params), ("ema", state.ema), ("table", rows)):
                results |= {f"{number}/{kind}/{name}": np.asarray(array) for name, array in arrays.items()}
    return results


class Exploration(nn.Module):
    """Draws the random numbers of the halting in `models_torch/act.py` for one step, in the same order."""

    def __init__(self, halt_max_steps):
        super().__init__()
        self.high = halt_max_steps + 1

    def forward(self, q_halt, steps):
        return torch.rand_like(q_halt), torch.randint_like(steps, low=2, high=self.high)


def random_numbers(config, seed) -> dict[str, Any]:
    """Returns the random numbers of every step for the whole batch, from the key of the step."""
    fn = bridge.export(Exploration(config.arch.halt_max_steps))
    rows = config.global_batch_size
    wide = config.arch.forward_dtype == "float64"
    like = jnp.zeros(rows, jnp.float64 if wide else jnp.float32), jnp.zeros(rows, jnp.int32)

    def at(step):
        key = jax.random.fold_in(jax.random.key(seed), step)
        return fn({}, {}, *like, rng=bridge.ShardedKey(key, 0, 1, rows))[0]

    rand, randint = jax.vmap(at)(jnp.arange(config.steps))
    return {"rand_like": np.asarray(rand), "randint_like": np.asarray(randint)}


def main(jobs):
    for job in jobs:
        config = from_json(Path(job["config"]).read_text())
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.enable_x64(config.arch.forward_dtype == "float64"))
            if job.get("leaky"):
                stack.enter_context(mock.patch.object(computation, "stop_gradient", lambda array: array))
            if job.get("draws"):
                np.savez(job["draws"], **random_numbers(config, job["seed"]))
            weights = np.load(job["start"])
            devices = Devices(DEVICES)
            np.savez(job["out"], **train(config, weights, job["seed"], devices, job["snapshots"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
