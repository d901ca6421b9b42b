"""The examples: each script is checked against PyTorch, trains a few steps, and continues bit for bit.

Those that need packages of the extra `examples` are skipped where these are not installed.
"""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

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
