"""Runs of several processes with shared folders, each with devices of its own, learn the same as one process."""

import json
import shutil
import sys

import numpy as np
import pytest
from support.processes import own_lines, run_processes
from support.scripts import script

from campaigns.faults_runs import relative_error
from train_jax.errors import StorageError, UserError
from train_jax.run.events import read_goodput
from train_jax.run.folder import RunFolder
from train_jax.runtime.processes import all_or_none

COMPARED = {"train/lm_loss", "train/count", "train/steps", "eval/accuracy", "eval/count"}
FIELDS = ("steps=20", "checkpoint_every_steps=10", "eval_every_steps=10", "halt_exploration_prob=0.5", "H_cycles=1",
          "L_cycles=1")  # fmt: skip


def train(run_dir, data_dir, processes, devices, *fields):
    command = script("train_tiny", data_dir, devices, run_dir, f"{run_dir}.npz", *FIELDS, *fields)
    statuses, texts = run_processes([command] * processes)
    assert statuses == [0] * processes, "\n".join(texts)
    return texts


def revert_to_step_ten(run_dir):
    """Leaves the run as if it had been stopped between its two checkpoints."""
    (run_dir / "FINISHED").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "20")


def assert_same(run_dir, other):
    learned, expected = (dict(np.load(f"{path}.npz")) for path in (run_dir, other))
    assert learned.keys() == expected.keys()
    for name, array in expected.items():
        assert "opt_state" in name or relative_error(learned[name], array) < 1e-5, name
    predictions, expected = (dict(np.load(path / "evaluation" / "test_predictions.npz")) for path in (run_dir, other))
    np.testing.assert_array_equal(predictions["predictions"], expected["predictions"])
    records, reference = ([json.loads(line) for line in (path / "metrics.jsonl").open()] for path in (run_dir, other))
    assert [(r["step"], sorted(r)) for r in records] == [(r["step"], sorted(r)) for r in reference]
    for record, other_record in zip(records, reference, strict=True):
        for name in other_record.keys() & COMPARED:
            assert record[name] == pytest.approx(other_record[name], rel=1e-4), (record["step"], name)


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory, data_dir):
    run_dir = tmp_path_factory.mktemp("single") / "run"
    train(run_dir, data_dir, 1, 1)
    return run_dir


@pytest.mark.campaign
@pytest.mark.parametrize("runner", ["pmap", "shard_map"])
def test_two_processes_learn_the_same_as_one_device(tmp_path, data_dir, single_process_run, runner):
    run_dir = tmp_path / "two"
    train(run_dir, data_dir, 2, 4, f"runner='{runner}'")
    assert_same(run_dir, single_process_run)
    assert read_goodput(RunFolder(run_dir)).seconds["compile"] > 0, "compiled at the first call"


@pytest.mark.slow
def test_a_run_continues_with_another_number_of_processes(tmp_path, data_dir, single_process_run):
    """Two processes of four devices train it, then one of eight; two processes evaluate it."""
    run_dir = tmp_path / "run"
    texts = train(run_dir, data_dir, 2, 4)
    assert ["step 20: exact accuracy" in text for text in texts] == [True, False], "only the first process prints"
    logs = [(run_dir / "logs" / f"host-{number:02}.log").read_text() for number in range(2)]
    assert [f"process {number} of 2 of the run" in log for number, log in enumerate(logs)] == [True, True]
    assert ["step 20: exact accuracy" in log for log in logs] == [True, False]
    revert_to_step_ten(run_dir)
    (text,) = train(run_dir, data_dir, 1, 8)
    assert "continuing at step 10" in text
    assert_same(run_dir, single_process_run)
    scored = run_dir / "evaluation" / "test.json"
    before = json.loads(scored.read_text())
    scored.unlink()
    statuses, texts = run_processes([[sys.executable, "-m", "train_jax", "evaluate", str(run_dir)]] * 2)
    assert statuses == [0, 0], "\n".join(texts)
    assert json.loads(scored.read_text()) == pytest.approx(before, rel=1e-5)


@pytest.mark.slow
def test_an_error_in_one_process_stops_all_with_one_line(tmp_path, data_dir):
    """The second process does not see the folder of the first one."""
    command = [sys.executable, "-m", "train_jax", "train", "tiny", "--wandb", "disabled"]
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        folder.mkdir()
    statuses, texts = run_processes([[*command, "--data-dir", str(data_dir), "--run-dir", "run"]] * 2, folders)
    assert statuses == [2, 2], "\n".join(texts)
    (first,), (second,) = map(own_lines, texts)
    message = "does not contain the files that the first process wrote"
    assert message in second and (message in first or "process 1 of 2 failed" in first)


FAILURES = "no data; build them", "process 0 of 2 failed; see its output for the reason"
HELD = {"replicated": {"flat": [3, 3], "rows": [8, 2]}, "sharded": {"flat": [2, 3], "rows": [2, 2, 2]}}
"""The shapes of the parameters that a process has: two of four shards, each with nine numbers and zeros or two rows."""


def test_two_processes_agree_and_share_arrays_and_a_checkpoint(tmp_path):
    """Tests all but the training step: messages, decisions, arrays over four devices, and a common checkpoint."""
    statuses, texts = run_processes([script("work_of_processes", tmp_path)] * 2)
    assert statuses == [0, 0], "\n".join(texts)
    results = [json.loads(next(line for line in text.splitlines() if line.startswith("{"))) for text in texts]
    for index, result in enumerate(results):
        assert result.pop("agreements") == {
            "place": [index, 2],
            "sums": [[3, 0], [3, 2], [3, 4], [3, 6]],
            "kept": 2,
            "heard": [[0, "early"], [1, "early"]],
            "gathered": [[0, 7, 1, 7]],
            "any": [True, True, False],
            "of main": {"made by": 0},
            "failure of main": FAILURES[index],
            "equal": None,
            "different": "the 2 processes were started with different fields; start all with the same",
            "steps": [2, 4],
        }
        assert result.keys() == {"pmap", "shard_map"}
        for runner, arrays in result.items():
            for name, held in HELD.items():
                shapes = {name: [4, *shape[1:]] for name, shape in held.items()} if name == "sharded" else held
                expected = {"shapes": shapes, "held": held, "is whole": True, "saved as it was": True}
                assert arrays.pop(name) == expected, (runner, name)
            assert arrays == {
                "count": 4,
                "positions": [2 * index, 2 * index + 1],
                "sums": [28, 28],
                "own rows": True,
                "checksums": True,
                "rows of a function": [[2 * index, 2 * index + 1], [0, 1, 2], 7],
                "restored": [True, True, 3, 1.5],
            }, runner


@pytest.mark.parametrize("error", [UserError, StorageError])
def test_all_processes_end_with_the_status_of_the_one_that_failed(monkeypatch, error):
    """Otherwise `--restarts` starts only some of them again."""
    statuses = {"statuses": np.array([0, error.STATUS])}
    monkeypatch.setattr("train_jax.runtime.processes.gather", lambda arrays, axis: statuses)
    with pytest.raises(UserError, match="process 1 of 2 failed; see its output") as caught, all_or_none():
        pass
    assert caught.value.STATUS == error.STATUS
