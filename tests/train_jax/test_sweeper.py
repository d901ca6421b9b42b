"""Sweepers: order, finished runs, failures, sources, data sets, several sweepers in one root, and kills."""

import contextlib
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
NAMES = FIRST, SECOND, THIRD = [f"exp01/exp01{letter}/seed-0" for letter in "abc"]
WORKS = [Work(name, 10, ("train", name), (BUILD,)) for name in NAMES]


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(sweeper, "POLL_SECONDS", 0.01)


@pytest.fixture
def sweep(tmp_path):
    """Runs a sweep whose commands only write FINISHED, or fail; returns its status and the words after the commands.

    `failing`: exit statuses by these words.
    """

    def run(works, failing=None, root=tmp_path, **options):
        files, commands = SweepFiles(str(root)), []

        def command(words):
            commands.append(words[1])
            status = (failing or {}).get(words[1], 0)
            if words[0] == "train" and status == 0:
                folder = files.root / words[1]
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "FINISHED").write_text(json.dumps({"train_steps": 10, "summary": "exact"}))
            return status

        status = Sweeper(files, works, say=lambda line: None, run=command, **options).sweep()
        return status, commands

    return run


def test_runs_are_trained_in_order_and_finished_ones_skipped(sweep):
    assert sweep(WORKS) == (0, ["sudoku", *NAMES])
    assert sweep(WORKS) == (0, [])
    longer = [Work(FIRST, 20, WORKS[0].command)]
    assert sweep(longer) == (1, [FIRST]), "a run that has fewer steps than planned is not finished"


def test_a_failure_ends_the_sweep_and_the_next_sweep_tries_again(sweep):
    assert sweep(WORKS, {"sudoku": 2}) == (1, ["sudoku"]), "a run without its data fails"
    assert sweep(WORKS, {FIRST: 75}) == (75, ["sudoku", FIRST]), "SIGTERM is no failure"
    assert sweep(WORKS, {SECOND: 1}) == (1, ["sudoku", FIRST, SECOND])
    assert sweep(WORKS, {SECOND: 1}, continues_on_failure=True) == (1, ["sudoku", SECOND, THIRD])
    assert sweep(WORKS) == (0, ["sudoku", SECOND])


@pytest.mark.parametrize("held", [FIRST, f"sweep/claims/{FIRST.replace('/', '--')}", "sweep/claims/data-four"])
def test_a_run_waits_for_the_process_that_holds_it_or_builds_its_data(sweep, tmp_path, held, monkeypatch):
    """The process of a sweeper that was killed still saves; another sweeper trains the run, or builds the data."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(sole_writer(tmp_path / held))
        monkeypatch.setattr(sweeper.time, "sleep", lambda _: stack.close())
        assert sweep(WORKS[:1])[0] == 0
        assert (tmp_path / FIRST / "FINISHED").exists()


def test_a_run_waits_for_the_one_it_starts_from(sweep):
    child = Work("exp01/child/seed-0", 10, ("train", "exp01/child/seed-0"), needs=SECOND)
    assert sweep([child, *WORKS[:2]])[1] == ["sudoku", FIRST, SECOND, child.name]
    other = Work("exp01/x/seed-0", 10, ("train", "exp01/x/seed-0"), needs=THIRD)
    assert sweep([other, WORKS[2]], {THIRD: 1}, continues_on_failure=True) == (1, ["sudoku", THIRD])


def test_a_run_with_the_configuration_of_another_is_copied(sweep, tmp_path):
    first, copy = WORKS[0], dataclasses.replace(WORKS[1], same_as=FIRST)
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


def test_a_copy_is_trained_if_it_was_begun_and_not_made_of_a_failed_run(sweep, tmp_path):
    first, copy = WORKS[0], dataclasses.replace(WORKS[1], same_as=FIRST)
    assert sweep([first, copy], {FIRST: 1}, continues_on_failure=True) == (1, ["sudoku", first.name])
    (tmp_path / copy.name).mkdir(parents=True)
    (tmp_path / copy.name / "config.json").write_text(to_json(preset("tiny")))
    assert sweep([first, copy]) == (0, ["sudoku", first.name, copy.name])


def test_the_state_is_read_from_the_folders(sweep, tmp_path):
    """A damaged FINISHED counts as none."""
    sweep(WORKS, {SECOND: 1})
    files = SweepFiles(str(tmp_path))
    assert [files.state(name, 10) for name in NAMES] == ["finished", "waiting", "waiting"]
    for content in ("[]", "{", '{"train_steps": "x"}'):
        (tmp_path / FIRST / "FINISHED").write_text(content)
        assert files.state(FIRST, 10) == "waiting"


@pytest.mark.slow
def test_a_sweep_in_storage(sweep, remote):
    there = [Work(work.name, 10, work.command) for work in WORKS[:2]]
    assert sweep(there, root=remote) == (0, NAMES[:2])
    assert sweep(there, root=remote) == (0, [])


RUNS, STEPS = 4, 15


def steps_in(folder):
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
