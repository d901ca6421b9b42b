"""Trains a tiny run on virtual CPU devices, exports its step, and takes 20 further steps with the step itself.

python -m support.exported_steps DATA_DIR FOLDER DEVICES writes `step/`, `batches.npz` and `expected.npz` into FOLDER.
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={sys.argv[3]}"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
from pathlib import Path

import numpy as np

from support.presets import with_fields
from train_jax.__main__ import main
from train_jax.run.checkpoint import CARRY, STATE, by_name, like_tree
from train_jax.run.folder import read_run
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.trainer.loop import train
from train_jax.trainer.start import start

DATA_DIR = sys.argv[1]
FOLDER = sys.argv[2]
DEVICES = int(sys.argv[3])
STEPS = 20
fields = {"data_dir": DATA_DIR, "run_dir": f"{FOLDER}/run", "steps": 3, "wandb": "disabled", "eval_batch_size": 8}
fields |= {"H_cycles": 1, "L_cycles": 1, "halt_exploration_prob": 0.5}
train(with_fields(preset("tiny"), fields), Devices())
words = ["export", f"{FOLDER}/run", "--train-step", "--devices", str(DEVICES), "--output", f"{FOLDER}/step"]
assert main(words) in (0, None)

_, config = read_run(f"{FOLDER}/run")
compute = dataclasses.replace(config.compute, runner="shard_map")
training = start(dataclasses.replace(config, compute=compute, steps=100), devices=Devices(DEVICES, "shard_map"))
arrays = dict(np.load(f"{FOLDER}/step/state.npz"))
devices = training.devices
batches = [training.batches.at(3 + step) for step in range(STEPS)]
state = training.initial_state()
carry = training.initial_carry(state, batches[0])
step = start(dataclasses.replace(config, compute=compute), devices=devices).parallel_step()  # has the run's own length
state = devices.replicate(like_tree(state, arrays, STATE))
carry = devices.shard(like_tree(carry, arrays, CARRY))
for batch in batches:
    state, carry, metrics = step(state, carry, devices.shard(batch), devices.random_key(config.seed))
after = by_name(state, STATE) | by_name(carry, CARRY) | {f"metrics.{name}": x for name, x in metrics.items()}
assert int(after["state.step"]) == 3 + STEPS
np.savez(Path(FOLDER) / "expected.npz", **{name: np.asarray(x) for name, x in after.items()})
np.savez(Path(FOLDER) / "batches.npz", **{name: np.stack([b[name] for b in batches]) for name in batches[0]})
