"""Mistakes of a user are found before anything is computed, and named in one line."""

import contextlib
import dataclasses
import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.example_puzzles import ExamplePuzzles
from train_jax.__main__ import main
from train_jax.core.guard import new_guard
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.folder import RunFolder
from train_jax.run.model import build_objective
from train_jax.run.presets import preset
from train_jax.run.restore import Restored, restore
from train_jax.run.untrusted import DamagedError, map_array, read_arrays, read_whole
from train_jax.start import _check_keep_best
from train_jax.task import Periodic
from train_jax.tasks.evaluate import EvaluateOptions, lines_of
from train_jax.tasks.language.documents import Skipped, TextFile, read_documents
from train_jax.tasks.language.generation import read_prompts
from train_jax.tasks.language.task import LanguageTask
from train_jax.tasks.new_dataset import _difference
from train_jax.tasks.puzzles.building import chunks_of
from train_jax.tasks.puzzles.task import PuzzleTask


@pytest.mark.parametrize(
    ("keep_best", "known", "every", "message"),
    [
        ("acc", PuzzleTask.evaluated, (2, 0), "keep_best is acc, which no evaluation has; use one of exact_accuracy"),
        ("acc", LanguageTask.evaluated, (2, 0), "keep_best is acc, which no evaluation has; use one of bits_per_byte"),
        ("-exact_accuracy", PuzzleTask.evaluated, (2, 0), ""),
        ("loss", (), (2, 0), ""),
        ("loss", (), (0, 2), "its evaluation is every 0 steps"),
        ("hard/loss", (), (2, 0), "its evaluation is every 0 steps"),
        ("hard/loss", (), (0, 2), ""),
    ],
)
def test_the_figure_of_the_best_checkpoint_is_checked_before_the_run(keep_best, known, every, message):
    """The cadence of a task's evaluation does not depend on `eval_every_steps`."""
    config = dataclasses.replace(preset("tiny"), keep_best=keep_best, eval_every_steps=5, checkpoint_every_steps=2)
    evaluator: Any = None
    evaluations = [Periodic(evaluator, every[0]), Periodic(evaluator, every[1], "hard")]
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        _check_keep_best(config, known, evaluations, 9)


def test_texts_that_are_not_utf8_are_counted_in_the_error(tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"caf\xe9 number")
    arguments = ["--source", str(tmp_path), "--output-dir", str(tmp_path / "set")]
    for size in ("280", "265"):  # with merges, and without
        assert main(["build-data", "text", *arguments, "--vocab-size", size]) == 2
        line = capsys.readouterr().err
        assert "3 of 3 documents are not UTF-8" in line and "iconv" in line


def test_prompts_end_at_line_feeds_only(tmp_path):
    (tmp_path / "p.txt").write_text("\ufeffone\u2028still one\x85and\x0cagain\r\ntwo\n", newline="")
    assert read_prompts(str(tmp_path / "p.txt")) == ["one\u2028still one\x85and\x0cagain", "two"]


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "train.csv"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text("source,question,answer,rating\na,1,2,0\n", encoding=encoding)
        assert list(chunks_of(path, rows=5, remedy="")) == [[(2, ["a", "1", "2", "0"])]]


def test_the_difference_of_two_recipes_is_shown():
    there, requested = ({"tables_sha256": {"train.csv": "same", "test.csv": test}} for test in ("1234", "5678"))
    assert _difference({"recipe": there}, requested).endswith("(tables_sha256.test.csv is '1234', requested '5678')")


def test_output_in_an_encoding_without_every_character():
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-m", "train_jax", "--help"], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


# ---- weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with an untrained model, without files."""
    objective = build_objective(config := preset("tiny"), ExamplePuzzles(config), 1)
    state = TrainState(jnp.int32(4), objective.params, {}, (), objective.buffers, new_guard(scales_loss=False))
    return Restored(RunFolder(tmp_path_factory.mktemp("run")), config, ExamplePuzzles(config), objective, state, 4)


def test_the_weights_that_are_evaluated_are_named(trained):
    without_average = dataclasses.replace(trained.config.optim, ema_decay=0.0)
    other = dataclasses.replace(trained, config=dataclasses.replace(trained.config, optim=without_average))
    options = EvaluateOptions("runs/r")
    for run, name in (
        (trained, "averaged weights"),
        (other, "raw weights"),
        (other.with_weights(other.state_dict(), "a.pt"), "weights of a.pt"),
    ):
        assert lines_of(options, run, {}) == f"runs/r at step 4, test set, {name}:"


def test_weights_that_are_not_finite_are_named(trained):
    weights = trained.state_dict()
    names = [name for name in weights if name in trained.state.params][:2]
    for name, value in zip(names, (float("nan"), float("inf")), strict=True):
        weights[name].view(-1)[-1] = value
    with pytest.raises(UserError, match=rf"w.pt has NaN or infinity in 2 tensors: {names[0]}, {names[1]}; use an ear"):
        trained.with_weights(weights, "w.pt")


def test_a_run_whose_checkpoint_has_nan(finished_run, monkeypatch):
    def with_nan(weights, _tables):
        params, buffers = next(weights)
        return params | {name: array * np.nan for name, array in [*params.items()][:1]}, buffers

    monkeypatch.setattr("train_jax.run.restore.mean_weights", with_nan)
    with pytest.raises(UserError, match=r"run at step 60 has NaN or infinity in a tensor: "):
        restore(str(finished_run))


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 9\n"


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text(POINTER)
    for read in (map_array, partial(read_whole, largest_bytes=999), partial(read_arrays, names=(), largest_bytes=999)):
        with pytest.raises(DamagedError, match="it is a pointer of Git LFS; run `git lfs pull`"):
            read(path)
    with pytest.raises(UserError, match=r"train.csv cannot be read: it is a pointer of Git LFS"):
        list(chunks_of(path, rows=5, remedy=""))
    pytest.importorskip("pyarrow")
    parquet = path.rename(tmp_path / "train.parquet")
    with pytest.raises(UserError, match=r"not a readable parquet file \(it is a pointer"):
        list(read_documents([TextFile("a", parquet)], "text", Skipped()))
