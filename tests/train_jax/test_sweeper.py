"""Sweepers: order, finished runs, failures, sources, data sets, several sweepers in one root, and kills."""

import dataclasses
import itertools
import json
import os
import random
import subprocess
import time

import pytest
from support.scripts import ENVIRONMENT, ROOT, script

from train_jax.experiments import sweeper
from train_jax.experiments.sweeper import Sweeper, SweepFiles, Work
from train_jax.run.config import to_json
from train_jax.run.lease import sole_writer
from train_jax.run.presets import preset

BUILD = ("build-data", "sudoku", "--output-dir", "data/four")


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(sweeper, "POLL_SECONDS", 0.01)


@pytest.fixture
def sweep(tmp_path):
    """Runs a sweep whose commands only write FINISHED, or fail; returns its status and the commands."""

    def run(works, failing=(), root=None, **options):
        files, commands = SweepFiles(str(root or tmp_path)), []

        def command(words):
            commands.append(words)
            if words[0] == "build-data":
                return 0
            name = words[1]
            if name in failing:
                return failing[name] if isinstance(failing, dict) else 1
            folder = files.root / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "FINISHED").write_text(json.dumps({"train_steps": 10, "summary": "exact"}))
            return 0

        status = Sweeper(files, works, say=lambda line: None, run=command, **options).sweep()
        return status, [words[1] for words in commands]

    return run


@pytest.fixture
def works():
    names = [f"exp01/exp01{letter}/seed-0" for letter in "abc"]
    return [Work(name, 10, ("train", name), (BUILD,)) for name in names]


def names_of(works):
    return [work.name for work in works]


def test_runs_are_trained_in_order_and_finished_ones_skipped(sweep, works):
    assert sweep(works) == (0, ["sudoku", *names_of(works)])
    assert sweep(works) == (0, [])
    longer = [Work(work.name, 20, work.command) for work in works]
    assert sweep(longer[:1]) == (1, names_of(works)[:1]), "a run that has fewer steps than planned is not finished"


def test_a_failure_ends_the_sweep_and_the_next_sweep_tries_again(sweep, works):
    first, second, third = names_of(works)
    assert sweep(works, failing={second: 1}) == (1, ["sudoku", first, second])
    assert sweep(works, failing={second: 1}, continues_on_failure=True) == (1, ["sudoku", second, third])
    assert sweep(works) == (0, ["sudoku", second])


def test_sigterm_ends_the_sweep_without_a_failure(sweep, works):
    first = names_of(works)[0]
    assert sweep(works, failing={first: 75}) == (75, ["sudoku", first])


def test_a_run_waits_for_the_one_it_starts_from(sweep, works):
    child = Work("exp01/child/seed-0", 10, ("train", "exp01/child/seed-0"), needs=works[1].name)
    assert sweep([child, *works[:2]])[1] == ["sudoku", *names_of(works)[:2], child.name]
    other = Work("exp01/x/seed-0", 10, ("train", "exp01/x/seed-0"), needs=works[2].name)
    status, trained = sweep([other, works[2]], failing=names_of(works), continues_on_failure=True)
    assert (status, trained) == (1, ["sudoku", works[2].name])


def test_a_run_with_the_configuration_of_another_is_copied(sweep, works, tmp_path):
    first, copy = works[0], dataclasses.replace(works[1], same_as=works[0].name)
    source, target = tmp_path / first.name, tmp_path / copy.name
    (source / "checkpoints/10").mkdir(parents=True)
    for name in ("config.json", "dataset.json", "machine.json", "metrics.jsonl", "checkpoints/10/model", "wandb_id"):
        (source / name).write_text(to_json(preset("tiny")))
    assert sweep([copy, first]) == (0, ["sudoku", first.name]), "the copy waits for its source"
    config = json.loads((target / "config.json").read_text())
    place = {"run_dir": str(target), "wandb_project": "trm-exp01"}
    place |= {"wandb_group": "exp01b", "wandb_name": "exp01b/seed-0"}
    assert config == json.loads(to_json(preset("tiny"))) | place
    assert json.loads((target / "FINISHED").read_text())["copied_from"] == first.name
    assert {path.name for path in target.rglob("*") if path.is_file()} == {
        "config.json", "dataset.json", "machine.json", "metrics.jsonl", "FINISHED"
    }  # fmt: skip
    assert sweep([copy, first]) == (0, [])


