"""Batches as a pure function: shards join up, epochs visit every group once, any step can be had at once."""

import hashlib
import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
from support.arc_files import PUBLISHED
from support.puzzle_sets import puzzle_set, train_batch

from benchmarks import published
from train_jax.errors import UserError
from train_jax.runtime.batch_size import check_divides, epochs_to_steps
from train_jax.tasks.puzzles.batches import IGNORED_LABEL, eval_batches, examples_per_epoch
from train_jax.tasks.puzzles.format import PuzzleSet

GROUPS = 10


@pytest.fixture
def puzzles() -> PuzzleSet:
    """Ten groups of one to three puzzles of one to three examples, those of a group not alike."""
    puzzles_in_group = np.arange(GROUPS) % 3 + 1
    return puzzle_set(puzzles_in_group, np.arange(puzzles_in_group.sum()) % 3 + 1)


@pytest.fixture
def sudokus() -> PuzzleSet:
    """Ten groups of three puzzles of one example."""
    return puzzle_set(np.full(GROUPS, 3), np.ones(3 * GROUPS, int))


def rows_of(batch) -> np.ndarray:
    return batch["inputs"][:, 0] - 1


def owners_of(puzzles: PuzzleSet, rows: np.ndarray) -> np.ndarray:
    return np.searchsorted(puzzles.puzzle_indices, rows, side="right") - 1


def visits_of(puzzles: PuzzleSet, batches: Iterable[np.ndarray]) -> list[tuple[int, list[int]]]:
    """Returns the puzzles that batches of rows consist of, one after another, each with its rows there."""
    visits = []
    for rows in batches:
        at = 0
        while at < len(rows):
            owner = int(owners_of(puzzles, rows[at : at + 1])[0])
            of_puzzle = rows[at : at + puzzles.puzzle_indices[owner + 1] - puzzles.puzzle_indices[owner]]
            visits.append((owner, of_puzzle.tolist()))
            at += len(of_puzzle)
    return visits


def test_a_batch_has_the_promised_arrays(puzzles):
    batch = train_batch(puzzles, seed=0, step=0, batch_size=6)
    assert {name: (array.dtype.name, array.shape) for name, array in batch.items()} == {
        "inputs": ("int32", (6, 2)),
        "labels": ("int32", (6, 2)),
        "puzzle_identifiers": ("int32", (6,)),
    }
    rows = rows_of(batch)
    assert (batch["inputs"] == puzzles.inputs[rows]).all()
    ignored = puzzles.labels[rows] == 0
    assert ignored.any()
    assert (batch["labels"] == np.where(ignored, IGNORED_LABEL, puzzles.labels[rows].astype(int))).all()
    assert (batch["puzzle_identifiers"] == puzzles.puzzle_identifiers[owners_of(puzzles, rows)]).all()


def test_batches_are_those_of_earlier_versions(sudokus):
    """A run that is continued with a newer version sees the same batches."""
    digest = hashlib.sha256()
    for step in (0, 3, 12_345):
        for batch_size in (4, 24):
            digest.update(train_batch(sudokus, seed=3, step=step, batch_size=batch_size)["inputs"].tobytes())
    assert digest.hexdigest() == "e6e3906ee1a4972e1790a8076174103939f0666a47ed12d8ee4c0e56081033d8"


@pytest.mark.parametrize("batch_size", [1, 2, 5, 12, 64])
def test_a_batch_takes_puzzle_after_puzzle_until_it_is_full(puzzles, batch_size):
    steps = 1200 // batch_size
    batches = [rows_of(train_batch(puzzles, seed=2, step=step, batch_size=batch_size)) for step in range(steps)]
    visits = visits_of(puzzles, batches)
    for owner, rows in visits:
        assert (owners_of(puzzles, np.array(rows)) == owner).all(), "a batch begins within a puzzle"
        assert len(set(rows)) == len(rows)
    epochs = [visits[start : start + GROUPS] for start in range(0, len(visits) - GROUPS + 1, GROUPS)]
    assert len(epochs) > 40
    for epoch in epochs:
        found = np.searchsorted(puzzles.group_indices, [owner for owner, _ in epoch], side="right") - 1
        assert sorted(found) == list(range(GROUPS)), "an epoch draws one puzzle of each group"
    orders = {tuple(owner for owner, _ in epoch) for epoch in epochs}
    assert len(orders) > 0.9 * len(epochs)


