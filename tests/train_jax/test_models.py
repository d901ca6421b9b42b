"""Modules from outside the project: compared with PyTorch at the start of a first run, trained, exported, continued;
the configuration of a run for every architecture."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.outside_models import CellNet
from support.presets import SMALL_RUN

from benchmarks.example_puzzles import ExamplePuzzles, example_run
from models_torch.outside import OutsideConfig
from models_torch.registry import ARCHITECTURES, config_class
from train_jax.__main__ import main
from train_jax.cli.train import cli
from train_jax.errors import UserError
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.config import RunConfig, from_json, to_json
from train_jax.run.model import build_module, sized
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.trainer import loop
from train_jax.trainer.hooks import saving


def train(model, data_dir, run_dir, *more) -> int:
    options = {"width": 8} if model.startswith("Thinker") else {"hidden": 8}
    words = [*SMALL_RUN[:-1], "--steps", "6", "--checkpoint-every-steps", "3", "--log-every-steps", "2"]
    words += ["--model", f"support.outside_models:{model}", "--arch.options", json.dumps(options)]
    return main(["train", "tiny", "--data-dir", str(data_dir), "--run-dir", str(run_dir), *words, *more])


@pytest.mark.slow
def test_a_model_with_its_own_loss_trains_exports_and_reports(tmp_path, data_dir, capsys):
    run = tmp_path / "run"
    assert train("ThinkerWithLoss", data_dir, run) == 0
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


@pytest.mark.campaign
def test_a_plain_module_stopped_and_continued_is_the_same_run(tmp_path, data_dir, monkeypatch, capsys):
    """Running statistics, dropout and Adam's moments continue; the weights load into the class itself."""

    class Stopped(Checkpoints):
        def save(self, *args, **kwargs):
            super().save(*args, **kwargs)
            self.wait()
            raise KeyboardInterrupt

    assert train("CellNet", data_dir, tmp_path / "whole") == 0
    with monkeypatch.context() as patch:
        patch.setattr(saving, "Checkpoints", Stopped)
        assert train("CellNet", data_dir, tmp_path / "stopped") == 130
    assert not (tmp_path / "stopped" / "FINISHED").exists()
    assert train("CellNet", data_dir, tmp_path / "stopped") == 0
    assert "continuing at step 3" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "stopped")]) == 0
    whole = restore(str(tmp_path / "whole")).state_dict()
    stopped = load_file(tmp_path / "stopped/weights.safetensors")
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

    def start(trainer, state, remarks):
        made.extend(remarks)
        trainer.dispatches = ()

    figures = {"train_steps": 0, "train_seconds": 0.0, "summary": "not trained"}
    monkeypatch.setattr(loop.Trainer, "start", start)
    monkeypatch.setattr(loop.Trainer, "finish", lambda trainer: figures)
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


# ---- the configuration of a run: `--model`, JSON and back, sizes from the data

OUTSIDE = "support.outside_models:Thinker"
PLAIN = "support.outside_models:CellNet"


@pytest.fixture
def parsed_run(monkeypatch):
    """The configuration that `trm train …` would train."""
    configs: list[RunConfig] = []
    monkeypatch.setattr("train_jax.cli.train.main", configs.append)

    def parse(*argv: str) -> RunConfig:
        cli(list(argv))
        return configs[-1]

    return parse


@pytest.mark.parametrize("name", [*ARCHITECTURES, OUTSIDE])
def test_every_architecture_round_trips_through_json_and_takes_the_sizes_of_the_data(name, parsed_run):
    options = ["--arch.options", '{"width": 8, "deep": {"a": [1, null]}}'] if ":" in name else []
    config = parsed_run("tiny", "--model", name, "--arch.halt-max-steps", "3", *options)
    assert type(config.arch) is config_class(name) and config.arch.halt_max_steps == 3
    again = from_json(to_json(config))
    assert again == config and type(again.arch) is type(config.arch)
    sizes = dataclasses.replace(config.arch, seq_len=36, vocab_size=8, num_puzzle_identifiers=5)
    arch = sized(config.arch, ExamplePuzzles(example_run(name, sizes)), 7)
    assert (arch.batch_size, arch.seq_len, arch.vocab_size, arch.num_puzzle_identifiers) == (7, 36, 8, 5)
    assert dataclasses.replace(arch, batch_size=1, seq_len=1, vocab_size=2, num_puzzle_identifiers=1) == config.arch


def test_fields_that_a_preset_sets_are_carried_over_and_the_rest_are_the_architectures_own(parsed_run):
    config = parsed_run("sudoku6", "--model=hrm", "--arch.H-layers", "2")
    arch = dataclasses.asdict(config.arch)
    before = dataclasses.asdict(preset("sudoku6").arch)
    for name in ("hidden_size", "mlp_t", "L_layers", "H_cycles", "puzzle_emb_len", "loss_type", "forward_dtype"):
        assert arch[name] == before[name], name
    # Fields that the preset does not set have HRM's published values, not TRM's.
    assert arch["no_ACT_continue"] is False and before["no_ACT_continue"] is True
    assert arch["H_layers"] == 2 and arch["num_heads"] == 8
    assert config.optim == preset("sudoku6").optim and config.model == "hrm"
    assert parsed_run("tiny") == parsed_run("tiny", "--model", "trm") == preset("tiny")
    outside = parsed_run("tiny", "--model", OUTSIDE, "--arch.options", '{"width": 4}').arch
    assert outside == OutsideConfig(halt_max_steps=4, forward_dtype="float32", options={"width": 4})
    plain = parsed_run("tiny", "--model", PLAIN).arch
    assert isinstance(plain, OutsideConfig) and plain.halt_max_steps == 1
    with pytest.raises(UserError, match="model hrm needs HRMConfig, found TRMConfig"):
        dataclasses.replace(preset("tiny"), model="hrm")
