"""Batches as a pure function: shards join up, epochs visit every group once, any step can be had at once.

Several data sets are one: shares as asked, no identifier twice, lengths that agree.
"""

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from functools import partial

import numpy as np
import pytest
from support.arc_files import PUBLISHED
from support.puzzle_sets import puzzle_set, train_batch
from support.untrained_run import write_run

from tests.references import published
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.puzzles.batches import (
    IGNORED_LABEL,
    batch_of,
    draw_examples,
    eval_batches,
    examples_per_epoch,
    load_mixture,
    load_part,
    mixture_of,
)
from train_jax.puzzles.building import write_dataset
from train_jax.puzzles.format import PuzzleSet, load_split
from train_jax.puzzles.metadata import FIELDS
from train_jax.puzzles.task import PuzzleConfig
from train_jax.runtime.batch_size import check_divides, epochs_to_steps

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


# ---- several data sets as one


@pytest.fixture
def parts() -> tuple[PuzzleSet, PuzzleSet]:
    """Ten puzzles of one example and two tokens, five of two examples and five tokens; 50 and 8 identifiers."""
    short = puzzle_set(np.full(10, 1), np.ones(10, int))
    other = puzzle_set(np.full(5, 1), np.full(5, 2))
    tokens = np.concatenate([other.inputs, np.full((10, 3), 7, np.uint8)], axis=1)
    metadata = dataclasses.replace(other.metadata, seq_len=5, vocab_size=30, pad_id=3, num_puzzle_identifiers=8)
    return short, dataclasses.replace(other, metadata=metadata, inputs=tokens, labels=tokens)


def test_a_mixture_of_one_data_set_is_that_data_set(parts):
    for part in parts:
        alone = mixture_of([part])
        assert alone.metadata == part.metadata
        for step in (0, 3):
            one = alone.train_batch(seed=5, step=step, batch_size=6, shard=(1, 2))
            two = batch_of(part, *draw_examples(part, seed=5, step=step, batch_size=6, rows=slice(3, 6)))
            assert all((one[name] == two[name]).all() for name in two)
        pairs = zip(alone.eval_batches(batch_size=6), eval_batches(part, batch_size=6), strict=True)
        for (one, valid), (two, also) in pairs:
            assert (valid == also).all() and all((one[name] == two[name]).all() for name in two)


