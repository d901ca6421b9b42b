"""Every program that a stage runs over devices compiles for TPUs, too: no 64-bit type, no shape from data."""

import json

import pytest
from support.scripts import run_script

pytestmark = pytest.mark.campaign


def programs(*stages):
    """The names of the programs of each stage, compiled for four chips."""
    words = [word for stage in stages for word in ("--", *stage)]
    *_, last = run_script("stages_on_tpus", "v5e:2x2", *words).splitlines()
    return json.loads(last)


def puzzle_stages(folder):
    """Those that build a set and train on it; both can be extended."""
    data, run = str(folder / "set"), str(folder / "run")
    build = ["build-data", "sudoku", "--size", "4", "--num-train", "64", "--num-test", "16", "--output-dir", data]
    sizes = ["--arch.H-cycles", "1", "--arch.L-cycles", "2", "--arch.halt-max-steps", "2", "--eval-batch-size", "8"]
    return build, ["train", "tiny", "--data-dir", data, "--run-dir", run, "--wandb", "disabled", *sizes], run


def test_training_with_a_curriculum(tmp_path):
    build, train, _ = puzzle_stages(tmp_path)
    curriculum = ["--curriculum-epochs", "1", "--curriculum-start", "1", "1", "--steps", "8"]
    built, trained = programs(build, [*train, *curriculum])
    assert not built and trained.count("with_key") == 2, "a step for each recursion depth"
    assert "initial_carry" in trained


def test_every_evaluation_of_puzzles(tmp_path):
    build, train, run = puzzle_stages(tmp_path)
    *_, halted, refilled, tried, solved = programs(
        build,
        [*train, "--steps", "2"],
        ["evaluate", run, "--halt-early"],
        ["evaluate", run, "--halt-early", "--refill"],
        ["evaluate", run, "--trajectories", "2", "--depth", "2"],
        ["solve", run],
    )
    assert all((halted, refilled, tried, solved)), (halted, refilled, tried, solved)


def test_a_language_model(tmp_path):
    (tmp_path / "source").mkdir()
    for number in range(40):
        (tmp_path / "source" / f"{number}.txt").write_text(f"{number} + {number} = {2 * number}\n" * 20)
    data, run = str(tmp_path / "set"), str(tmp_path / "run")
    build = ["build-data", "text", "--source", str(tmp_path / "source"), "--vocab-size", "280", "--output-dir", data]
    sizes = ["--arch.seq-len", "24", "--arch.n-layer", "2", "--arch.n-embd", "48", "--global-batch-size", "8"]
    lengths = ["--steps", "2", "--eval-batch-size", "8"]
    built, trained, evaluated, generated = programs(
        [*build, "--test-share", "0.2"],
        ["train", "chat-tiny-2026", "--data-dir", data, "--run-dir", run, *sizes, *lengths, "--wandb", "disabled"],
        ["evaluate", run],
        ["generate", run, "--prompt", "1 +", "--max-tokens", "3"],
    )
    assert not built and "with_key" in trained and "eval_step" in evaluated
    assert generated == ["decode", "prefill"]
