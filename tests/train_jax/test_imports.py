"""A command imports the preset, the task and the kind of puzzle that are named, and nothing of the others."""

import json
import os
import subprocess
import sys

MOST = 100
"""Modules of train_jax that training a Sudoku imports."""
TRAINED = """
import json, sys
from train_jax.__main__ import main
data, run = sys.argv[1:]
status = main(["train", "tiny", "--data-dir", data, "--run-dir", run, "--steps", "1", "--eval-examples", "8",
               "--wandb", "disabled", "--arch.H-cycles", "1", "--arch.L-cycles", "1", "--arch.halt-max-steps", "1"])
print(json.dumps([status, [name for name in sys.modules if name.startswith("train_jax")]]))
"""


def test_training_a_sudoku_imports_no_other_puzzle_no_text_and_no_pod(data_dir, tmp_path):
    command = [sys.executable, "-c", TRAINED, str(data_dir), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    status, modules = json.loads(done.stdout.splitlines()[-1])
    assert status == 0, done.stderr
    others = ("tasks.language", "tasks.puzzles.arc", "tasks.puzzles.maze", "pod", "analysis", "report", "kernels")
    assert not [name for name in modules if name.startswith(tuple(f"train_jax.{each}" for each in others))]
    assert len(modules) <= MOST, sorted(modules)
