"""The examples: each script is checked against PyTorch, trains a few steps, and continues bit for bit.

Those that need packages of the extra `examples` are skipped where these are not installed. The campaigns compare 20
steps with PyTorch's, and several devices and processes with one and with DistributedDataParallel.
"""

import dataclasses
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
from support.script_runs import trained_by_ddp, trained_on
from support.scripts import ENVIRONMENT

import bridge
from train_jax.__main__ import main
from train_jax.plugin import use_file
from train_jax.run.presets import preset
from train_jax.script import check

pytestmark = pytest.mark.slow

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
BATCH = ["--global-batch-size=8", "--eval-batch-size=8", "--wandb=disabled"]
CHAOTIC = {"timm_batchnorm"}
"""Examples whose differences by rounding grow from step to step, so that only float64 decides about 20 of them."""
SUMS = ("lora_llama", "forces")
"""Examples whose loss is a sum and a count."""
MEANS = {"timm_batchnorm": 2, "gnn": 10, "lstm": 10, "dpo": 10}
"""Examples whose loss is a mean without random draws but for dropout, and the number of steps that are compared."""


def named(stem):
    """Returns the path of an example; skips the test where its packages are missing."""
    path = next(each for each in EXAMPLES if each.stem == stem)
    for name in re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}, of the extra examples")
    return path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_as_in_pytorch_and_continues(path, tmp_path, monkeypatch, capsys, forgotten):
    named(path.stem)
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(path), "--steps=3", *BATCH]) == 0
    assert "3 steps agree with PyTorch" in capsys.readouterr().out
    train = [
        "train",
        str(path),
        *BATCH,
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


@pytest.mark.campaign
@pytest.mark.parametrize("stem", [path.stem for path in EXAMPLES])
def test_twenty_steps_are_pytorchs(stem, tmp_path, monkeypatch, forgotten, capsys):
    path = named(stem)
    monkeypatch.chdir(tmp_path)
    use_file(str(path))
    config = dataclasses.replace(preset(stem), global_batch_size=8)
    found = check.check_steps(config, 20, always_in_float64=True)
    with capsys.disabled():
        print(f"\n| {stem} | {found} |")
    losses = [leaf for leaf in found.leaves if leaf.name.partition(" of step ")[2]]
    assert len(losses) >= 20 and found.ok
    for leaf in found.leaves:
        in_float32 = leaf.difference <= (1e-5 if leaf in losses else 1e-4)
        assert leaf.wide_difference <= 1e-9, leaf
        assert in_float32 or leaf.entries_without_gradient or stem in CHAOTIC, leaf


@pytest.mark.campaign
@pytest.mark.parametrize("stem", SUMS)
def test_sums_train_the_same_on_several_devices_and_processes(stem, tmp_path):
    path = shutil.copy(named(stem), tmp_path)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    one = trained_on(tmp_path, path, "one", steps=6, devices=1)
    for run, launch, devices in (("eight", (), 8), ("two", ("launch", "--rehearse", "2x4", "--"), None)):
        weights = trained_on(tmp_path, path, run, *launch, steps=6, devices=devices)
        for name, tensor in one.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=f"{run}: {name}")


@pytest.mark.campaign
@pytest.mark.parametrize("stem", MEANS)
def test_means_train_as_distributed_data_parallel(stem, tmp_path):
    path = tmp_path / f"{stem}.py"
    path.write_text(re.sub(r"dropout=[0-9.]+", "dropout=0.0", named(stem).read_text()))  # two sides draw differently
    expected = trained_by_ddp(tmp_path, path, steps=MEANS[stem])
    weights = trained_on(tmp_path, path, "ours", steps=MEANS[stem], devices=2)
    for name, parameter in expected.items():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-3, atol=2e-5, msg=name)


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
