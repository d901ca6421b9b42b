"""Run in a process of its own: trains the tiny preset on so many virtual devices and writes down what it learned.

python training_process.py DATA_DIR DEVICES RUN_DIR OUT.npz [field=value …] [-- DEVICES RUN_DIR OUT.npz …]

Several runs, one after the other, spare as many imports. One process of several where the environment says so
(`JAX_COORDINATOR_ADDRESS` and so on).
"""

import ast
import dataclasses
import itertools
import os
import sys

data_dir, *words = sys.argv[1:]
runs = [list(run) for separator, run in itertools.groupby(words, lambda word: word == "--") if not separator]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={max(int(devices) for devices, *_ in runs)}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402

from train_jax.loop import train  # noqa: E402
from train_jax.run import model as modelling  # noqa: E402
from train_jax.run.config import PRESETS  # noqa: E402
from train_jax.run.restore import restore  # noqa: E402
from train_jax.runtime.devices import Devices, join_processes  # noqa: E402

build = modelling.build


def eager_to_halt(model, arch):
    """Exploration delays halting; a fresh model halts at the limit only, and nothing would be delayed."""
    module = build(model, arch)
    module.get_parameter("model.inner.q_head.bias").data.fill_(1.0)
    return module


def main(devices, run_dir, out, *pairs):
    fields = dict(pair.split("=") for pair in pairs)
    preset = PRESETS["tiny"]
    arch = {name: ast.literal_eval(fields.pop(name)) for name in list(fields) if hasattr(preset.arch, name)}
    compute = {name: ast.literal_eval(fields.pop(name)) for name in list(fields) if hasattr(preset.compute, name)}
    optim = {name: ast.literal_eval(fields.pop(name)) for name in list(fields) if hasattr(preset.optim, name)}
    config = dataclasses.replace(
        preset,
        data_dir=data_dir,
        run_dir=run_dir,
        wandb="disabled",
        eval_batch_size=8,
        arch=dataclasses.replace(preset.arch, **arch),
        compute=dataclasses.replace(preset.compute, **compute),
        optim=dataclasses.replace(preset.optim, puzzle_lr=1e-2, **optim),
        **{name: ast.literal_eval(value) for name, value in fields.items()},
    )
    train(config, Devices(int(devices), config.compute.runner))
    learner = restore(run_dir).learner
    named = jax.tree_util.tree_leaves_with_path(learner)
    if jax.process_index() == 0:
        np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named})


join_processes()
modelling.build = eager_to_halt
for run in runs:
    main(*run)
