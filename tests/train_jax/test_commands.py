"""The commands as a user runs them: help, and mistakes that are one line and status 2."""

import dataclasses
import gc
import json
import shutil
import subprocess
import sys

import pytest

from train_jax import __main__ as program
from train_jax.__main__ import STAGES, main
from train_jax.run.config import from_json, to_json
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


def test_help_lists_every_stage_without_torch_and_jax():
    code = "import sys, train_jax.__main__ as trm; trm.main(['--help']); print({'torch', 'jax'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(name in output for name in STAGES) and output.splitlines()[-1] == "set()"


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


def test_unknown_stage_and_preset(capsys):
    assert "unknown stage 'trian'; use one of build-data" in mistake(capsys, "trian")
    assert "unknown preset 'nope'; use one of sudoku-extreme" in mistake(capsys, "train", "nope")
    assert "needs a preset" in mistake(capsys, "train")


def test_a_missing_data_set(capsys, tmp_path):
    error = mistake(capsys, "train", "tiny", "--data-dir", str(tmp_path / "no"), "--run-dir", str(tmp_path / "run"))
    assert "no data set at" in error and "trm build-data" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_batch_that_does_not_divide_over_the_devices(tmp_path, data_dir):
    seven = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=7'"
    run = "import sys; from train_jax.__main__ import main; sys.exit(main(sys.argv[1:]))"
    where = ["--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", f"{seven}; {run}", "train", "tiny", *where, "--global-batch-size", "768"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 2
    assert shown.stderr == "trm: global batch 768 does not divide over 7 devices; use 756 or 770, or 8 devices\n"


def test_a_run_with_other_fields(capsys, tmp_path, data_dir):
    where = {"data_dir": str(data_dir), "run_dir": str(tmp_path / "run")}
    open_run(dataclasses.replace(preset("tiny"), **where))
    options = ["--data-dir", where["data_dir"], "--run-dir", where["run_dir"], "--optim.lr", "0.5"]
    error = mistake(capsys, "train", "tiny", *options)
    assert "optim.lr 0.001 there, 0.5 requested" in error and "--run-dir" in error


def test_no_run(capsys, tmp_path):
    for stage in ("evaluate", "export", "solve", "report", "summary", "status"):
        assert "no run at" in mistake(capsys, stage, str(tmp_path / "nothing"))


def test_a_run_without_a_checkpoint(capsys, tmp_path, data_dir):
    config = dataclasses.replace(preset("tiny"), data_dir=str(data_dir), run_dir=str(tmp_path / "run"))
    folder = open_run(config)
    folder.data.write_text((data_dir / "train" / "dataset.json").read_text())
    assert "has no checkpoint yet" in mistake(capsys, "evaluate", str(tmp_path / "run"))


@pytest.fixture
def run(tmp_path, finished_run):
    """A copy of the finished run."""
    return RunFolder(shutil.copytree(finished_run, tmp_path / "run"))


def test_a_checkpoint_of_another_model(capsys, run):
    config = from_json(run.config.read_text())
    for changes, problem in (({"hidden_size": 64}, "expected"), ({"L_layers": 2}, "is missing")):
        other = dataclasses.replace(config, arch=dataclasses.replace(config.arch, **changes))
        run.config.write_text(to_json(other))
        error = mistake(capsys, "evaluate", str(run.path))
        assert "is of another model" in error and problem in error


def test_export_and_evaluation_of_exported_weights(capsys, run):
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


def test_a_broken_config(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": "trm"}))
    assert "config.json cannot be read" in mistake(capsys, "evaluate", str(tmp_path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train tiny --steps abc", "'abc'; expected --steps INT; see trm train tiny --help"),
        ("train tiny --stepz 3", "--stepz, 3; perhaps --steps INT; see trm train tiny --help"),
        ("train tiny --wandb maybe", "'maybe' for argument '--wandb'. Expected one of ('auto', 'online'"),
        ("train tiny --arch.attention-window 4", "attention_window is 4; use an odd number"),
        ("evaluate", "a folder, or gs://bucket/folder. (required); see trm evaluate --help"),
        (
            "build-data",
            "Expected one of {sudoku, maze, arc, text, chat, instructions, inspect}; see trm build-data --help",
        ),
        ("build-data soduku", "'soduku'; use one of sudoku, maze, arc, text, chat, instructions, inspect"),
        ("build-data sudoku --size", "'--size'. Expected 1 values; see trm build-data sudoku --help"),
    ],
)
def test_arguments_that_cannot_be_parsed_are_one_line_and_status_2(capsys, monkeypatch, line, message):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("trm: ") and output.err.count("\n") == 1
    assert message in output.err


def test_a_reader_that_stops_reading_is_not_an_error(data_dir):
    command = [sys.executable, "-m", "train_jax", "build-data", "inspect", str(data_dir)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running.stdout.close()  # as `head` does
    assert running.stderr.read() == "" and running.wait() == 141
