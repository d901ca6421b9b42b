"""Batches as a pure function: shards join up, epochs visit every group once, any step can be had at once."""

from pathlib import Path

import numpy as np
import pytest

from train_jax.errors import UserError
from train_jax.puzzles.batches import (
    IGNORED_LABEL,
    check_divides,
    epochs_to_steps,
    eval_batches,
    train_batch,
)
from train_jax.puzzles.format import Metadata, PuzzleSet

GROUPS = 10


@pytest.fixture
def puzzles() -> PuzzleSet:
    """Ten groups of one to three puzzles of one to three examples; an example's first token tells its row."""
    puzzles_in_group = np.arange(GROUPS) % 3 + 1
    group_indices = np.concatenate([[0], np.cumsum(puzzles_in_group)])
    examples_in_puzzle = np.arange(group_indices[-1]) % 3 + 1
    puzzle_indices = np.concatenate([[0], np.cumsum(examples_in_puzzle)])
    rows = np.arange(puzzle_indices[-1])
    inputs = np.stack([rows + 1, rows % 3], axis=1).astype(np.uint8)
    metadata = Metadata(
        seq_len=2,
        vocab_size=100,
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        num_puzzle_identifiers=50,
        total_groups=GROUPS,
        mean_puzzle_examples=2.0,
        total_puzzles=len(examples_in_puzzle),
        sets=("all",),
    )
    return PuzzleSet(metadata, inputs, inputs.copy(), np.arange(group_indices[-1]) + 1, puzzle_indices, group_indices)


def rows_of(batch) -> np.ndarray:
    return batch["inputs"][:, 0] - 1


def drawn(puzzles: PuzzleSet, *, seed: int, examples: int) -> np.ndarray:
    return np.concatenate(
        [rows_of(train_batch(puzzles, seed=seed, step=step, batch_size=4)) for step in range(examples // 4)]
    )


def groups_of(puzzles: PuzzleSet, rows: np.ndarray) -> np.ndarray:
    owners = np.searchsorted(puzzles.puzzle_indices, rows, side="right") - 1
    return np.searchsorted(puzzles.group_indices, owners, side="right") - 1


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
    owners = np.searchsorted(puzzles.puzzle_indices, rows, side="right") - 1
    assert (batch["puzzle_identifiers"] == puzzles.puzzle_identifiers[owners]).all()


@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("step", [0, 3, 12_345])
def test_shards_join_to_the_whole_batch(puzzles, step, count):
    whole = train_batch(puzzles, seed=3, step=step, batch_size=24)
    shards = [train_batch(puzzles, seed=3, step=step, batch_size=24, shard=(i, count)) for i in range(count)]
    for name, array in whole.items():
        assert (np.concatenate([shard[name] for shard in shards]) == array).all()


def test_every_epoch_draws_every_group_once_in_an_order_of_its_own(puzzles):
    epochs = groups_of(puzzles, drawn(puzzles, seed=0, examples=40 * GROUPS)).reshape(-1, GROUPS)
    assert (np.sort(epochs, axis=1) == np.arange(GROUPS)).all()
    assert len(np.unique(epochs, axis=0)) == len(epochs)


def test_every_example_of_every_puzzle_is_drawn_in_time(puzzles):
    rows = drawn(puzzles, seed=0, examples=200 * GROUPS)
    assert len(np.unique(rows)) == puzzles.num_examples
    # Among the puzzles of the last group with three of them, none is favoured.
    group = 8
    owners = np.searchsorted(puzzles.puzzle_indices, rows[groups_of(puzzles, rows) == group], side="right") - 1
    shares = np.bincount(owners - puzzles.group_indices[group]) / 200
    assert len(shares) == 3
    assert shares.min() > 0.2


def test_the_batch_size_moves_no_example(puzzles):
    by_four = drawn(puzzles, seed=1, examples=80)
    by_forty = [rows_of(train_batch(puzzles, seed=1, step=step, batch_size=40)) for step in range(2)]
    assert (np.concatenate(by_forty) == by_four).all()


def test_a_step_is_the_same_whatever_was_asked_before(puzzles):
    late = [train_batch(puzzles, seed=7, step=step, batch_size=6) for step in (500, 3, 499)]
    for step in range(20):
        train_batch(puzzles, seed=8, step=step, batch_size=6)
    again = [train_batch(puzzles, seed=7, step=step, batch_size=6) for step in (500, 3, 499)]
    for one, two in zip(late, again, strict=True):
        assert all((one[name] == two[name]).all() for name in one)


def test_a_batch_given_away_may_be_written_to(puzzles):
    before = train_batch(puzzles, seed=0, step=0, batch_size=6)
    for array in train_batch(puzzles, seed=0, step=0, batch_size=6).values():
        array += 1
    after = train_batch(puzzles, seed=0, step=0, batch_size=6)
    assert all((before[name] == after[name]).all() for name in before)


def test_the_seed_matters(puzzles):
    assert not (drawn(puzzles, seed=0, examples=40) == drawn(puzzles, seed=1, examples=40)).all()


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
            owners = np.searchsorted(puzzles.puzzle_indices, rows, side="right") - 1
            assert (batch["puzzle_identifiers"][valid] == puzzles.puzzle_identifiers[owners]).all()
            seen.extend(rows)
    assert seen == list(range(puzzles.num_examples))


@pytest.mark.parametrize(
    ("batch_size", "count", "message"),
    [
        (768, 7, "global batch 768 does not divide over 7 devices; use 756 or 770, or 8 devices"),
        (64, 3, "global batch 64 does not divide over 3 devices; use 60 or 66, or 4 devices"),
        (3, 2, "global batch 3 does not divide over 2 devices; use 2 or 4, or 3 devices"),
        (1, 8, "global batch 1 does not divide over 8 devices; use 8, or 1 device"),
        (0, 8, "global batch 0 is not a batch size; use 8 or a multiple of it"),
    ],
)
def test_a_batch_that_does_not_divide_is_said_with_what_would(batch_size, count, message):
    with pytest.raises(UserError) as caught:
        check_divides(batch_size, count, "devices")
    assert str(caught.value) == message


def test_every_loader_checks_that_the_batch_divides(puzzles):
    check_divides(12, 4, "devices")
    with pytest.raises(UserError, match="global batch 6 does not divide over 4 shards"):
        train_batch(puzzles, seed=0, step=0, batch_size=6, shard=(0, 4))
    with pytest.raises(UserError, match="global batch 6 does not divide over 4 shards"):
        next(eval_batches(puzzles, batch_size=6, shard=(0, 4)))


def test_epochs_count_groups(puzzles):
    assert epochs_to_steps(puzzles, 12, 4) == 30
    assert epochs_to_steps(puzzles, 1, 4) == 2
    with pytest.raises(UserError, match=r"1 epochs of 10 groups .* one batch of 16; use at least 1\.6 epochs"):
        epochs_to_steps(puzzles, 1, 16)


def test_a_loaded_set_is_only_read(tmp_path: Path, puzzles):
    """Batches come from the memory map by copy, so nothing that is done to them reaches the file."""
    np.save(tmp_path / "inputs.npy", puzzles.inputs)
    mapped = np.asarray(np.load(tmp_path / "inputs.npy", mmap_mode="r"))
    read_only = PuzzleSet(
        puzzles.metadata, mapped, mapped, puzzles.puzzle_identifiers, puzzles.puzzle_indices, puzzles.group_indices
    )
    batch = train_batch(read_only, seed=0, step=0, batch_size=6)
    batch["inputs"] += 1
    batch["labels"] += 1
    assert (mapped == puzzles.inputs).all()
