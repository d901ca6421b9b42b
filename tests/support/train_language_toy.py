"""Run in a process of its own: trains `support.language_toy` with eight virtual devices and saves what it learned.

python -m support.train_language_toy FOLDER

Writes `one.npz` and `eight.npz`, of runs on so many devices, and `continued-*.npz`, of the same runs from step 20 on.
"""

import os
import shutil
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from models_torch.outside import OutsideConfig
from train_jax.loop import train
from train_jax.optim.config import OptimConfig
from train_jax.run.config import RunConfig
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.tasks.task import TaskConfig


def main(folder):
    for name, count in (("one", 1), ("eight", 8)):
        run_dir = folder / name
        config = RunConfig(
            data_dir="",
            run_dir=str(run_dir),
            task="support.language_toy:PackedTokens",
            task_config=TaskConfig(),
            model="support.language_toy:TinyLM",
            arch=OutsideConfig(halt_max_steps=1, options={"hidden": 32}),
            optim=OptimConfig(lr=1e-2, warmup_steps=5, weight_decay=0.0, ema_decay=0.9),
            steps=40,
            global_batch_size=64,
            eval_every_steps=20,
            checkpoint_every_steps=20,
            log_every_steps=10,
            wandb="disabled",
        )
        train(config, Devices(count))
        save(folder / f"{name}.npz", run_dir)
        (run_dir / "FINISHED").unlink()
        shutil.rmtree(run_dir / "checkpoints" / "40")
        train(config, Devices(count))
        save(folder / f"continued-{name}.npz", run_dir)


def save(path, run_dir):
    leaves = jax.tree_util.tree_leaves_with_path(restore(str(run_dir)).state)
    np.savez(path, **{jax.tree_util.keystr(place): np.asarray(leaf) for place, leaf in leaves})


main(Path(sys.argv[1]))