def test_every_example_of_every_puzzle_is_drawn_equally_often_in_any_order(puzzles):
    batches = [rows_of(train_batch(puzzles, seed=0, step=step, batch_size=5)) for step in range(6000)]
    visits = visits_of(puzzles, batches)
    for group in range(GROUPS):
        start, end = puzzles.group_indices[group : group + 2]
        shares = np.bincount([owner - start for owner, _ in visits if start <= owner < end])
        assert len(shares) == end - start and shares.min() > 0.8 * shares.mean()
    counts = np.bincount(np.concatenate(batches), minlength=puzzles.num_examples)
    for start, end in zip(puzzles.puzzle_indices[:-1], puzzles.puzzle_indices[1:], strict=True):
        assert counts[start:end].min() > 0.9 * counts[start:end].mean() > 0
        orders = {tuple(rows) for owner, rows in visits if rows[0] in range(start, end) and len(rows) == end - start}
        assert len(orders) == math.factorial(end - start)


@pytest.mark.skipif(PUBLISHED is None, reason="TRM_PUBLISHED does not give the folder of the published code")
def test_the_published_sampler_draws_alike(puzzles, tmp_path):
    """Compares 20 000 batches of seven: frequency of each example, by place, and the number of puzzles in a batch."""
    given = tmp_path / "indices.npz"
    np.savez(given, puzzle_indices=puzzles.puzzle_indices, group_indices=puzzles.group_indices)
    published.run(str(PUBLISHED), "sample", given, tmp_path / "rows.npy", 20_000, 7)
    theirs = np.load(tmp_path / "rows.npy")
    ours = np.stack([rows_of(train_batch(puzzles, seed=0, step=step, batch_size=7)) for step in range(20_000)])

    def shares(batches: np.ndarray, of_place: slice) -> np.ndarray:
        return np.bincount(batches[:, of_place].ravel(), minlength=puzzles.num_examples) / len(batches)

    for of_place in (slice(None), slice(0, 1), slice(6, 7)):
        assert np.abs(shares(ours, of_place) - shares(theirs, of_place)).max() < 0.025  # five standard deviations
    counts = ([len(set(owners_of(puzzles, rows))) for rows in batches] for batches in (ours, theirs))
    one, other = (np.bincount(each, minlength=8) / 20_000 for each in counts)
    assert np.abs(one - other).max() < 0.025


@pytest.mark.parametrize(("batch_size", "count"), [(4, 1), (6, 2), (24, 4), (64, 2)])
def test_evaluation_sees_every_example_once_and_in_order(puzzles, batch_size, count):
    shards = [list(eval_batches(puzzles, batch_size=batch_size, shard=(i, count))) for i in range(count)]
    assert {len(shard) for shard in shards} == {-(-puzzles.num_examples // batch_size)}
    seen = []
    for step in zip(*shards, strict=True):
        for batch, valid in step:
            assert batch["inputs"].shape == (batch_size // count, 2)
            assert {array.dtype.name for array in batch.values()} == {"int32"}
            assert (batch["inputs"][~valid] == 0).all()
            assert (batch["labels"][~valid] == IGNORED_LABEL).all()
            assert (batch["puzzle_identifiers"][~valid] == 0).all()
            rows = rows_of(batch)[valid]
            assert (batch["puzzle_identifiers"][valid] == puzzles.puzzle_identifiers[owners_of(puzzles, rows)]).all()
            seen.extend(rows)
    assert seen == list(range(puzzles.num_examples))


def test_a_batch_that_does_not_divide_is_refused_with_sizes_that_do(puzzles):
    for batch_size, count, message in (
        (768, 7, "global batch 768 does not divide over 7 devices; use 756 or 770, or 8 devices"),
        (3, 2, "global batch 3 does not divide over 2 devices; use 2 or 4, or 3 devices"),
        (1, 8, "global batch 1 does not divide over 8 devices; use 8, or 1 device"),
        (0, 8, "global batch 0 is not a batch size; use 8 or a multiple of it"),
    ):
        with pytest.raises(UserError, match=f"^{message}$"):
            check_divides(batch_size, count, "devices")
    check_divides(12, 4, "devices")
    for load in (lambda **options: train_batch(puzzles, seed=0, step=0, **options), partial(eval_batches, puzzles)):
        with pytest.raises(UserError, match="global batch 6 does not divide over 4 shards"):
            list(load(batch_size=6, shard=(0, 4)))


def test_epochs_count_the_examples_that_they_draw(puzzles, sudokus):
    assert examples_per_epoch(sudokus) == GROUPS
    assert examples_per_epoch(puzzles) == GROUPS * puzzles.metadata.mean_puzzle_examples
    assert epochs_to_steps(10.0, 12, 4) == 30
    assert epochs_to_steps(10.0, 1, 4) == 2
    with pytest.raises(UserError, match=r"1 epochs of 10 examples .* one batch of 16; use at least 1\.6 epochs"):
        epochs_to_steps(10.0, 1, 16)
