"""Continuation of a run: the fields and data it uses, and the process that may write its folder."""

import dataclasses
import json
import os

import numpy as np
import pytest
from support.presets import SMALL_RUN

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.run.files import local_copy, whole_file
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.run.resume import OPERATIONAL, changed_fields, decide_start, open_run, sole_writer


@pytest.fixture
def command(place, data_at):
    """`trm train` with further options; returns the exit status."""
    where = ["--data-dir", str(data_at), "--run-dir", str(place / "run")]
    return lambda *options: main(["train", "tiny", *where, *SMALL_RUN, *options])


@pytest.mark.slow
def test_a_run_continues_with_more_steps_and_records_what_changed(command, place, data_at, capsys):
    assert command("--resume", "must") == 2
    assert "run has no checkpoint; use --resume auto" in capsys.readouterr().err and not (place / "run").exists()
    assert command("--steps", "4", "--resume", "never") == 0
    assert command("--steps", "4", "--resume", "never") == 2
    assert "holds a run already; use another --run-dir, or --resume auto" in capsys.readouterr().err
    assert command("--steps", "3") == 2
    assert "steps 4 there, 3 requested" in capsys.readouterr().err
    assert command("--steps", "6", "--keep-checkpoints", "5", "--resume", "must") == 0
    assert "continuing at step 4" in capsys.readouterr().out
    folder = RunFolder(place / "run")
    assert json.loads(folder.finished.read_text())["train_steps"] == 6
    (record,) = map(json.loads, folder.changes.read_text().splitlines())
    assert record["fields"] == {"steps": [4, 6], "keep_checkpoints": [2, 5], "resume": ["never", "must"]}
    with sole_writer(str(folder.path)):
        assert command("--steps", "8") == 2
    assert "run is being written by process " in capsys.readouterr().err
    labels = data_at / "train" / "all__labels.npy"
    with local_copy(labels) as local:
        rolled = np.roll(np.load(local), 1, axis=0)
    with whole_file(labels) as scratch:
        np.save(scratch, rolled)
    assert command("--steps", "8") == 2
    assert "holds other data than the run was trained on up to step 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"seed": 1}, "seed 0 there, 1 requested"),
        ({"steps": 0}, "steps 10 there, 0 requested"),
        ({"optim": {"lr": 0.5}}, "optim.lr 0.001 there, 0.5 requested"),
        ({"optim": {"max_skipped_steps": 5}, "compute": {"runner": "shard_map"}, "steps": 11}, ""),
        ({"data_dir": "elsewhere", "wandb": "offline", "keep_best": "exact_accuracy"}, ""),
        ({"profile": 5, "profile_skip": 2}, ""),
    ],
)
def test_fields_identify_the_run_or_may_change(place, changes, refused):
    config = dataclasses.replace(preset("tiny"), run_dir=str(place), steps=10)
    folder = open_run(config)
    parts = {name: value for name, value in changes.items() if isinstance(value, dict)}
    other = {name: dataclasses.replace(getattr(config, name), **value) for name, value in parts.items()}
    changed = dataclasses.replace(config, **(changes | other))
    if refused:
        with pytest.raises(UserError, match=refused):
            changed_fields(folder, changed)
    else:
        assert len(changed_fields(folder, changed)) == len(changes)


def test_a_length_may_grow_only_where_one_is_given(place):
    """The epochs decide without `steps`, and may give more steps than those requested now."""
    folder = open_run(dataclasses.replace(preset("tiny"), run_dir=str(place), steps=0))
    with pytest.raises(UserError, match="steps 0 there, 10 requested"):
        changed_fields(folder, dataclasses.replace(preset("tiny"), run_dir=str(place), steps=10))


def test_operational_fields_exist():
    fields = {field.name for field in dataclasses.fields(preset("tiny"))} | {"compute.", "optim.max_skipped_steps"}
    of_language = {f"task_config.{field.name}" for field in dataclasses.fields(preset("chat-tiny").task_config)}
    assert fields | of_language >= OPERATIONAL


def test_one_process_writes_a_local_folder(tmp_path):
    run = tmp_path / "runs" / "run"
    for _ in range(2):  # the second time over what the first one left
        with sole_writer(str(run)):
            owner = rf"{run} is being written by process {os.getpid()} on \S+ since [\d: -]+; wait until it ends"
            with pytest.raises(UserError, match=owner), sole_writer(str(run)):
                pass


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"), sole_writer(str(tmp_path / "file" / "run")):
        pass


def test_a_start_needs_a_folder_for_a_run(place, tmp_path):
    """Nothing is made before the run is known to start."""

    def decided(folder, *steps, **fields):
        return decide_start(dataclasses.replace(preset("tiny"), run_dir=str(folder), **fields), *steps or (10, ""))

    assert decided(place / "run") == decided(place / "run", resume="never") and not (place / "run").exists()
    with pytest.raises(UserError, match="--run-dir is empty"):
        decided("")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file is a file; give a folder") as error:
        decided(tmp_path / "file")
    assert error.value.STATUS == 2
    (tmp_path / "set" / "train").mkdir(parents=True)
    (tmp_path / "set" / "train" / "dataset.json").write_text("{}")
    with pytest.raises(UserError, match="set is a data set"):
        decided(tmp_path / "set")
    finished = RunFolder(tmp_path / "finished").finished
    finished.parent.mkdir()
    finished.write_text(json.dumps({"train_steps": 10, "data": "one"}))
    assert decided(finished.parent, 10, "one").finished
    with pytest.raises(UserError, match="holds other data than the run was trained on up to step 10"):
        decided(finished.parent, 10, "two")
    for damaged in ("", '{"train_steps": "many"}', "[]"):
        finished.write_text(damaged)
        with pytest.raises(UserError, match=r"FINISHED cannot be read .*remove it"):
            decided(finished.parent, 40, "")
