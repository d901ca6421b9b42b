"""Saves the train step of a tiny run of several processes, and loads it in every one of them.

python -m support.saved_by_processes DATA_DIR FOLDER prints a line of JSON: what each attempt gave. With
`JAX_COORDINATOR_ADDRESS` and the other variables of `train_jax.runtime.processes`, it is one of several processes.
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import json
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices

from support.presets import with_fields
from train_jax.errors import UserError
from train_jax.loop import train
from train_jax.pod.compile import compile_train_step
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.runtime import devices
from train_jax.runtime.compilation import load_program, save_program
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import join_processes
from train_jax.start import start

DATA_DIR, FOLDER = sys.argv[1], Path(sys.argv[2])
PROGRAM, OF_ONE = FOLDER / "step.program", FOLDER / "one.program"
loads = []


def load_and_count(path, *args):
    loads.append(path.name)
    return load_program(path, *args)


devices.load_program = load_and_count


def config(**fields):
    common = {"data_dir": DATA_DIR, "wandb": "disabled", "eval_batch_size": 8, "steps": 4, "log_every_steps": 2}
    common |= {"H_cycles": 1, "L_cycles": 1, "runner": "shard_map", "run_dir": str(FOLDER / "unused")}
    return with_fields(preset("tiny"), common | fields)


def weights(name, **fields):
    """Returns the state after a run."""
    run_dir = str(FOLDER / name)
    train(config(run_dir=run_dir, **fields), Devices(runner="shard_map"))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(restore(run_dir, whole_state=True).state)]


def main():
    training = start(config(), devices=Devices(runner="shard_map"))
    compiled = compile_train_step(training)
    alone = jax.process_count() == 1
    if jax.process_index() == 0:
        save_program(OF_ONE if alone else PROGRAM, compiled.lowered, compiled.executable, jax.devices())
    if alone:
        return
    sync_global_devices("saved")
    try:
        load_program(OF_ONE, compiled.lowered, jax.devices())
        refusal = None
    except UserError as error:
        refusal = str(error)
    plain, loaded = weights("plain"), weights("loaded", load=str(PROGRAM))
    equal = all(np.array_equal(a, b) for a, b in zip(plain, loaded, strict=True))
    print(json.dumps({"leaves": len(plain), "equal": equal, "loads": loads, "of one process": refusal}))


with join_processes():
    main()