def test_a_batch_holds_every_part_with_identifiers_of_its_own_and_one_length(parts):
    metadata = mixture_of(parts).metadata
    assert (metadata.seq_len, metadata.vocab_size, metadata.num_puzzle_identifiers) == (5, 100, 58)
    assert (metadata.total_groups, metadata.total_puzzles, metadata.mean_puzzle_examples) == (15, 15, 20 / 15)
    batch = mixture_of(parts, [1, 2]).train_batch(seed=0, step=0, batch_size=9)
    assert batch["inputs"].shape == batch["labels"].shape == (9, 5)
    first = batch["puzzle_identifiers"][:3]
    second = batch["puzzle_identifiers"][3:]
    assert (first == batch["inputs"][:3, 0]).all() and first.max() < 50  # one example a puzzle, numbered alike
    assert (second == 50 + (batch["inputs"][3:, 0] + 1) // 2).all()
    assert (batch["inputs"][:3, 2:] == 0).all() and (batch["labels"][:3, 2:] == IGNORED_LABEL).all()
    assert (batch["inputs"][3:, 2:] == 7).all() and (batch["labels"][3:, 2:] == 7).all()


@pytest.mark.parametrize(
    ("weights", "batch_size", "rows"),
    [((3, 1), 8, [6, 2]), ((1, 1), 9, [5, 4]), ((2, 1), 8, [5, 3]), ((), 12, [6, 6])],
)
def test_rows_are_dealt_out_by_weight_and_by_default_for_equal_passes(parts, weights, batch_size, rows):
    """Both parts have ten examples in an epoch."""
    assert mixture_of(parts, weights).rows_of_parts(batch_size) == rows
    with pytest.raises(UserError, match=r"a batch of 8 has no row for the data set of weight 0\.01, expected at"):
        mixture_of(parts, [1, 0.01]).train_batch(seed=0, step=0, batch_size=8)


def test_shards_join_to_the_whole_batch_and_every_part_is_drawn_as_it_would_be_alone(parts):
    mixture = mixture_of(parts, [3, 1])
    for step in (700, 0, 12_345):
        whole = mixture.train_batch(seed=1, step=step, batch_size=12)
        for count in (2, 3, 4):
            shards = [mixture.train_batch(seed=1, step=step, batch_size=12, shard=(i, count)) for i in range(count)]
            for name, array in whole.items():
                assert (np.concatenate([shard[name] for shard in shards]) == array).all()
        alone = train_batch(parts[0], seed=1, step=step, batch_size=9)
        assert (whole["inputs"][:9, :2] == alone["inputs"]).all()

    # Equal data sets are not drawn alike.
    batch = mixture_of([parts[0], parts[0]]).train_batch(seed=0, step=0, batch_size=20)
    assert sorted(batch["inputs"][:10, 0]) == sorted(batch["inputs"][10:, 0])
    assert (batch["inputs"][:10, 0] != batch["inputs"][10:, 0]).any()


@pytest.mark.parametrize("limit", [0, 4, 13])
def test_evaluation_sees_every_example_of_every_part_once(parts, limit):
    mixture = mixture_of(parts)
    seen = []
    for batch, valid in mixture.eval_batches(batch_size=4, limit=limit):
        assert batch["inputs"].shape == (4, 5)
        pairs = zip(batch["puzzle_identifiers"], batch["inputs"][:, 0], strict=True)
        seen += [(int(i) >= 50, int(x)) for i, x in pairs][: valid.sum()]
    assert seen == [(part == 1, row + 1) for part in (0, 1) for row in range(10)][: limit or None]


def test_a_part_alone_keeps_its_numbers(parts):
    alone = mixture_of(parts).part(1)
    (batch, _), *_ = alone.eval_batches(batch_size=10)
    assert (batch["puzzle_identifiers"] == 50 + parts[1].puzzle_identifiers.repeat(2)).all()
    assert alone.num_examples == 10 and alone.metadata.num_puzzle_identifiers == 58
    assert next(iter(mixture_of(parts).part(0).eval_batches(batch_size=10)))[0]["inputs"].shape == (10, 5)


@pytest.fixture
def two_dirs(tmp_path, data_dir) -> tuple[str, str]:
    """The usual small Sudokus, and the same with one token more."""
    splits = {}
    for split in ("train", "test"):
        puzzles = load_split(data_dir, split)
        arrays = {name: getattr(puzzles, name) for name in FIELDS}
        arrays |= {name: np.pad(arrays[name], ((0, 0), (0, 1))) for name in ("inputs", "labels")}
        splits[split] = dataclasses.replace(puzzles.metadata, seq_len=17, kind=""), arrays
    write_dataset(tmp_path / "other", splits, ["<blank>"], {"made": "by a test"})
    return str(data_dir), str(tmp_path / "other")


def test_names_and_weights_are_read(two_dirs):
    mixture = load_mixture(", ".join(two_dirs), "train", " 3, 1")
    assert mixture.weights == (3, 1) and mixture.metadata.seq_len == 17
    for weights in ("3", "1,2,3", "1,0", "1,-1", "1,inf", "1,nan", "one,two"):
        with pytest.raises(UserError, match="expected 2 numbers above 0, one for each data set in --data-dir; use 1,1"):
            load_mixture(",".join(two_dirs), "train", weights)
    with pytest.raises(UserError, match="names no data set"):
        load_mixture(" , ", "train")
    with pytest.raises(UserError, match="nothing is not a data set that the run was trained on; use one of"):
        load_part(",".join(two_dirs), "test", "nothing")
    assert load_part(two_dirs[0], "test", two_dirs[1]).first_identifiers == (0,)


@pytest.mark.slow
def test_a_run_on_two_data_sets_is_scored_on_both_or_on_one(two_dirs, tmp_path, capsys):
    fields = {"eval_batch_size": 8, "task_config": PuzzleConfig(data_weights="3,1")}
    run = write_run(tmp_path / "run", ",".join(two_dirs), act_steps=2, step=1, **fields)
    for arguments, count in (([], 16), (["--data-dir", two_dirs[1]], 8)):
        assert main(["evaluate", run, *arguments]) == 0
        assert f"count            {count}" in capsys.readouterr().out
