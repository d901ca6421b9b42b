"""Whole runs in processes of their own: compute options, the number of devices and kills do not change what is learned;
the programs of a run: one for each recursion depth, one all-reduce for the gradients, no transfer to the host."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
from support.scripts import ENVIRONMENT, ROOT, run_script, script

from train_jax.puzzles.task import Curriculum
from train_jax.run.events import read_goodput
from train_jax.run.folder import RunFolder

FIELDS = ("halt_exploration_prob=0.5", "eval_every_steps=0")


def differences(tmp_path, data_dir, runs):
    """Returns by name how much, relative to it, the worst array of each run differs from that of the first one.

    `runs` are names, devices and fields; all of them run in one process. Optimizer state is not compared.
    """
    words = []
    for name, devices, *fields in runs:
        words += ["--", devices, tmp_path / name, tmp_path / f"{name}.npz", *FIELDS, *fields]
    run_script("train_tiny", data_dir, *words)
    first, *others = dict.fromkeys(name for name, *_ in runs)
    learned = {name: np.load(tmp_path / f"{name}.npz") for name in (first, *others)}
    parameters = {key: array for key, array in learned[first].items() if "opt_state" not in key and array.size}
    table = next(key for key in parameters if "puzzle_emb.weights" in key)
    assert len(np.unique(parameters[table], axis=0)) > 3, "the puzzle rows did not change: nothing was compared"

    def worst(name):
        arrays = learned[name]
        scales = {key: max(np.abs(array).max(), 1e-12) for key, array in parameters.items()}
        return max((float(np.abs(arrays[key] - parameters[key]).max() / scale), key) for key, scale in scales.items())

    return {name: worst(name) for name in others}


@pytest.mark.slow
def test_options_do_not_change_what_is_learned(tmp_path, data_dir):
    common = "steps=20", "checkpoint_every_steps=20", "log_every_steps=10"
    several = "runner='shard_map'", "accumulation_steps=2", "steps_per_dispatch=10", r"remat='.*L_level'"
    parts = "accumulation_steps=2", "cpu_examples=4"
    runs = [("plain", 4, *common), ("several options", 4, *common, *several), ("four parts", 1, *common, *parts)]
    worst = differences(tmp_path, data_dir, runs)
    assert not {name: each for name, each in worst.items() if each[0] > 1e-5}


@pytest.mark.campaign
def test_eight_devices_learn_the_same_as_one_from_the_start_or_from_a_checkpoint(tmp_path, data_dir):
    """Both runs have the same global batch and exploration, and puzzle rows repeated within and across devices.

    The carry goes with the rows of the global batch from one device to eight. With the default `eps`, Adam's first
    steps turn the rounding of a gradient near 0 into a part of the learning rate.
    """
    fields = ("eps=1e-6", "checkpoint_every_steps=10", "L_cycles=1", "mlp_t=False", "pos_encodings='rope'",
              "augment=True")  # fmt: skip
    runs = (("one", 1, 20), ("eight", 8, 20), ("continued", 1, 10), ("continued", 8, 20))
    worst = differences(tmp_path, data_dir, [(name, count, *fields, f"steps={steps}") for name, count, steps in runs])
    assert not {name: each for name, each in worst.items() if each[0] > 3e-6}


@pytest.mark.slow
def test_killed_and_continued_is_the_same_run_bit_for_bit(tmp_path, finished_run, finished_fields, data_dir):
    words = data_dir, 1, tmp_path / "killed", tmp_path / "killed.npz", *finished_fields
    command = script("train_tiny", *words)
    killed = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.DEVNULL)
    while not (tmp_path / "killed" / "checkpoints" / "20" / "commit_success.txt").exists():
        assert killed.poll() is None, "the run ended before it could be killed"
        time.sleep(0.002)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    continued = RunFolder(tmp_path / "killed")
    assert not continued.finished.exists()
    assert "continuing at step" in run_script("train_tiny", *words)
    expected = dict(np.load(f"{finished_run}.npz"))
    arrays = dict(np.load(tmp_path / "killed.npz"))
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)
    records = [[json.loads(x) for x in folder.metrics.open()] for folder in (RunFolder(finished_run), continued)]
    keys = [[(r["step"], sorted(r)) for r in of_run] for of_run in records]
    assert keys[0] == keys[1], "a step is recorded twice or not at all"
    losses = [[r.get("train/lm_loss") for r in of_run] for of_run in records]
    assert losses[0] == losses[1]
    goodput = read_goodput(continued)
    assert goodput.sessions == 2 and sum(goodput.seconds.values()) == pytest.approx(goodput.wall_seconds, rel=0.01)


@pytest.mark.slow
def test_the_programs_of_runs(tmp_path, data_dir):
    """An epoch of this data has four steps; the second depth is compiled while the first one trains."""
    small = "steps=6", "eval_every_steps=2", "H_cycles=1", "L_cycles=1", "halt_max_steps=2"
    runs = (
        (8, *small),
        (8, *small, "runner='shard_map'", "accumulation_steps=2"),
        (1, "steps=12", "curriculum_epochs=2", "curriculum_start=(1,1)", "L_cycles=1"),
    )
    words = [each for n, (count, *fields) in enumerate(runs) for each in ("--", count, tmp_path / str(n), *fields)]
    shown = run_script("inspect_programs", data_dir, *words).splitlines()
    *plain, curriculum = [json.loads(line) for line in shown if line.startswith("{")]
    for run in plain:
        assert (run["all_reduces"], run["programs_by_call"], run["fetches"]) == ([1], [1] * 6, [])
    assert (curriculum["programs"], curriculum["programs_by_call"]) == (2, [2] * 12)


def test_curriculum_depths():
    curriculum = Curriculum((1, 2), (3, 6), 100)
    depths = [curriculum.at(step) for step in range(120)]
    assert depths[0] == (1, 2) and depths[50] == (2, 4) and depths[100:] == [(3, 6)] * 20
    assert depths == sorted(depths)
    for step in range(100):
        assert curriculum.after(step) == next((d for d in depths[step:] if d != depths[step]), None)
    assert Curriculum((3, 6), (3, 6), 0).at(0) == (3, 6) and Curriculum((3, 6), (3, 6), 0).after(0) is None
