"""Checkpoints other than the newest are evaluated, exported, shown and averaged, with results of their own."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from train_jax import load_run
from train_jax.__main__ import main
from train_jax.run.folder import RunFolder
from train_jax.run.restore import restore


@pytest.fixture
def run(tmp_path, finished_run):
    """A copy of the finished run, with checkpoints at steps 50 and 60."""
    return RunFolder(shutil.copytree(finished_run, tmp_path / "run"))


@pytest.mark.slow
def test_an_average_of_checkpoints_is_the_mean_of_weights_and_tables(run):
    older, newer = (restore(str(run.path), step=step) for step in (50, "newest"))
    mean = restore(str(run.path), average=[60, 50])
    assert (older.step, newer.step, mean.step) == (50, 60, 60)
    assert mean.folder.weights.relative_to(run.path).as_posix() == "average-of-50-60/weights.safetensors"
    assert older.folder.weights.parent.name == "at-step-50" and newer.folder.weights == run.weights
    (table,) = (each.weights for each in mean.objective.tables)
    changed = 0
    for part in ("eval_params", "buffers"):
        a, b, c = ({n: np.asarray(x) for n, x in getattr(each.state, part).items()} for each in (older, newer, mean))
        for name in c:
            averaged = part == "eval_params" or name == table
            expected = ((a[name].astype(np.float64) + b[name]) / 2).astype(b[name].dtype) if averaged else b[name]
            np.testing.assert_array_equal(c[name], expected, err_msg=name)
            assert c[name].dtype == b[name].dtype
            changed += bool((a[name] != b[name]).any())
    assert changed > 5, "the checkpoints are equal: nothing was averaged"


@pytest.mark.campaign
def test_a_chosen_checkpoint_has_results_of_its_own(run, capsys):
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    where = str(run.path)
    assert main(["evaluate", where, "--step", "50"]) == 0
    assert main(["report", where, "--step", "50"]) == 0
    assert main(["export", where, "--average-last", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"{where} at step 50, test set" in shown and "the same answer on 8 of 8 puzzles" in shown
    figures = json.loads((run.path / "at-step-50/evaluation/test.json").read_text())
    assert figures != json.loads(run.evaluation("test").read_text())
    page = (run.path / "at-step-50/report/index.html").read_text()
    assert "run at-step-50" in page and "Where the time went" in page and "compile" in page
    exported = load_file(run.path / "average-of-50-60/weights.safetensors")
    state = restore(where, average_last=2).state_dict()
    assert all((exported[name] == tensor.numpy()).all() for name, tensor in state.items())
    assert {path: path.read_bytes() for path in before} == before
    assert (load_run(where).step, load_run(where, 50).step) == (60, 50)
