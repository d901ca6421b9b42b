"""Sweeps: expressions, names, runs with their commands and costs; sweepers with failures, copies, others, and kills."""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
import time

import pytest
import torch
from support.scripts import ENVIRONMENT, ROOT, script
from support.synthetic_runs import plan, write_run
from torch.utils.flop_counter import FlopCounterMode

from models_torch.flops import train_flops_per_example
from models_torch.registry import ARCHITECTURES, build
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.research import sweeper
from train_jax.research.equal_flops import TOLERANCE, with_equal_flops
from train_jax.research.jobs import Options, combinations, cost_of, jobs_of, select
from train_jax.research.sweeper import Sweeper, SweepFiles, Work
from train_jax.research.table import EXPERIMENTS
from train_jax.run.arguments import parse_run
from train_jax.run.config import to_json
from train_jax.run.presets import preset
from train_jax.storage.lease import sole_writer

ODD = ["model=hrm,trm_singlez", "augment=true", "task_config.curriculum_start=[[1, 1]]", "arch.mlp_t=false",
       'optim.freeze=["a,b=(c)"]']  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ([], [{}]),
        (["a=1,2", "b.c=x"], [{"a": 1, "b.c": "x"}, {"a": 2, "b.c": "x"}]),
        (["a,b=[[1e-4, true], [2, null]]"], [{"a": 1e-4, "b": True}, {"a": 2, "b": None}]),
        (['a=["x, y"]', "b=[[1, 2]]"], [{"a": "x, y", "b": (1, 2)}]),
    ],
)
def test_a_free_sweep(axes, expected):
    assert combinations(axes) == expected


@pytest.mark.parametrize("axis", ["", "a", "a=", "a=[]", "a=[1", "a b=1", "a,b=1,2", "a,b=[[1, 2], [3]]"])
def test_a_free_sweep_that_is_wrong(axis):
    with pytest.raises(UserError, match=re.escape(f"--over {axis!r} cannot be read; write it as optim.lr=1e-4,3e-4")):
        combinations([axis])
    with pytest.raises(UserError, match="a occurs 2 times in --over; give it once"):
        combinations(["a=1", "a,b=[[1, 2]]"])


def test_names_groups_patterns_and_presets():
    assert select(["exp02b"]) == [f"exp02b_{number:02}" for number in range(1, 6)]
    assert select(["exp10b", "exp0[78]a", "tiny", "exp10b"]) == ["exp07a", "exp08a", "exp10b", "tiny"]
    with pytest.raises(UserError, match="'exp1a' names no experiment, group or preset; use exp"):
        select(["exp1a"])


def test_runs_have_folders_commands_and_seeds():
    options = Options("gs://bucket/runs", "data", "tiny", 2, {"platform": "cpu"})
    jobs = jobs_of(["exp01a", "tiny"], combinations(["optim.lr=3e-4", "optim.beta1=0.9"]), options)
    assert [job.name for job in jobs] == [
        "exp01/exp01a@lr=0.0003,beta1=0.9/seed-0", "tiny/tiny@lr=0.0003,beta1=0.9/seed-0",
        "exp01/exp01a@lr=0.0003,beta1=0.9/seed-1", "tiny/tiny@lr=0.0003,beta1=0.9/seed-1",
    ]  # fmt: skip
    last = jobs[2]
    assert last.config.run_dir == f"gs://bucket/runs/{last.name}" and last.config.seed == 1
    assert (last.config.wandb_project, last.config.wandb_group) == ("trm-exp01", "exp01a@lr=0.0003,beta1=0.9")
    assert last.config.wandb_name == "exp01a@lr=0.0003,beta1=0.9/seed-1"
    assert last.builds == (("build-data", "sudoku", "--size", "4", "--output-dir", "data/sudoku-4x4"),)
    assert last.steps == 40


@pytest.mark.parametrize(
    ("names", "over", "options", "message"),
    [
        (["tiny"], ["seed=0"], Options(seeds=2), "--seeds 2 and seed in --over"),
        (["tiny"], ["seed=3,3"], Options(), "tiny/tiny/seed-3 would be trained twice"),
        (["tiny"], ["optim.lrr=3"], Options(), "optim.lrr is not a field"),
        (["contrib06_transfer"], [], Options(), "contrib06/contrib06_sudoku/seed-0 are needed; add contrib06_sudoku"),
    ],
)
def test_runs_that_cannot_be_planned(names, over, options, message):
    with pytest.raises(UserError, match=message):
        jobs_of(names, combinations(over), options)


