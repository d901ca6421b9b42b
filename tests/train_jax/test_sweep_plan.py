"""Sweeps before they start: expressions, names, runs with their folders and commands, costs."""

import dataclasses
import re

import pytest
import torch
from support.synthetic_runs import plan, write_run
from torch.utils.flop_counter import FlopCounterMode

from models_torch.flops import train_flops_per_example
from models_torch.registry import ARCHITECTURES, build
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.experiments.jobs import Options, combinations, cost_of, jobs_of, select
from train_jax.experiments.table import EXPERIMENTS
from train_jax.run_arguments import parse_run

ODD = ["model=hrm,trm_singlez", "augment=true", "task_config.curriculum_start=[[1, 1]]", "arch.mlp_t=false",
       'optim.freeze=["a,b=(c)"]']  # fmt: skip


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ([], [{}]),
        (["seed=0,1"], [{"seed": 0}, {"seed": 1}]),
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
        (["tiny"], ["nothing.lr=3"], Options(), "nothing.lr is not a field"),
        (["tiny"], ["optim.lr=-3"], Options(), "optim.lr is -3"),
        (["contrib06_transfer"], [], Options(), "contrib06/contrib06_sudoku/seed-0 are needed; add contrib06_sudoku"),
    ],
)
def test_runs_that_cannot_be_planned(names, over, options, message):
    with pytest.raises(UserError, match=message):
        jobs_of(names, combinations(over), options)


def assert_command_trains(jobs):
    for job in jobs:
        assert parse_run(list(job.command[1:]), prog="trm train", description="")[1] == job.config


@pytest.mark.parametrize(
    ("names", "over", "base"),
    [
        (["exp06_a", "contrib06_sudoku", "contrib06_transfer"], [], None),
        (["exp01a"], [], "tiny"),
        (["tiny"], ODD, None),
    ],
)
def test_the_command_of_a_run_trains_that_run(names, over, base):
    assert_command_trains(jobs_of(names, combinations(over), Options("r", "d", base)))


@pytest.mark.slow
def test_the_command_of_every_experiment_trains_that_experiment():
    assert_command_trains(jobs_of(list(EXPERIMENTS), [{}], Options("r", "d")))


def test_a_run_starts_after_the_one_whose_weights_or_results_it_needs():
    jobs = jobs_of(["contrib06_transfer", "contrib06_sudoku"], [{}], Options("r", seeds=2))
    assert [job.name.split("/", 1)[1] for job in jobs] == [
        "contrib06_sudoku/seed-0", "contrib06_sudoku/seed-1", "contrib06_transfer/seed-0", "contrib06_transfer/seed-1"
    ]  # fmt: skip
    assert jobs[3].config.init_from == "r/contrib06/contrib06_sudoku/seed-1"
    jobs = jobs_of(["exp01a", "exp01c", "exp10b", "exp10c"], [{}], Options(seeds=2))
    copies = {f"exp10/exp10b/seed-{seed}": f"exp01/exp01c/seed-{seed}" for seed in (0, 1)}
    assert {job.name: job.same_as for job in jobs if job.same_as} == copies, "copies of the same configuration"


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
        ("sweep exp01 --preset tyni", "1", "unknown preset 'tyni'"),
        ("sweep exp01", "4", "JAX_NUM_PROCESSES is 4, but a sweep trains each run on one host"),
    ],
)
def test_mistakes_are_one_line(argv, processes, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_NUM_PROCESSES", processes)
    assert main(argv.split()) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
