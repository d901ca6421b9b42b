"""Modules from outside the project: compared with PyTorch at the start of a first run, trained, exported, continued."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.outside_models import CellNet
from support.presets import SMALL_RUN

from train_jax import hooks, loop
from train_jax.__main__ import main
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.model import build_module
from train_jax.run.restore import restore


def train(model, data_dir, run_dir, *more) -> int:
    options = {"width": 8} if model.startswith("Thinker") else {"hidden": 8}
    words = [*SMALL_RUN[:-1], "--steps", "6", "--checkpoint-every-steps", "3", "--log-every-steps", "2"]
    words += ["--model", f"support.outside_models:{model}", "--arch.options", json.dumps(options)]
    return main(["train", "tiny", "--data-dir", str(data_dir), "--run-dir", str(run_dir), *words, *more])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Thinker", "ThinkerWithLoss"])
def test_a_model_trains_exports_and_reports(name, tmp_path, data_dir, capsys):
    run = tmp_path / "run"
    assert train(name, data_dir, run) == 0
    assert main(["evaluate", str(run)]) == main(["export", str(run)]) == main(["report", str(run)]) == 0
    assert main(["solve", str(run)]) == main(["summary", str(run)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("PyTorch agrees: the same answer on 8 of 8 puzzles") == 2 and "step 6" in shown
    weights = load_file(run / "weights.safetensors")
    restored = restore(str(run))
    initial = dict(build_module(restored.config, restored.task, 8).named_parameters())
    assert weights.keys() >= restored.state.params.keys()
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

    assert train("CellNet", data_dir, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(hooks, "Checkpoints", Stopped)
        assert train("CellNet", data_dir, tmp_path / "stopped") == 130
    assert not (tmp_path / "stopped" / "FINISHED").exists()
    assert train("CellNet", data_dir, tmp_path / "stopped") == 0
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


@pytest.fixture
def remarks(monkeypatch):
    """The remarks of runs that begin; none is trained."""
    made = []

    def train(run, state, preemption, remarks):
        made.extend(remarks)
        return {"train_steps": 0, "train_seconds": 0.0, "summary": "not trained"}

    monkeypatch.setattr(loop._Run, "train", train)
    return made


def test_a_first_run_is_compared_and_a_continued_one_is_not(tmp_path, data_dir, remarks, monkeypatch):
    assert train("CellNet", data_dir, tmp_path) == 0
    assert "support.outside_models:CellNet agrees with PyTorch over two calls, " in "\n".join(remarks)
    monkeypatch.setattr(loop, "verified", lambda *_: pytest.fail("compared again"))
    monkeypatch.setattr("train_jax.run.resume.complete_steps", lambda checkpoints: [1])
    assert train("CellNet", data_dir, tmp_path) == 0


def test_a_module_that_differs_stops_the_run(tmp_path, data_dir, remarks, capsys, monkeypatch):
    run = tmp_path / "run"
    assert train("TwiceInJax", data_dir, run) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert "TwiceInJax computes something else in JAX than in PyTorch, most " in error and "--no-verify" in error
    assert not run.exists()
    monkeypatch.setattr(loop, "verified", lambda *_: pytest.fail("compared"))
    assert train("TwiceInJax", data_dir, run, "--no-verify") == 0
