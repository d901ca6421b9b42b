"""`trm compile-pod` with every experiment by name, up to the compiler: its data sets are not there."""

from typing import Any

import jax
import pytest
from support.markers import slow_unless

from models_torch import uninitialized
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.experiments.runs import experiment_run, plan
from train_jax.experiments.table import EXPERIMENTS, data_sets, recipes
from train_jax.pod.compile import train_step_arguments
from train_jax.stages import compile_pod
from train_jax.tasks.puzzles.task import UnbuiltPuzzles

LAST_OF_GROUP = {row.group: name for name, row in EXPERIMENTS.items()}
OTHERS = {name for name, row in EXPERIMENTS.items() if row.starts_from or len(row.data) > 1}
"""Experiments that need more than data and a model: weights of another experiment, or several data sets."""
WHOLE = slow_unless({*LAST_OF_GROUP.values(), *OTHERS}.__contains__, EXPERIMENTS)
DEVICES = 32
SIZES = {"sudoku-9x9": (81, 11), "maze-30": (900, 6), "maze-50": (2500, 6)}


def sizes_of(name):
    """Returns the length of a sequence, the size of the vocabulary and the rows of the puzzle table, by the recipes."""
    kinds = [SIZES[each.kind] for each in data_sets(EXPERIMENTS[name])]
    return (*map(max, zip(*kinds, strict=True)), len(kinds))


@pytest.fixture
def assembled(monkeypatch, tmp_path):
    """`assembled(name)`: what `trm compile-pod NAME` would compile, and the shapes of its arguments."""
    trainings = []

    def leave_out(training):
        trainings.append((training, train_step_arguments(training)))
        raise UserError("left out")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compile_pod, "compile_train_step", leave_out)
    monkeypatch.setattr(uninitialized, "LARGE", 2**10)  # draws almost nothing

    def assemble(name):
        status = main(["compile-pod", name])
        assert trainings, f"status {status}"
        return trainings.pop()

    return assemble


@pytest.mark.parametrize("name", WHOLE)
def test_an_experiment_is_assembled(assembled, name):
    training, (state, carry, shares, _) = assembled(name)
    config, row = experiment_run(name), EXPERIMENTS[name]
    arch: Any = config.arch
    assert training.config == config and training.devices.count == DEVICES
    puzzles = sum(each.puzzles for each in data_sets(row))
    assert training.total_steps == plan(config, puzzles).steps
    seq_len, vocab_size, identifiers = sizes_of(name)
    local = config.global_batch_size // DEVICES
    assert shares["inputs"].shape == (DEVICES, local, seq_len)
    table = state.buffers["model.inner.puzzle_emb.weights"]
    assert table.shape[-2:] == (identifiers, arch.puzzle_emb_ndim)
    assert state.params["model.inner.lm_head.weight"].shape[-2:] == (vocab_size, arch.hidden_size)
    assert bool(state.ema) == (config.optim.ema_decay > 0)
    assert all(leaf.shape[:2] == (DEVICES, local) for leaf in jax.tree.leaves(carry) if leaf.ndim > 1)
    training.train_step()  # raises the errors of optimizer, schedules and groups


def test_every_experiment_has_its_sizes_without_its_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in EXPERIMENTS:
        config = experiment_run(name)
        task = UnbuiltPuzzles(config, recipes=recipes())
        assert tuple(task.sizes.values()) == sizes_of(name), name
        assert task.examples_per_epoch == sum(each.puzzles for each in data_sets(EXPERIMENTS[name]))
        assert config.global_batch_size % (DEVICES * config.compute.accumulation_steps) == 0, name
