"""The examples: each script is checked against PyTorch, trains a few steps, and continues bit for bit.

Those that need packages of the extra `examples` are skipped where these are not installed.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.scripts import ENVIRONMENT

import bridge
from train_jax.__main__ import main

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_as_in_pytorch_and_continues(path, tmp_path, monkeypatch, capsys, forgotten):
    for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, of the extra examples")
    monkeypatch.chdir(tmp_path)
    batch = ["--global-batch-size=8", "--eval-batch-size=8", "--wandb=disabled"]
    assert main(["check", str(path), "--steps=3", *batch]) == 0
    assert "3 steps agree with PyTorch" in capsys.readouterr().out
    train = [
        "train",
        str(path),
        *batch,
        "--no-verify",
        "--steps=6",
        "--checkpoint-every-steps=3",
        "--log-every-steps=1",
    ]
    assert main([*train, "--run-dir=whole"]) == 0
    shutil.copytree("whole", "again")
    shutil.rmtree("again/checkpoints/6")
    Path("again/FINISHED").unlink()
    assert main([*train, "--run-dir=again"]) == 0
    for run in ("whole", "again"):
        assert main(["export", run, "--plugin", str(path), "--no-check"]) == 0
    weights, again = (bridge.load_weights(Path(run) / "weights.safetensors") for run in ("whole", "again"))
    assert weights.keys() == again.keys() and all(weights[name].equal(again[name]) for name in weights)


TUNED = """

def model():
    potential = Potential()
    potential.load_state_dict(torch.load("trained.pt", weights_only=True))
    return potential


def train_data():
    return clusters(seed=3, size=16)
"""
"""Added to the example: it starts from weights that PyTorch saved."""

KILLED_AT_20 = """
import os
import signal
import sys
import time
from pathlib import Path

from train_jax.__main__ import main
from train_jax.run.checkpoint import Checkpoints

saved = Checkpoints.save


def save(self, step, *arguments, **options):
    if step < 20:
        return saved(self, step, *arguments, **options)
    while not Path("runs/killed/checkpoints/10").exists():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


Checkpoints.save = save
main(sys.argv[1:])
"""
"""The command, which is killed when its last checkpoint would be saved."""


def in_pytorch(script, steps):
    """Returns the weights after PyTorch's own loop on all examples at once: their order changes roundings alone."""
    module = script.model()
    optimizer = script.optimizer(module)
    schedule = script.schedule(optimizer)
    for _ in range(steps):
        total, count, _ = script.loss(module, script.train_data().tensors)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        schedule.step()
    return module.state_dict()


def test_a_checkpoint_of_pytorch_is_tuned_on_forces_as_in_pytorch_and_continues_after_a_kill(
    tmp_path, monkeypatch, forgotten
):
    monkeypatch.chdir(tmp_path)
    example = next(path for path in EXAMPLES if path.stem == "forces").read_text()
    Path("tuned.py").write_text(example + TUNED)
    spec = importlib.util.spec_from_file_location("in_pytorch", "tuned.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(5)
    torch.save(script.Potential().state_dict(), "trained.pt")

    batch = ["--global-batch-size=16", "--eval-batch-size=16", "--checkpoint-every-steps=10", "--wandb=disabled"]
    train = ["train", "tuned.py", "--steps=20", "--no-verify", *batch]

    def in_a_process(run, *program):
        """Each run has its own process: the programs of this one are compiled in another way."""
        command = [sys.executable, *program, *train, f"--run-dir=runs/{run}"]
        return subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, text=True)

    assert in_a_process("whole", "-m", "train_jax").returncode == 0
    assert in_a_process("killed", "-c", KILLED_AT_20).returncode == -signal.SIGKILL
    continued = in_a_process("killed", "-m", "train_jax")
    assert continued.returncode == 0 and "continuing at step 10" in continued.stdout
    weights = {}
    for run in ("whole", "killed"):
        assert main(["export", f"runs/{run}", "--plugin", "tuned.py", "--no-check"]) == 0
        weights[run] = bridge.load_weights(Path("runs") / run / "weights.safetensors")
    expected = in_pytorch(script, 20)
    before = torch.load("trained.pt", weights_only=True)
    for name, weight in weights["whole"].items():
        assert weight.equal(weights["killed"][name])
        np.testing.assert_allclose(weight, expected[name], rtol=0, atol=1e-5)
        assert name == "centers" or not np.allclose(weight, before[name], rtol=0, atol=1e-3)
