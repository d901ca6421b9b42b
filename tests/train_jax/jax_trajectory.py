"""Run in a process of its own: the train step on virtual devices, under `pmap`; also writes down what it drew.

python jax_trajectory.py JOBS.json

A job is one of `torch_trajectory.py`, only that `draws` is written here. `leaky`: the gradient goes through what is
computed under `torch.no_grad`.
"""

import contextlib
import json
import os
import sys
from pathlib import Path
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
from bridge import dispatch  # noqa: E402
from train_jax.core.objective import objective_of  # noqa: E402
from train_jax.core.state import new_learner  # noqa: E402
from train_jax.core.step import make_train_step  # noqa: E402
from train_jax.optim.optimizer import dense_optimizer  # noqa: E402
from train_jax.run.config import from_json  # noqa: E402
from train_jax.run.model import build_module  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402
from train_jax.tasks.puzzles.mixture import load_mixture  # noqa: E402


def trained(config, start, seed, devices, snapshots):
    """The same figures under the same names as in PyTorch."""
    data, optim = load_mixture(config.data_dir, "train"), config.optim
    module = build_module(config, data.metadata, devices.local_batch_size(config.global_batch_size))
    if config.arch.forward_dtype == "float64":
        module.double()
    module.load_state_dict({name: torch.tensor(array) for name, array in start.items()}, strict=True)
    objective = objective_of(bridge.export(module))
    optimizer = dense_optimizer(optim, config.steps)
    step = devices.train(
        make_train_step(
            objective,
            optimizer,
            optim,
            total_steps=config.steps,
            global_batch_size=config.global_batch_size,
            device_count=devices.count,
            halt_max_steps=config.arch.halt_max_steps,
        )
    )
    batches = [
        devices.split(data.train_batch(seed=config.seed, step=number, batch_size=config.global_batch_size))
        for number in range(config.steps)
    ]
    learner = devices.replicate(new_learner(objective.params, objective.buffers, optimizer))
    carry = devices.spread(devices.for_each(objective.initial_carry)(learner.params, learner.buffers, batches[0]))
    key, (table,), found = devices.key(seed), objective.tables, {}
    for number, batch in enumerate(batches, 1):
        learner, carry, metrics = step(learner, carry, batch, key)
        halting = metrics["q_halt_loss"] + metrics.get("q_continue_loss", 0.0)
        for name, value in (metrics | {"loss": metrics["lm_loss"] + 0.5 * halting}).items():
            found.setdefault(name, []).append(np.asarray(value))
        if number in snapshots:
            weights = {"weights": learner.buffers[table.weights]}
            for kind, arrays in (("params", learner.params), ("ema", learner.ema), ("table", weights)):
                found |= {f"{number}/{kind}/{name}": np.asarray(array) for name, array in arrays.items()}
    return found


class Exploration(nn.Module):
    """What the halting of `models_torch/act.py` draws in a step, and in the same order."""

    def __init__(self, halt_max_steps):
        super().__init__()
        self.high = halt_max_steps + 1

    def forward(self, q_halt, steps):
        return torch.rand_like(q_halt), torch.randint_like(steps, low=2, high=self.high)


def drawn(config, seed):
    """The random numbers of every step for the whole batch: the step's own key, through the same bridge."""
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
                stack.enter_context(mock.patch.object(dispatch, "stop_gradient", lambda array: array))
            if job.get("draws"):
                np.savez(job["draws"], **drawn(config, job["seed"]))
            start, devices = np.load(job["start"]), Devices(DEVICES)
            np.savez(job["out"], **trained(config, start, job["seed"], devices, job["snapshots"]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
