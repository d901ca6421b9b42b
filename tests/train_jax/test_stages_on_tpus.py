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


@pytest.mark.slow
def test_training_and_every_evaluation_of_puzzles(tmp_path):
    data = str(tmp_path / "set")
    run = str(tmp_path / "run")
    build = ["build-data", "sudoku", "--size", "4", "--num-train", "64", "--num-test", "16", "--output-dir", data]
    sizes = ["--arch.L-layers", "1", "--arch.H-cycles", "1", "--arch.L-cycles", "1", "--arch.halt-max-steps", "2"]
    train = ["train", "tiny", "--data-dir", data, "--run-dir", run, "--wandb", "disabled", "--eval-batch-size", "8"]
    built, trained, halted, refilled, tried, solved = programs(
        build,
        [*train, *NARROW, *sizes, "--steps", "2", "--eval-every-steps", "0"],
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
