"""Saves the train step of a tiny run for the virtual CPU devices of this process, and loads it in other runs.

python -m support.saved_programs DATA_DIR FOLDER prints a line of JSON: what each attempt gave.
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import hashlib
import json
import pickle
from pathlib import Path

import jax
import numpy as np

from support.presets import with_fields
from train_jax.errors import UserError
from train_jax.loop import train
from train_jax.pod.compile import compile_train_step, train_step_arguments
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.runtime.compilation import load_program, save_program
from train_jax.runtime.devices import Devices
from train_jax.start import start

DATA_DIR, FOLDER = sys.argv[1], Path(sys.argv[2])
PROGRAM = FOLDER / "step.program"


def config(**fields):
    common = {"data_dir": DATA_DIR, "wandb": "disabled", "eval_batch_size": 8, "steps": 6, "log_every_steps": 2}
    return with_fields(preset("tiny"), common | {"runner": "shard_map"} | fields)


def training(devices=4, **fields):
    return start(config(run_dir=str(FOLDER / "unused"), **fields), devices=Devices(devices, "shard_map"))


def weights(name, **fields):
    """The state after a run."""
    run_dir = str(FOLDER / name)
    train(config(run_dir=run_dir, **fields), Devices(runner="shard_map"))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(restore(run_dir, whole_state=True).state)]


def refusal(path=PROGRAM, of=None):
    """Why the program in a file is not used for a training, by default for that it was saved from."""
    devices = of.devices if of else saved.devices
    lowered = of.parallel_step().lower(*train_step_arguments(of)) if of else compiled.lowered
    try:
        load_program(Path(path), lowered, devices.local)
    except UserError as error:
        return str(error)


def refused_start(**fields):
    try:
        training(**fields)
    except UserError as error:
        return str(error)


def edited(name, change=lambda header: None, content=lambda content: content, *, signed=True):
    """A copy of the program with another header or content."""
    first, header, rest = PROGRAM.read_bytes().split(b"\n", 2)
    fields, rest = json.loads(header), content(rest)
    change(fields)
    if signed:
        fields["sha256"] = hashlib.sha256(rest).hexdigest()
    path = FOLDER / name
    path.write_bytes(b"\n".join([first, json.dumps(fields).encode(), rest]))
    return path


class Harmful:
    def __reduce__(self):
        return os.mkdir, (str(FOLDER / "harmed"),)


saved = training()
compiled = compile_train_step(saved)
save_program(PROGRAM, compiled.lowered, compiled.executable, saved.devices.local)
(FOLDER / "text").write_text("hello")

plain, loaded = weights("plain"), weights("loaded", load=str(PROGRAM))
attempts = {
    "equal": all(np.array_equal(a, b) for a, b in zip(plain, loaded, strict=True)),
    "field": refusal(of=training(lr=2e-3)),
    "devices": refusal(of=training(2)),
    "version": refusal(edited("version", lambda fields: fields.update(jaxlib="0.0.1"))),
    "damaged": refusal(edited("bytes", content=lambda rest: rest[:-1] + b"x", signed=False)),
    "harmful": refusal(edited("pickled", content=lambda _: pickle.dumps(Harmful()))),
    "cut": refusal(edited("short", content=lambda rest: rest[: len(rest) // 2])),
    "other file": refusal(FOLDER / "text"),
    "no file": refusal(FOLDER / "absent"),
    "pmap": refused_start(load=str(PROGRAM), runner="pmap"),
    "harmed": (FOLDER / "harmed").exists(),
}
print(json.dumps(attempts))
