"""Writes the folder of a finished run with initial weights, without training."""

import dataclasses
import json
from pathlib import Path

from support.presets import with_fields
from support.text_sets import text_set
from train_jax.puzzles.presets import PRESETS
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.presets import preset
from train_jax.run.resume import open_run
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import start


def write_run(path: Path, data_dir: Path, *, act_steps: int, step: int, zero_params: bool = False, **fields) -> str:
    """Writes the run of a small model; with `zero_params`, only the averaged weights are not zero."""
    config = PRESETS["tiny"]
    arch = dataclasses.replace(config.arch, H_cycles=1, L_cycles=1, halt_max_steps=act_steps)
    config = dataclasses.replace(config, arch=arch, data_dir=str(data_dir), run_dir=str(path), **fields)
    return write_run_of(config, step=step, zero_params=zero_params)


def write_run_of(config, *, step: int, zero_params: bool = False, change=lambda state: state) -> str:
    """Writes the run of any configuration, likewise; `change` is applied to its state."""
    training = start(config, devices=Devices(1))
    folder = open_run(config)
    folder.data.write_text(json.dumps(training.task.facts))
    state = change(training.initial_state())
    if zero_params:
        state = state._replace(params={name: array * 0 for name, array in state.params.items()})
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, state, {}, {"train_seconds": 0.0})
    checkpoints.wait()
    checkpoints.close()
    return config.run_dir


def write_language_run(folder: Path) -> None:
    """Writes sums to `folder/set` and the run of a language model, of 160 positions, to `folder/run`."""
    text_set(folder, (f"{number} + {number} = {2 * number}\n" * 20 for number in range(40)), vocab_size=280)
    config = dataclasses.replace(preset("chat-tiny"), data_dir=str(folder / "set"), run_dir=str(folder / "run"))
    sizes = {"seq_len": 16, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 16}
    write_run_of(with_fields(config, sizes | {"global_batch_size": 2, "eval_batch_size": 8}), step=3)
