"""The programs of a run: one for each recursion depth, one all-reduce for the gradients, no transfer to the host."""

import json

import pytest
from support.scripts import run_script

from train_jax.tasks.puzzles.task import Curriculum

SMALL = "steps=12", "eval_every_steps=4", "H_cycles=1", "L_cycles=1", "halt_max_steps=2"
RUNS = {
    "pmap": (8, *SMALL),
    "shard_map": (8, *SMALL, "runner='shard_map'", "accumulation_steps=2"),
    "curriculum": (1, "steps=16", "curriculum_epochs=2", "curriculum_start=(1,1)", "L_cycles=1"),
}


@pytest.fixture(scope="module")
def inspected(made_once, data_dir):
    """Returns the figures of `support.inspect_programs` by run."""

    def inspect(folder):
        words = [word for name, (count, *fields) in RUNS.items() for word in ("--", count, folder / name, *fields)]
        (folder / "shown").write_text(run_script("inspect_programs", data_dir, *words))

    lines = (made_once("programs", inspect) / "shown").read_text().splitlines()
    return dict(zip(RUNS, map(json.loads, [line for line in lines if line.startswith("{")]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pmap", "shard_map"])
def test_one_program_with_one_all_reduce_and_no_transfer(inspected, name):
    run = inspected[name]
    assert run["all_reduces"] == [1]
    assert set(run["programs_by_call"]) == {1} and len(run["programs_by_call"]) == 12
    assert run["fetches"] == []


@pytest.mark.slow
def test_a_curriculum_compiles_each_depth_once(inspected):
    """An epoch of this data has four steps."""
    run = inspected["curriculum"]
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
