"""Training and checked export of other models than TRM, and of modules from outside the project."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.outside_models import CellNet

from train_jax import hooks
from train_jax.__main__ import main
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.model import build_module
from train_jax.run.restore import restore

TINY = ["--wandb", "disabled", "--steps", "6", "--eval-every-steps", "0", "--eval-batch-size", "8",
        "--checkpoint-every-steps", "3", "--log-every-steps", "2", "--global-batch-size", "8"]  # fmt: skip
MODELS = {
    "thinker": ["--model", "support.outside_models:Thinker", "--arch.options", '{"width": 8}'],
    "loss head": ["--model", "support.outside_models:ThinkerWithLoss", "--arch.options", '{"width": 8}'],
    "plain": ["--model", "support.outside_models:CellNet", "--arch.options", '{"hidden": 8}'],
}


def train(name, data_dir, run_dir) -> int:
    return main(["train", "tiny", "--data-dir", str(data_dir), "--run-dir", str(run_dir), *TINY, *MODELS[name]])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "plain"])
def test_a_model_trains_exports_and_reports(name, tmp_path, data_dir, capsys):
    run = tmp_path / "run"
    assert train(name, data_dir, run) == 0
    assert main(["evaluate", str(run)]) == main(["export", str(run)]) == main(["report", str(run)]) == 0
    assert main(["solve", str(run)]) == main(["summary", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("PyTorch agrees: the same answer on 8 of 8 puzzles") == 2 and "step 6" in shown
    weights = load_file(run / "weights.safetensors")
    state = restore(str(run)).state
    assert weights.keys() >= state.params.keys()
    initial = dict(build_initial(run).named_parameters())
    changed = [key for key, value in initial.items() if not np.allclose(weights[key], value.detach(), atol=1e-4)]
    assert len(changed) > len(initial) / 2


@pytest.mark.slow
def test_a_plain_module_stopped_and_continued_is_the_same_run(tmp_path, data_dir, monkeypatch, capsys):
    """Running statistics, dropout and Adam's moments continue; the weights load into the class itself."""

    class Stopped(Checkpoints):
        def save(self, *args, **kwargs):
            super().save(*args, **kwargs)
            self.wait()
            raise KeyboardInterrupt

    assert train("plain", data_dir, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "Checkpoints", Stopped)
        assert train("plain", data_dir, tmp_path / "stopped") == 130
    assert not (tmp_path / "stopped" / "FINISHED").exists()
    assert train("plain", data_dir, tmp_path / "stopped") == 0
    assert "continuing at step 3" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "stopped")]) == 0
    whole, stopped = restore(str(tmp_path / "whole")).state_dict(), load_file(tmp_path / "stopped/weights.safetensors")
    assert whole.keys() == stopped.keys()
    for key, value in whole.items():
        assert torch.equal(value, stopped[key]), key
    assert whole["model.inner.norm.num_batches_tracked"] == 6
    own = CellNet(vocab_size=6, seq_len=16, hidden=8)
    own.load_state_dict({key.removeprefix("model.inner."): value for key, value in stopped.items()}, strict=True)
    figures = json.loads((tmp_path / "stopped" / "FINISHED").read_text())
    assert figures["steps"] == 1 and figures["count"] == 8


def build_initial(run_dir):
    run = restore(str(run_dir))
    return build_module(run.config, run.task, 8)
