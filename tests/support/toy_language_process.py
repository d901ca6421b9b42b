"""A script: trains the toy language model on virtual devices, uninterrupted or stopped and continued.

python -m support.toy_language_process DATA_DIR DEVICES RUN_DIR OUT.npz [STOPS_AT] [-- DEVICES RUN_DIR OUT.npz …]

Several runs share one process, which saves the time of the imports.
"""

import itertools
import os
import sys

data_dir, *words = sys.argv[1:]
runs = [list(run) for separator, run in itertools.groupby(words, lambda word: word == "--") if not separator]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={max(int(devices) for devices, *_ in runs)}"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402

from models_torch.outside import OutsideConfig  # noqa: E402
from support.toy_language import ToyConfig  # noqa: E402
from train_jax.loop import train  # noqa: E402
from train_jax.optim.config import OptimConfig  # noqa: E402
from train_jax.run.checkpoint import Checkpoints  # noqa: E402
from train_jax.run.config import RunConfig  # noqa: E402
from train_jax.run.restore import restore  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402

CONFIG = RunConfig(
    data_dir=data_dir,
    run_dir="",
    task="support.toy_language:ToyLanguage",
    task_config=ToyConfig(),
    model="support.toy_language:TokenModel",
    arch=OutsideConfig(forward_dtype="float32"),
    optim=OptimConfig(lr=1e-2, warmup_steps=5, weight_decay=0.0, ema_decay=0.0),
    steps=20,
    global_batch_size=16,
    eval_batch_size=16,
    eval_every_steps=5,
    checkpoint_every_steps=5,
    log_every_steps=5,
    wandb="disabled",
)


class KilledError(Exception):
    pass


def stop_at(stop, config, devices):
    """Stops like a killed process: after a checkpoint, before the run is finished."""
    save = Checkpoints.save

    def save_and_stop(self, step, *args, **kwargs):
        save(self, step, *args, **kwargs)
        if step == stop:
            self.wait()
            raise KilledError

    Checkpoints.save = save_and_stop
    try:
        train(config, devices)
    except KilledError:
        Checkpoints.save = save


def main(devices, run_dir, out, *stops_at):
    config, devices = dataclasses.replace(CONFIG, run_dir=run_dir), Devices(int(devices))
    for step in stops_at:
        stop_at(int(step), config, devices)
    figures = train(config, devices)
    leaves = jax.tree_util.tree_leaves_with_path(restore(run_dir, whole_state=True).state)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    np.savez(out, **arrays, __loss=figures["loss"])


for run in runs:
    main(*run)