@pytest.mark.parametrize(
    ("names", "over", "base"),
    [
        (["exp06_a", "contrib06_sudoku", "contrib06_transfer"], [], None),
        (["exp01a"], [], "tiny"),
        (["tiny"], ODD, None),
    ],
)
def test_the_command_of_a_run_trains_that_run(names, over, base):
    for job in jobs_of(names, combinations(over), Options("r", "d", base)):
        assert parse_run(list(job.command[1:]), prog="trm train", description="")[1] == job.config


def test_a_run_starts_after_the_one_whose_weights_or_results_it_needs():
    jobs = jobs_of(["contrib06_transfer", "contrib06_sudoku"], [{}], Options("r", seeds=2))
    assert [job.name.split("/", 1)[1] for job in jobs] == [
        "contrib06_sudoku/seed-0", "contrib06_sudoku/seed-1", "contrib06_transfer/seed-0", "contrib06_transfer/seed-1"
    ]  # fmt: skip
    assert jobs[3].config.init_from == "r/contrib06/contrib06_sudoku/seed-1"
    jobs = jobs_of(["exp01a", "exp01c", "exp10b", "exp10c"], [{}], Options(seeds=2))
    copies = {f"exp10/exp10b/seed-{seed}": f"exp01/exp01c/seed-{seed}" for seed in (0, 1)}
    assert {job.name: job.same_as for job in jobs if job.same_as} == copies, "copies of the same configuration"


