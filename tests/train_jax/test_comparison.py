"""A module of the user's is compared with PyTorch at the start of its first run."""

import pytest

from train_jax import loop
from train_jax.__main__ import main


@pytest.fixture
def remarks(monkeypatch):
    """The remarks of runs that begin; none is trained."""
    made = []

    def train(run, state, preemption, remarks):
        made.extend(remarks)
        return {"train_steps": 0, "train_seconds": 0.0, "summary": "not trained"}

    monkeypatch.setattr(loop._Run, "train", train)
    return made


def train(model, data_dir, run_dir, *options):
    where = ["--data-dir", str(data_dir), "--run-dir", str(run_dir), "--model", f"support.outside_models:{model}"]
    return main(["train", "tiny", *where, "--arch.options", '{"hidden": 4}', "--wandb", "disabled", *options])


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
