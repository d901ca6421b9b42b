"""A script: trains the tiny preset on virtual devices and saves the trained state.

python -m support.train_tiny DATA_DIR DEVICES RUN_DIR OUT.npz [field=value …] [-- DEVICES RUN_DIR OUT.npz …]

Several runs share one process, which saves the time of the imports. With `JAX_COORDINATOR_ADDRESS` and the other
variables of `train_jax.runtime.processes`, it is one of several processes.
"""

import ast
import itertools
import os
import sys

data_dir, *words = sys.argv[1:]
runs = [list(run) for separator, run in itertools.groupby(words, lambda word: word == "--") if not separator]
most = max(int(devices) for devices, *_ in runs)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={most}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import numpy as np  # noqa: E402

from support.presets import with_fields  # noqa: E402
from train_jax.run import model  # noqa: E402
from train_jax.run.presets import preset  # noqa: E402
from train_jax.run.restore import restore  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402
from train_jax.runtime.processes import join_processes  # noqa: E402
from train_jax.trainer.loop import train  # noqa: E402

build_module = model.build_module


def build_eager_to_halt(*args, **kwargs):
    """Builds a model that tends to halt, because exploration has no effect on a new model, which never halts early."""
    module = build_module(*args, **kwargs)
    module.get_parameter("model.inner.q_head.bias").data.fill_(1.0)
    return module


def main(devices, run_dir, out, *pairs):
    fields = {name: ast.literal_eval(value) for name, value in (pair.split("=", 1) for pair in pairs)}
    common = {"data_dir": data_dir, "run_dir": run_dir, "wandb": "disabled", "eval_batch_size": 8, "sparse_lr": 1e-2}
    config = with_fields(preset("tiny"), common | fields)
    train(config, Devices(int(devices), config.compute.runner))
    state = restore(run_dir, whole_state=True).state
    named = jax.tree_util.tree_leaves_with_path(state)
    if jax.process_index() == 0:
        np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named})


model.build_module = build_eager_to_halt
with join_processes():
    for run in runs:
        main(*run)
