"""When a run saves: after so many steps, and after so many minutes, at steps that all processes agree on."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from support.presets import with_fields

from train_jax import hooks
from train_jax.hooks import Saving
from train_jax.loop import train
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices

LAST = 40


def saving(tmp_path, **fields):
    fields = {"checkpoint_every_steps": 20, "log_every_steps": 4, "run_dir": str(tmp_path)} | fields
    config = dataclasses.replace(preset("tiny"), **fields)
    training = SimpleNamespace(config=config, devices=None, total_steps=LAST)
    return Saving(training, RunFolder(tmp_path), SimpleNamespace())


def test_checkpoints_by_minutes_are_after_log_lines(tmp_path, monkeypatch):
    """And those by steps where they were; the first process alone reads its clock."""
    steps = range(1, LAST + 1)
    for minutes, expected in ((0, [20, 40]), (0.5, [12, 20, 32, 40])):
        run = saving(tmp_path, checkpoint_every_minutes=minutes)
        run.due(0.5, 0.0, np.zeros(2))  # the clock starts
        due = [step for step in steps if run.due(step, 2.5 * step, np.zeros(2))]
        run.close()
        assert due == expected
    asked = []
    monkeypatch.setattr(hooks, "is_main_process", lambda: False)
    monkeypatch.setattr(hooks, "any_process", lambda flag: asked.append(flag) or True)
    run = saving(tmp_path, checkpoint_every_minutes=1)
    assert [step for step in steps if run.due(step, 1e6 * step, np.zeros(2))] == list(range(4, LAST + 1, 4))
    run.close()
    assert asked == [False] * 8, "without a collective at the steps where every process saves anyway"


@pytest.mark.parametrize("move", ["to_global", "to_rows"])
def test_what_is_saved_is_a_copy(move):
    """The next step reuses the memory of state and carry while they are written."""
    devices = Devices(1)
    array = devices.shard({"z": np.ones((1, 6, 64), np.float32)})["z"]
    on_device = np.asarray(array)  # on a CPU this is the memory of the device
    assert on_device.base is not None and np.shares_memory(on_device, np.asarray(array))
    assert not np.shares_memory(getattr(devices, move)({"z": array})["z"], on_device)


@pytest.mark.parametrize("dispatch", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_saves_by_minutes_and_records_the_same(tmp_path, data_dir, dispatch):
    fields = {"data_dir": str(data_dir), "eval_batch_size": 8, "wandb": "disabled", "steps": 12, "eval_every_steps": 0,
              "log_every_steps": 4, "checkpoint_every_steps": 100, "keep_checkpoints": 10, "H_cycles": 1, "L_cycles": 1,
              "halt_max_steps": 2, "steps_per_dispatch": dispatch}  # fmt: skip
    records, kept = [], []
    for minutes in (0, 1e-6):
        folder = RunFolder(tmp_path / str(minutes))
        config = with_fields(
            preset("tiny"), fields | {"run_dir": str(folder.path), "checkpoint_every_minutes": minutes}
        )
        train(config, Devices(1))
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        records.append(
            [{n: x for n, x in line.items() if n == "step" or n.startswith(("train/", "eval/"))} for line in lines]
        )
        kept.append(sorted(int(path.name) for path in folder.checkpoints.iterdir()))
    assert kept == [[12], [4, 8, 12]] and records[0] == records[1]
