"""The programs of a run: one for each recursion depth, one all-reduce for the gradients, no transfer to the host."""

import json

import pytest
from support.scripts import run_script

from train_jax.tasks.puzzles.task import Curriculum


def inspect_programs(tmp_path, data_dir, devices, *fields):
    return json.loads(run_script("inspect_programs", devices, data_dir, tmp_path / "run", *fields).splitlines()[-1])


@pytest.mark.parametrize("fields", [(), ("runner='shard_map'", "accumulation_steps=2")], ids=["pmap", "shard_map"])
def test_one_program_with_one_all_reduce_and_no_transfer(tmp_path, data_dir, fields):
    run = inspect_programs(tmp_path, data_dir, 8, "steps=12", "eval_every_steps=4", *fields)
    assert run["all_reduces"] == [1]
    assert set(run["programs_by_call"]) == {1} and len(run["programs_by_call"]) == 12
    assert run["fetches"] == []


def test_a_curriculum_compiles_each_depth_once(tmp_path, data_dir):
    """An epoch of this data has four steps."""
    run = inspect_programs(tmp_path, data_dir, 1, "steps=16", "curriculum_epochs=2", "curriculum_start=(1,1)")
    assert run["programs"] == 2
    assert run["programs_by_call"] == [2] * 16, "the second depth is compiled while the first one trains"


def test_curriculum_depths():
    curriculum = Curriculum((1, 2), (3, 6), 100)
    depths = [curriculum.at(step) for step in range(120)]
    assert depths[0] == (1, 2) and depths[50] == (2, 4) and depths[100:] == [(3, 6)] * 20
    assert depths == sorted(depths)
    for step in range(100):
        assert curriculum.after(step) == next((d for d in depths[step:] if d != depths[step]), None)
    assert Curriculum((3, 6), (3, 6), 0).at(0) == (3, 6) and Curriculum((3, 6), (3, 6), 0).after(0) is None
