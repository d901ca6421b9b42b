"""`trm compile-pod --save` and `trm train --compute.load`: a compiled train step as a file, on virtual CPU devices."""

import json

import pytest
from support.processes import run_processes
from support.scripts import run_script, script

from train_jax.__main__ import main


@pytest.mark.slow
def test_a_saved_train_step_trains_the_same_weights_and_no_other_run(data_dir, tmp_path):
    *log, last = run_script("saved_programs", data_dir, tmp_path).splitlines()
    attempts = json.loads(last)
    assert attempts.pop("equal") is True and attempts.pop("harmed") is False
    assert any("train step loaded in" in line for line in log)
    reasons = {
        "field": "was compiled for another train step: other code, fields or sizes of the data",
        "devices": "was compiled for devices 4, not 2",
        "version": "was compiled for jaxlib '0.0.1', not",
        "damaged": "is damaged; save it again",
        "harmful": "cannot be loaded (it refers to",
        "cut": "cannot be loaded (",
        "other file": "is no program that `trm compile-pod --save` wrote",
        "no file": "cannot be read (No such file or directory)",
        "pmap": "needs --compute.runner shard_map",
    }
    assert attempts.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert reason in attempts[name] and "\n" not in attempts[name], (name, attempts[name])


@pytest.mark.slow
def test_a_saved_train_step_in_two_processes(data_dir, tmp_path):
    """The first process saves it, both load it; that of one process is another one."""
    command = script("saved_by_processes", data_dir, tmp_path)
    for count in (1, 2):
        statuses, texts = run_processes([command] * count)
        assert statuses == [0] * count, "\n".join(texts)
    for text in texts:
        (line,) = (json.loads(line) for line in text.splitlines() if line.startswith("{"))
        assert line["equal"] and line["leaves"] > 10 and line["loads"] == ["step.program"]
        assert "was compiled for devices 2, not 4" in line["of one process"]


@pytest.mark.parametrize("fields", [[], ["--compute.runner", "shard_map", "--step", "evaluate"]])
def test_only_a_train_step_under_shard_map_is_saved(fields, capsys, tmp_path):
    assert main(["compile-pod", "tiny", "--save", str(tmp_path / "step"), *fields]) == 2
    assert "use --compute.runner shard_map, and leave out --step" in capsys.readouterr().err
