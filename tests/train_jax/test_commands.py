"""The commands as a user runs them: how a process ends, export, evaluation."""

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from train_jax.__main__ import main
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.run.resume import open_run


@pytest.mark.parametrize(
    ("ending", "status", "last"), [("return 75", 75, "handler"), ("raise KeyError", 1, "dismantled")]
)
def test_the_process_ends_after_the_handlers_of_libraries(ending, status, last):
    """The interpreter is dismantled only after an error, whose traceback it prints."""
    code = f"""
import atexit, sys, train_jax.__main__ as trm
class Library:
    def __del__(self): print("dismantled", flush=True)
sys.modules["library"] = Library()
def main(argv):
    atexit.register(print, "handler")
    {ending}
trm.main = main
sys.exit(trm.command([]))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == status and done.stdout.split()[-1] == last, done.stderr
    assert ("KeyError" in done.stderr) == (status == 1)


def test_a_run_that_is_not_whole_is_one_line(capsys, tmp_path, data_dir):
    config = dataclasses.replace(preset("tiny"), data_dir=str(data_dir), run_dir=str(tmp_path / "run"))
    folder = open_run(config)
    folder.data.write_text((data_dir / "train" / "dataset.json").read_text())
    assert main(["evaluate", str(folder.path)]) == 2
    folder.config.write_text(json.dumps({"model": "trm"}))
    assert main(["evaluate", str(folder.path)]) == 2
    without_checkpoint, broken = capsys.readouterr().err.splitlines()
    assert "has no checkpoint yet" in without_checkpoint and "config.json cannot be read" in broken


def test_data_that_changed_in_place_is_evaluated_only_on_request(capsys, finished_run, data_dir, tmp_path):
    """Its recipe still states the hash of what was built."""
    run = RunFolder(shutil.copytree(finished_run, tmp_path / "run"))
    data = shutil.copytree(data_dir, tmp_path / "data")
    run.config.write_text(json.dumps(json.loads(run.config.read_text()) | {"data_dir": str(data)}))
    assert main(["evaluate", str(run.path)]) == 0
    path = data / "test" / "all__inputs.npy"
    np.save(path, np.load(path)[:, ::-1])
    capsys.readouterr()
    assert main(["evaluate", str(run.path)]) == 2
    expected = f"{data} holds other data than the run was trained on up to step 60; give --data-dir the same data set,"
    assert expected in capsys.readouterr().err
    assert main(["evaluate", str(run.path), "--data-dir", str(data)]) == 0


def test_exported_weights_are_checked_and_evaluated_and_early_halting_has_a_file(capsys, finished_run, tmp_path):
    run = RunFolder(shutil.copytree(finished_run, tmp_path / "run"))
    assert main(["export", str(run.path)]) == 0
    assert main(["evaluate", str(run.path), "--weights", str(run.weights)]) == 0
    output = capsys.readouterr().out
    assert "PyTorch agrees: the same answer on 8 of 8 puzzles" in output and "exact_accuracy" in output
    before = {path: path.read_bytes() for path in run.evaluation("test").parent.iterdir()}
    assert main(["evaluate", str(run.path), "--halt-threshold", "1"]) == 0
    early = json.loads(run.halted_early("test").read_text())
    assert (early["threshold"], early["steps"], early["computed_steps"]) == (1, 4, 4)
    assert before and all(path.read_bytes() == content for path, content in before.items())