@pytest.mark.slow
def test_the_whole_list_has_a_plan(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", "--all", "--preset", "tiny", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert f"{len(EXPERIMENTS)} runs of {len(EXPERIMENTS)} experiments: " in shown
    assert all(f"/{name}/seed-0 " in shown for name in EXPERIMENTS)
    assert "trm build-data maze --size 10" in shown and "?" not in shown
    assert "note: in exp06 batch size and steps change together; exp06_equal_steps and exp06_scaled_warmup" in shown
    assert not list(tmp_path.iterdir())


def test_the_flops_of_a_run_are_those_of_its_examples():
    (job,) = jobs_of(["baseline"], [{}], Options())
    length, flops = cost_of(job)
    assert (length.steps, length.examples) == (8138, 8138 * 6144)
    arch = dataclasses.replace(job.config.arch, seq_len=81, vocab_size=11)
    assert flops == pytest.approx(train_flops_per_example("trm", arch) * length.examples)
    whole, curriculum = (cost_of(job)[1] for job in jobs_of(select(["contrib01"]), [{}], Options(preset="sudoku6")))
    assert 0.9 * whole < curriculum < whole, "its first steps have fewer cycles"


def test_runs_of_equal_flops_have_the_steps_that_those_of_the_first_one_pay_for():
    axes = combinations(["arch.L_cycles=6,3", "task_config.curriculum_epochs=0,5"])
    whole = jobs_of(["baseline"], axes, Options(preset="sudoku6"))
    jobs = with_equal_flops(whole, "sudoku6")
    costs = [cost_of(job)[1] for job in jobs]
    assert costs == pytest.approx([costs[0]] * 4, rel=TOLERANCE) and costs[0] == cost_of(whole[0])[1]
    assert jobs[0].steps == whole[0].steps and jobs[0].command == whole[0].command
    assert jobs[2].steps > 1.5 * whole[2].steps and jobs[1].steps > whole[1].steps
    for job in jobs[1:]:
        parsed = parse_run(list(job.command[1:]), prog="trm train", description="")[1]
        assert parsed.steps == job.steps == job.config.steps
    few = jobs_of(["baseline"], combinations(["steps=3", "arch.L_cycles=6,4"]), Options(preset="sudoku6"))
    with pytest.raises(UserError, match=r"of the FLOPs of the first run with \d steps, expected at most 0.5%; train"):
        with_equal_flops(few, "sudoku6")


def test_runs_of_a_model_of_the_users_have_equal_flops():
    small = {"hidden_size": 32, "mlp_t": True, "pos_encodings": "none", "puzzle_emb_ndim": 32}
    name = "train_jax.research.levers:LeverTRM"
    values = [[name, small | {"race": count}] for count in (1, 3)]
    jobs = jobs_of(["baseline"], combinations([f"model,arch.options={json.dumps(values)}"]), Options(preset="sudoku6"))
    first, race = with_equal_flops(jobs, "sudoku6")
    assert cost_of(race)[1] == pytest.approx(cost_of(first)[1], rel=TOLERANCE)
    assert race.steps < 0.8 * first.steps, "three latents run the H-cycles without gradients"
    parsed = parse_run(list(race.command[1:]), prog="trm train", description="")[1]
    assert (parsed.steps, parsed.arch.options["race"]) == (race.steps, 3)  # pyright: ignore[reportAttributeAccessIssue]
    axis = 'model,arch.options=[["support.outside_models:CellNet", {"nonsense": 1}]]'
    unknown = jobs_of(["baseline"], combinations([axis]), Options(preset="sudoku6"))
    assert cost_of(unknown[0])[1] is None
    with pytest.raises(UserError, match=r"the FLOPs of .* are not known; omit the run or --equal-flops"):
        with_equal_flops(unknown, "sudoku6")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_are_those_of_pytorch_with_its_backward_pass(name):
    """The tensors are meta tensors, because PyTorch's counter does not know the attention of CPUs."""
    arch = dataclasses.replace(ARCHITECTURES[name].tiny_config, batch_size=1)
    with torch.device("meta"):
        module = build(name, arch)
        tokens = torch.zeros(1, arch.seq_len, dtype=torch.int32)
        batch = {"inputs": tokens, "labels": tokens, "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}
        carry = module.initial_carry(batch)
        with FlopCounterMode(display=False) as counter:
            _, loss, *_ = module(carry=carry, batch=batch, return_keys=())
            loss.backward()
    assert train_flops_per_example(name, arch) == counter.get_total_flops()


def test_a_root_of_runs_at_another_size_is_refused(tmp_path, capsys):
    write_run(plan(tmp_path, "exp01a")[0], 0.5)
    words = ["sweep", "exp01a", "--runs-root", str(tmp_path), "--dry-run"]
    assert main([*words, "--preset", "tiny"]) == 0
    assert "1 runs of 1 experiments: 1 finished" in capsys.readouterr().out
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "exp01a/seed-0 holds a run with other fields (" in error and "use another --runs-root" in error


@pytest.mark.parametrize(
    ("argv", "processes", "message"),
    [
        ("sweep run", "1", "trm sweep needs ids, groups or presets"),
        ("sweep exp01 --seeds 0", "1", "--seeds is 0; use at least 1"),
        ("sweep exp01", "4", "JAX_NUM_PROCESSES is 4, but a sweep trains each run on one host"),
    ],
)
def test_mistakes_are_one_line(argv, processes, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_PROCESSES", processes)
    assert main(argv.split()) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


BUILD = ("build-data", "sudoku", "--output-dir", "data/four")
NAMES = FIRST, SECOND, THIRD = [f"exp01/exp01{letter}/seed-0" for letter in "abc"]
WORKS = [Work(name, 10, ("train", name), (BUILD,)) for name in NAMES]


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Runs a sweep whose commands only write FINISHED, or fail; returns its status and the words after the commands.

    `failing`: exit statuses by these words.
    """
    monkeypatch.setattr(sweeper, "POLL_SECONDS", 0.01)

    def run(works, failing=None, root=tmp_path, **options):
        files = SweepFiles(str(root))
        commands = []

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
    first = WORKS[0]
    copy = dataclasses.replace(WORKS[1], same_as=FIRST)
    source = tmp_path / first.name
    target = tmp_path / copy.name
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
    first = WORKS[0]
    copy = dataclasses.replace(WORKS[1], same_as=FIRST)
    assert sweep([first, copy], {FIRST: 1}, continues_on_failure=True) == (1, ["sudoku", first.name])
    (tmp_path / copy.name).mkdir(parents=True)
    (tmp_path / copy.name / "config.json").write_text(to_json(preset("tiny")))
    assert sweep([first, copy]) == (0, ["sudoku", first.name, copy.name])


@pytest.mark.slow
def test_a_sweep_in_storage(sweep, remote):
    there = [Work(work.name, 10, work.command) for work in WORKS[:2]]
    assert sweep(there, root=remote) == (0, NAMES[:2])
    assert sweep(there, root=remote) == (0, [])


RUNS = 4
STEPS = 15


@pytest.mark.slow
def test_two_sweepers_of_which_one_is_killed_at_random(tmp_path):
    """The other one ends by itself, with all runs."""

    def steps():
        return [path.read_text().splitlines() for path in tmp_path.glob("group/*/*/steps.jsonl")]

    command = script("sweep_process", tmp_path, RUNS, STEPS)
    environment = os.environ | ENVIRONMENT
    pair = [subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment) for _ in range(2)]
    when = random.randrange(1, RUNS * STEPS - 5)
    while sum(map(len, steps())) < when:
        assert all(process.poll() is None for process in pair)
        time.sleep(0.005)
    victim = pair.pop(random.randrange(2))
    victim.kill()
    victim.wait()
    assert pair[0].wait(timeout=120) == 0
    assert len(list(tmp_path.glob("group/*/*/FINISHED"))) == RUNS
    for lines in steps():
        records = [json.loads(line) for line in lines]
        assert [record["step"] for record in records] == list(range(STEPS)), "every step once, and none lost"
        assert all(a["ended"] <= b["began"] for a, b in itertools.pairwise(records)), "one writer at a time"
