"""What a run compiles: one program for each recursion depth, one collective for the gradients, nothing fetched."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from train_jax.runtime.programs import Curriculum

HERE = Path(__file__).parent


def program(tmp_path, data_dir, devices, *fields):
    command = [sys.executable, str(HERE / "program_process.py"), str(devices), str(data_dir), str(tmp_path / "run")]
    done = subprocess.run([*command, *fields], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("fields", [(), ("runner='shard_map'", "accumulation_steps=2")], ids=["pmap", "shard_map"])
def test_one_program_one_all_reduce_and_nothing_fetched(tmp_path, data_dir, fields):
    found = program(tmp_path, data_dir, 8, "steps=12", "eval_every_steps=4", *fields)
    assert found["all_reduces"] == [1]
    assert set(found["programs_by_call"]) == {1} and len(found["programs_by_call"]) == 12
    assert found["fetches"] == []


def test_a_curriculum_compiles_each_depth_once(tmp_path, data_dir):
    """Four steps make an epoch of this data."""
    found = program(tmp_path, data_dir, 1, "steps=16", "curriculum_epochs=2", "curriculum_start=(1,1)")
    assert found["programs"] == 2
    assert found["programs_by_call"] == [2] * 16, "the second depth is compiled while the first one trains"


def test_depths_of_the_curriculum():
    curriculum = Curriculum((1, 2), (3, 6), 100)
    depths = [curriculum.at(step) for step in range(120)]
    assert depths[0] == (1, 2) and depths[50] == (2, 4) and depths[100:] == [(3, 6)] * 20
    assert depths == sorted(depths)
    for step in range(100):
        assert curriculum.after(step) == next((d for d in depths[step:] if d != depths[step]), None)
    assert Curriculum((3, 6), (3, 6), 0).at(0) == (3, 6) and Curriculum((3, 6), (3, 6), 0).after(0) is None
