"""Run in a process of its own, one of several: twenty steps on this process's virtual devices and the others'.

python processes_process.py PROCESSES NUMBER PORT DEVICES RUNNER DATA_DIR OUT.npz
"""

import dataclasses
import os
import sys

processes, number, port, devices_here = map(int, sys.argv[1:5])
runner, data_dir, out = sys.argv[5:8]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices_here}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402

if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, number)

from train_jax import modelling  # noqa: E402
from train_jax.config import PRESETS, ComputeConfig  # noqa: E402
from train_jax.devices import Devices  # noqa: E402
from train_jax.optim import dense_optimizer  # noqa: E402
from train_jax.programs import objective_for, programs_for  # noqa: E402
from train_jax.puzzles.mixture import load_mixture  # noqa: E402
from train_jax.state import new_learner  # noqa: E402

tiny = PRESETS["tiny"]
config = dataclasses.replace(
    tiny,
    steps=20,
    arch=dataclasses.replace(tiny.arch, halt_exploration_prob=0.5),
    optim=dataclasses.replace(tiny.optim, puzzle_lr=1e-2),
    compute=ComputeConfig(runner=runner),
)
build = modelling.build


def eager_to_halt(model, arch):
    """Exploration delays halting; a fresh model halts at the limit only, and nothing would be delayed."""
    module = build(model, arch)
    module.get_parameter("model.inner.q_head.bias").data.fill_(1.0)
    return module


modelling.build = eager_to_halt
devices = Devices(runner=runner)
assert devices.count == processes * devices_here
data = load_mixture(data_dir, "train", "")
objective = objective_for(config, data, devices)
optimizer = dense_optimizer(config.optim, config.steps)
programs = programs_for(config, objective, optimizer, data, devices, config.steps)


def batch_at(step):
    size = config.global_batch_size
    return devices.split(data.train_batch(seed=0, step=step, batch_size=size, shard=devices.shard()))


learner = devices.replicate(new_learner(objective.params, objective.buffers, optimizer))
carry = devices.for_each(objective.initial_carry)(learner.params, learner.buffers, devices.spread(batch_at(0)))
key = devices.replicate(jax.random.key(0))
losses = []
for step in range(config.steps):
    learner, carry, metrics = programs(step, 1, learner, carry, devices.spread(batch_at(step)), key)
    losses.append(float(devices.fetch(metrics)["lm_loss"]))
if number == 0:
    named = jax.tree_util.tree_leaves_with_path(devices.fetch((learner.params, learner.ema, learner.buffers)))
    np.savez(out, losses=losses, **{jax.tree_util.keystr(path): leaf for path, leaf in named})
