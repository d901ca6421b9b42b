"""Every program that a stage runs over devices compiles for TPUs, too: no 64-bit type, no shape from data."""

import json

import pytest
from support.markers import slow_or_campaign
from support.scripts import run_script

NARROW = ["--arch.hidden-size", "16", "--arch.num-heads", "1", "--arch.puzzle-emb-ndim", "16"]


def programs(*stages):
    """Returns the names of the programs of each stage, compiled for four chips."""
    words = [word for stage in stages for word in ("--", *stage)]
    *_, last = run_script("stages_on_tpus", "v5e:2x2", *words).splitlines()
    return json.loads(last)


def puzzle_stages(folder):
    """Returns the commands that build a set and train on it, which can be extended, and the folder of the run."""
    data, run = str(folder / "set"), str(folder / "run")
    build = ["build-data", "sudoku", "--size", "4", "--num-train", "64", "--num-test", "16", "--output-dir", data]
    sizes = ["--arch.L-layers", "1", "--arch.H-cycles", "1", "--arch.L-cycles", "1", "--arch.halt-max-steps", "2"]
    fields = ["--wandb", "disabled", "--eval-batch-size", "8", *NARROW, *sizes]
    return build, ["train", "tiny", "--data-dir", data, "--run-dir", run, *fields], run


@pytest.mark.campaign
def test_training_with_a_curriculum(tmp_path):
    build, train, _ = puzzle_stages(tmp_path)
    curriculum = ["--curriculum-epochs", "1", "--curriculum-start", "1", "1", "--steps", "8", "--arch.L-cycles", "2"]
    built, trained = programs(build, [*train, *curriculum])
    assert not built and trained.count("with_key") == 2, "a step for each recursion depth"
    assert "initial_carry" in trained


@pytest.mark.slow
def test_training_and_every_evaluation_of_puzzles(tmp_path):
    build, train, run = puzzle_stages(tmp_path)
    built, trained, halted, refilled, tried, solved = programs(
        build,
        [*train, "--steps", "2", "--eval-every-steps", "0"],
        ["evaluate", run, "--halt-early"],
        ["evaluate", run, "--halt-early", "--refill"],
        ["evaluate", run, "--trajectories", "2", "--depth", "2"],
        ["solve", run],
    )
    assert not built and trained == ["eval_step", "initial_carry", "with_key"]
    assert [halted, refilled, tried, solved] == [["queue_step"], ["queue_step"], ["trajectory_step"], ["eval_step"]]


@pytest.mark.parametrize("preset", slow_or_campaign(["chat-tiny"], ["chat-tiny-2026"]))
def test_a_language_model(tmp_path, preset):
    (tmp_path / "source").mkdir()
    for number in range(40):
        (tmp_path / "source" / f"{number}.txt").write_text(f"{number} + {number} = {2 * number}\n" * 20)
    source, data, run = (str(tmp_path / name) for name in ("source", "set", "run"))
    lengths = ["--steps", "2", "--eval-batch-size", "8", "--global-batch-size", "8", "--wandb", "disabled"]
    layers = "1" if preset == "chat-tiny" else "2"
    sizes = ["--arch.seq-len", "24", "--arch.n-layer", layers, "--arch.n-embd", "48"]
    heads = ["--arch.n-head", "1", "--arch.n-kv-head", "1", "--eval-every-steps", "0"]
    built, trained, evaluated = programs(
        ["build-data", "text", "--source", source, "--vocab-size", "280", "--output-dir", data, "--test-share", "0.2"],
        ["train", preset, "--data-dir", data, "--run-dir", run, *lengths, *sizes, *heads],
        ["evaluate", run],
    )
    assert not built and "with_key" in trained
    assert set(evaluated) == {"decode", "eval_step", "prefill"}, "an evaluation continues prompts, too"
