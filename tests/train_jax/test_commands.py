"""The commands as a user runs them: how a process begins and ends, export, evaluation, runs that are not whole."""

import dataclasses
import gc
import json
import shutil
import subprocess
import sys

import pytest

from train_jax import __main__ as program
from train_jax.__main__ import main
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.run.resume import open_run


def mistake(capsys, *argv):
    assert main(list(argv)) == 2
    output = capsys.readouterr()
    assert len(output.err.strip().splitlines()) == 1, output.err
    return output.err


def test_a_stage_is_imported_without_garbage_collections(monkeypatch):
    collecting, frozen = [], []
    monkeypatch.setattr(program.importlib, "import_module", lambda name: collecting.append((name, gc.isenabled())))
    monkeypatch.setattr(program.gc, "freeze", lambda: frozen.append(gc.isenabled()))
    program._stage("not-there")
    assert collecting == [("train_jax.stages.not_there", False)] and frozen == [True]


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


def test_a_run_without_a_checkpoint_is_one_line(capsys, tmp_path, data_dir):
    config = dataclasses.replace(preset("tiny"), data_dir=str(data_dir), run_dir=str(tmp_path / "run"))
    folder = open_run(config)
    folder.data.write_text((data_dir / "train" / "dataset.json").read_text())
    assert "has no checkpoint yet" in mistake(capsys, "evaluate", str(tmp_path / "run"))


@pytest.fixture
def run(tmp_path, finished_run):
    """A copy of the finished run."""
    return RunFolder(shutil.copytree(finished_run, tmp_path / "run"))


def test_exported_weights_are_checked_and_evaluated(capsys, run):
    assert main(["export", str(run.path)]) == 0
    assert main(["evaluate", str(run.path), "--weights", str(run.weights)]) == 0
    output = capsys.readouterr().out
    assert "PyTorch agrees: the same answer on 8 of 8 puzzles" in output and "exact_accuracy" in output
    assert "halting probability >  mean steps   exact   token" in output and "all after 4" in output


def test_early_halting_has_a_file_of_its_own(capsys, run):
    before = {path: path.read_bytes() for path in run.evaluation("test").parent.iterdir()}
    assert main(["evaluate", str(run.path), "--halt-threshold", "1"]) == 0
    assert "halting at a probability above 1:" in capsys.readouterr().out
    early = json.loads(run.halted_early("test").read_text())
    assert (early["threshold"], early["steps"], early["computed_steps"]) == (1, 4, 4)
    assert before and all(path.read_bytes() == content for path, content in before.items())
    error = mistake(capsys, "evaluate", str(run.path), "--halt-threshold", "2")
    assert "--halt-threshold is 2.0; use at most 1" in error


def test_a_broken_config_is_one_line(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": "trm"}))
    assert "config.json cannot be read" in mistake(capsys, "evaluate", str(tmp_path))
