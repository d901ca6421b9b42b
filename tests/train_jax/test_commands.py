"""The commands as a user meets them: help at once, a mistake is one line and status 2."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from train_jax.__main__ import STAGES, main
from train_jax.run.config import PRESETS, to_json
from train_jax.run.folder import open_run


def trm(*argv):
    return subprocess.run([sys.executable, "-m", "train_jax", *argv], capture_output=True, text=True, timeout=120)


def mistake(capsys, *argv):
    assert main(list(argv)) == 2
    shown = capsys.readouterr()
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    return shown.err


def test_help_lists_every_stage_within_a_second():
    started = time.monotonic()
    shown = trm("--help")
    assert time.monotonic() - started < 1.0
    assert shown.returncode == 0 and all(name in shown.stdout for name in STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_explains_itself(stage):
    shown = trm(stage, "--help")
    assert shown.returncode == 0 and len(shown.stdout.splitlines()) > 5


def test_unknown_stage_and_preset(capsys):
    assert "unknown stage 'trian'; one of build-data" in mistake(capsys, "trian")
    assert "unknown preset 'nope'; use one of sudoku-extreme" in mistake(capsys, "train", "nope")
    assert "needs a preset" in mistake(capsys, "train")


def test_a_data_set_that_is_not_there(capsys, tmp_path):
    said = mistake(capsys, "train", "tiny", "--data-dir", str(tmp_path / "no"), "--run-dir", str(tmp_path / "run"))
    assert "no data set at" in said and "trm build-data" in said
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_divide(tmp_path, data_dir):
    seven = "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=7'"
    run = "import sys; from train_jax.__main__ import main; sys.exit(main(sys.argv[1:]))"
    where = ["--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", f"{seven}; {run}", "train", "tiny", *where, "--global-batch-size", "768"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 2
    assert shown.stderr == "trm: global batch 768 does not divide over 7 devices; use 756 or 770, or 8 devices\n"


def test_a_run_with_other_fields(capsys, tmp_path, data_dir):
    config = dataclasses.replace(PRESETS["tiny"], data_dir=str(data_dir), run_dir=str(tmp_path / "run"))
    open_run(config)
    said = mistake(
        capsys, "train", "tiny", "--data-dir", str(data_dir), "--run-dir", str(tmp_path / "run"), "--optim.lr", "0.5"
    )
    assert "optim.lr 0.001 there, 0.5 asked" in said and "--run-dir" in said


def test_no_run(capsys, tmp_path):
    for stage in ("evaluate", "export", "solve", "report", "summary"):
        assert "no run at" in mistake(capsys, stage, str(tmp_path / "nothing"))


def test_a_run_without_a_checkpoint(capsys, tmp_path, data_dir):
    config = dataclasses.replace(PRESETS["tiny"], data_dir=str(data_dir), run_dir=str(tmp_path / "run"))
    folder = open_run(config)
    folder.data.write_text((data_dir / "train" / "dataset.json").read_text())
    assert "has no checkpoint yet" in mistake(capsys, "evaluate", str(tmp_path / "run"))


def test_a_checkpoint_of_another_model(capsys, tmp_path, data_dir):
    run = str(tmp_path / "run")
    assert main(["train", "tiny", "--data-dir", str(data_dir), "--run-dir", run, "--steps", "4",
                 "--eval-batch-size", "8", "--wandb", "disabled"]) == 0  # fmt: skip
    config = dataclasses.replace(PRESETS["tiny"], data_dir=str(data_dir), run_dir=run)
    other = dataclasses.replace(config, arch=dataclasses.replace(config.arch, hidden_size=64))
    (tmp_path / "run" / "config.json").write_text(to_json(other))
    said = mistake(capsys, "evaluate", run)
    assert "is of another model" in said and "expected" in said
    (tmp_path / "run" / "config.json").write_text(to_json(config))
    assert main(["export", run]) == 0
    weights = str(tmp_path / "run" / "weights.safetensors")
    assert main(["evaluate", run, "--weights", weights]) == 0
    shown = capsys.readouterr().out
    assert "PyTorch agrees: the same answer on 8 of 8 puzzles" in shown and "exact_accuracy" in shown
    assert "halts when surer than  mean steps   exact   token" in shown and "all after 4" in shown
    there = {path: path.read_bytes() for path in (tmp_path / "run" / "evaluation").iterdir()}
    assert main(["evaluate", run, "--halt-threshold", "1"]) == 0
    assert "halting when surer than 1:" in capsys.readouterr().out
    early = json.loads((tmp_path / "run" / "evaluation" / "test_halted_early.json").read_text())
    assert (early["threshold"], early["steps"], early["computed_steps"]) == (1, 4, 4)
    assert all(path.read_bytes() == content for path, content in there.items())
    assert "--halt-threshold 2 is no probability" in mistake(capsys, "evaluate", run, "--halt-threshold", "2")
    (tmp_path / "run" / "config.json").write_text(to_json(config).replace('"L_layers": 1', '"L_layers": 2'))
    assert "is of another model" in mistake(capsys, "evaluate", run)


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
        ("evaluate", "The run, as `trm train` made it. (required); see trm evaluate --help"),
        ("build-data", "Expected one of {sudoku, maze, arc, inspect}; see trm build-data --help"),
        ("build-data soduku", "'soduku'; one of sudoku, maze, arc, inspect"),
        ("build-data sudoku --size", "'--size'. Expected 1 values; see trm build-data sudoku --help"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_status_2(capsys, monkeypatch, line, message):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(line.split()) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("trm: ") and told.err.count("\n") == 1 and message in told.err


def test_a_reader_who_has_had_enough_is_no_error(data_dir):
    command = [sys.executable, "-m", "train_jax", "build-data", "inspect", str(data_dir)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running.stdout.close()  # as `head` does
    assert running.stderr.read() == "" and running.wait() == 141