def test_a_copy_is_trained_if_it_was_begun_and_not_made_of_a_failed_run(sweep, works, tmp_path):
    first, copy = works[0], dataclasses.replace(works[1], same_as=works[0].name)
    assert sweep([first, copy], failing=[first.name], continues_on_failure=True) == (1, ["sudoku", first.name])
    (tmp_path / copy.name).mkdir(parents=True)
    (tmp_path / copy.name / "config.json").write_text(to_json(preset("tiny")))
    assert sweep([first, copy]) == (0, ["sudoku", first.name, copy.name])


def test_a_claimed_run_is_left_to_its_sweeper(sweep, works, tmp_path):
    files = SweepFiles(str(tmp_path))

    def finish():
        path = tmp_path / works[0].name
        path.mkdir(parents=True)
        (path / "FINISHED").write_text(json.dumps({"train_steps": 10}))

    with sole_writer(files.claim(works[0].name)):
        polls = itertools.count()
        sleep = time.sleep

        def look(seconds):
            if next(polls) == 2:
                finish()
            sleep(seconds)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweeper.time, "sleep", look)
            assert sweep(works) == (0, ["sudoku", *names_of(works)[1:]])


@pytest.mark.parametrize("held", ["exp01/exp01a/seed-0", "sweep/claims/data-four"], ids=["run", "data"])
def test_a_run_waits_for_its_own_process_and_for_the_build_of_its_data(works, tmp_path, held):
    """The process of a sweeper that was killed still saves; another sweeper builds the data."""
    with sole_writer(tmp_path / held):
        files = SweepFiles(str(tmp_path))
        assert Sweeper(files, works[:1], say=print, run=lambda words: 0)._try(works[0]) is None


def test_data_that_cannot_be_built_is_a_failure_of_the_run(works, tmp_path):
    lines = []
    assert Sweeper(SweepFiles(str(tmp_path)), works, say=lines.append, run=lambda words: 2).sweep() == 1
    assert lines == [f"{works[0].name}: failed with status 2"]


def test_the_state_is_read_from_the_folders(sweep, works, tmp_path):
    """A damaged FINISHED counts as none."""
    sweep(works, failing=names_of(works)[1:2])
    files = SweepFiles(str(tmp_path))
    assert [files.state(work.name, 10) for work in works] == ["finished", "waiting", "waiting"]
    for content in ("[]", "{", '{"train_steps": "x"}'):
        (tmp_path / works[0].name / "FINISHED").write_text(content)
        assert files.state(works[0].name, 10) == "waiting"


@pytest.mark.slow
def test_a_sweep_in_storage(sweep, works, remote):
    there = [Work(work.name, 10, work.command) for work in works[:2]]
    assert sweep(there, root=remote) == (0, names_of(there))
    assert sweep(there, root=remote) == (0, [])


RUNS, STEPS = 4, 15


def steps_in(folder):
    """Returns the records of the steps, by run."""
    paths = sorted(folder.glob("group/*/*/steps.jsonl"))
    return {path.parent.parent.name: [json.loads(line) for line in path.read_text().splitlines()] for path in paths}


def kill_at_random(folder, seed):
    """Runs two sweepers and kills one of them after a random number of steps; the other one ends by itself."""
    rng = random.Random(seed)
    command, environment = script("sweep_process", folder, RUNS, STEPS), os.environ | ENVIRONMENT
    pair = [subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment) for _ in range(2)]
    when = rng.randrange(1, RUNS * STEPS - 5)
    while sum(map(len, steps_in(folder).values())) < when:
        assert all(process.poll() is None for process in pair)
        time.sleep(0.005)
    victim = pair.pop(rng.randrange(2))
    victim.kill()
    victim.wait()
    assert pair[0].wait(timeout=120) == 0


@pytest.mark.slow
def test_two_sweepers_of_which_one_is_killed_at_random(tmp_path):
    for seed in range(5):
        folder = tmp_path / str(seed)
        kill_at_random(folder, seed)
        assert len(list(folder.glob("group/*/*/FINISHED"))) == RUNS
        for records in steps_in(folder).values():
            assert [record["step"] for record in records] == list(range(STEPS)), "every step once, and none lost"
            assert all(a["ended"] <= b["began"] for a, b in itertools.pairwise(records)), "one writer at a time"
