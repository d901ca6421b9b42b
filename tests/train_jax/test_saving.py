"""A run saves after a number of steps or of minutes, at steps that all processes agree on."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from train_jax import hooks
from train_jax.hooks import Saving
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
    """Checkpoints by steps stay where they were; only the first process reads its clock."""
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
def test_a_save_writes_a_copy(move):
    """The next step reuses the memory of state and carry while they are written."""
    devices = Devices(1)
    array = devices.shard({"z": np.ones((1, 6, 64), np.float32)})["z"]
    on_device = np.asarray(array)  # on a CPU this is the memory of the device
    assert on_device.base is not None and np.shares_memory(on_device, np.asarray(array))
    assert not np.shares_memory(getattr(devices, move)({"z": array})["z"], on_device)
