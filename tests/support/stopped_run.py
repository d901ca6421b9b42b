"""Trains runs in one process, uninterrupted or stopped like a killed process and continued; saves their last state."""

import dataclasses
import itertools

import jax
import numpy as np

from train_jax.run.checkpoint import Checkpoints
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.trainer.loop import train


class KilledError(Exception):
    pass


def runs_of(words):
    """Splits `-- DEVICES RUN_DIR OUT.npz [STOPS_AT …] -- …` into the words of each run."""
    return [list(run) for separator, run in itertools.groupby(words, lambda word: word == "--") if not separator]


def stop_at(stop, config, devices):
    """Stops after a checkpoint, before the run is finished."""
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


def train_and_save(config, devices, run_dir, out, *stops_at):
    config = dataclasses.replace(config, run_dir=run_dir)
    devices = Devices(int(devices))
    for step in stops_at:
        stop_at(int(step), config, devices)
    save_last_state(config, train(config, devices), out)


def save_last_state(config, figures, out):
    """Writes the state of the last checkpoint, and the loss of the last evaluation."""
    leaves = jax.tree_util.tree_leaves_with_path(restore(config.run_dir, whole_state=True).state)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    np.savez(out, **arrays, __loss=figures["loss"])
