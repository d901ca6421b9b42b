"""Augmentation on the fly: every symmetry equally often and no other; a pure function of seed, step and row."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
from support.puzzle_sets import puzzle_set, train_batch

from train_jax.cli.build_data import main
from train_jax.errors import UserError
from train_jax.puzzles.batches import Mixture, load_mixture, mixture_of
from train_jax.puzzles.format import load_split
from train_jax.puzzles.maze.data import MazeData
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.puzzles.sudoku.generator import generate
from train_jax.puzzles.sudoku.grid import GEOMETRIES, grids_of, is_solution, tokens_of
from train_jax.puzzles.sudoku.symmetry import fingerprints
from train_jax.puzzles.symmetries import transform_for, words_for
from train_jax.puzzles.task import PuzzleConfig, PuzzleTask
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices


def metadata_of(seq_len: int, vocab_size: int) -> Metadata:
    return Metadata(seq_len, vocab_size, 0, 0, 0, 1, 1, 1.0, 1, ("all",))


def rarity(counts: np.ndarray) -> float:
    """Standard deviations that the counts of equally likely outcomes are off (by chi squared)."""
    expected = counts.mean()
    freedom = len(counts) - 1
    return abs(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def transformed_and_labels(data: Metadata, inputs: np.ndarray, labels: np.ndarray, copies: int, step: int):
    """Returns the images of copies of every example."""
    inputs, labels = (np.repeat(array, copies, axis=0) for array in (inputs, labels))
    return transform_for(data)(inputs, labels, words_for(1, step, slice(0, len(inputs))))


def test_every_symmetry_of_a_4x4_puzzle_comes_equally_often_and_no_other():
    """The fingerprints of 4x4 puzzles are equal exactly under symmetries (test_sudoku.py)."""
    geometry = GEOMETRIES[4]
    puzzle = generate(1, 8, geometry, np.random.default_rng(0), progress=lambda *_: None).puzzles
    transformed, labels = transformed_and_labels(metadata_of(16, 6), tokens_of(puzzle), tokens_of(puzzle), 3072 * 40, 5)
    assert (transformed == labels).all()
    found, counts = np.unique(grids_of(transformed), axis=0, return_counts=True)
    assert len(found) == 8 * 8 * 2 * 24  # orders of rows and columns, transposed or not, names of digits
    assert (fingerprints(found, geometry) == fingerprints(puzzle, geometry)).all()
    assert rarity(counts) < 4


@pytest.mark.parametrize(("size", "num_empty"), [(6, 18), (9, 50)])
def test_a_larger_sudoku_stays_itself_with_its_own_solution(size, num_empty):
    geometry = GEOMETRIES[size]
    originals = generate(60, num_empty, geometry, np.random.default_rng(2), progress=lambda *_: None)
    data = metadata_of(geometry.cells, geometry.vocab_size)
    pair = map(tokens_of, originals)
    transformed, labels = map(grids_of, transformed_and_labels(data, *pair, 200, 2))
    assert is_solution(labels, geometry).all() and ((transformed == 0) | (transformed == labels)).all()
    assert (fingerprints(transformed, geometry) == fingerprints(originals.puzzles, geometry).repeat(200)).all()
    assert len(np.unique(transformed, axis=0)) == len(transformed)
    assert rarity(np.bincount(labels[:, 0], minlength=size + 1)[1:]) < 4
    assert rarity((transformed[:200] > 0).sum(axis=0)) < 4


def test_cells_without_a_label_and_padding_keep_their_tokens():
    """This holds in a data set whose labels are not the whole solution, too."""
    inputs = np.array([[0, 1, 2, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], np.uint8)
    answer = np.where(inputs == 3, 5, np.where(inputs == 2, 1, 0)).astype(np.uint8)
    transformed, labels = transformed_and_labels(metadata_of(16, 6), inputs, answer, 400, 0)
    for row, label in zip(transformed, labels, strict=True):
        assert sorted(np.minimum(row, 2)) == [0, *[1] * 13, 2, 2]
        assert (np.sort(label)[:15] == [0] * 14 + [1]).all() and label.max() >= 2
        assert row[label == 1] >= 2 and row[label >= 2] >= 2
        # 3 and 5 of one cell are different digits, and 1 no digit at all.
        assert row[label >= 2] != label[label >= 2]


def test_every_turn_of_a_maze_comes_equally_often_and_no_other(tmp_path):
    main(MazeData(output_dir=tmp_path / "set", size=8, num_train=1, num_test=1, augment=True))
    stored = load_split(tmp_path / "set", "train")
    pairs = [np.concatenate(pair).tobytes() for pair in zip(stored.inputs, stored.labels, strict=True)]
    assert len(set(pairs)) == 8
    moved = transformed_and_labels(stored.metadata, stored.inputs[:1], stored.labels[:1], 8000, 2)
    found, counts = np.unique(np.concatenate(moved, axis=1), axis=0, return_counts=True)
    assert {row.tobytes() for row in found} == set(pairs)
    assert rarity(counts) < 4


def test_transformed_examples_are_those_of_earlier_versions():
    """A run that is continued with a newer version sees the same examples."""
    digest = hashlib.sha256()
    for seq_len, vocab_size in ((16, 6), (36, 8), (81, 11), (49, 6)):
        tokens = np.random.default_rng(0).integers(0, vocab_size, (64, seq_len)).astype(np.uint8)
        for array in transform_for(metadata_of(seq_len, vocab_size))(
            tokens, tokens[::-1], words_for(4, 99, slice(3, 67))
        ):
            digest.update(array.tobytes())
    assert digest.hexdigest() == "8d627c5c9363629cf5da20fcde0fc958e57eca1277cf3fe2e8e6936598529965"


def test_random_words_belong_to_seed_step_and_row_alone():
    whole = words_for(7, 12, slice(0, 96))
    assert (words_for(7, 12, slice(40, 57)) == whole[:, 40:57]).all()
    starts = ((7, 12), (12, 7), (7, 13), (8, 12), (0, 0), (-1, 5))
    assert len(np.unique([words_for(seed, step, slice(0, 96)) for seed, step in starts])) == len(starts) * 2 * 96
    bits = np.unpackbits(words_for(0, 0, slice(0, 4096)).copy().view(np.uint8)).reshape(-1, 64)
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.03


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Mixture:
    """70 Sudokus of 6x6 cells, with twice the rows of 50 mazes of 6x6 cells."""
    folder = tmp_path_factory.mktemp("sets")
    main(SudokuData(output_dir=folder / "sudoku", size=6, num_train=70, num_test=6, num_aug=1))
    main(MazeData(output_dir=folder / "maze", size=6, num_train=50, num_test=6))
    return load_mixture(f"{folder / 'sudoku'},{folder / 'maze'}", "train", "2,1")


def test_the_same_examples_are_drawn_as_without_and_shards_join_to_the_whole_batch(mixture):
    for step in (3, 0):
        plain, transformed = (
            mixture.train_batch(seed=2, step=step, batch_size=90, augment=each) for each in (False, True)
        )
        assert (plain["puzzle_identifiers"] == transformed["puzzle_identifiers"]).all()
        sudokus = [fingerprints(grids_of(batch["inputs"][:60]), GEOMETRIES[6]) for batch in (plain, transformed)]
        assert (sudokus[0] == sudokus[1]).all()
        assert (plain["inputs"][:60] != transformed["inputs"][:60]).any(axis=1).all()
        mazes = [np.sort(batch["labels"][60:], axis=1) for batch in (plain, transformed)]
        assert (mazes[0] == mazes[1]).all()
        assert 0.6 < (plain["inputs"][60:] != transformed["inputs"][60:]).any(axis=1).mean() < 1
        shards = [mixture.train_batch(seed=2, step=step, batch_size=90, shard=(i, 3), augment=True) for i in range(3)]
        for name, array in transformed.items():
            assert (np.concatenate([shard[name] for shard in shards]) == array).all()


def test_each_step_and_each_data_set_has_symmetries_of_its_own(mixture):
    sudokus = mixture.parts[0]
    ends = np.array([0, 1])
    one = {"inputs": sudokus.inputs[:1], "labels": sudokus.labels[:1], "puzzle_identifiers": ends[:1]}
    one_sudoku = replace(sudokus, **one, puzzle_indices=ends, group_indices=ends)
    seen = [train_batch(one_sudoku, seed=0, step=step, batch_size=50, augment=True)["inputs"] for step in range(20)]
    assert len(np.unique(np.concatenate(seen), axis=0)) == 1000
    batch = mixture_of([one_sudoku, one_sudoku]).train_batch(seed=0, step=0, batch_size=400, augment=True)
    assert len(np.unique(batch["inputs"], axis=0)) == 400


def test_a_run_is_augmented_where_it_trains_and_refuses_data_without_symmetries(mixture, data_dir):
    """Whole runs with the option, on one device and on eight, killed and continued, are in test_compute_options.py."""
    config = replace(preset("tiny"), data_dir=str(data_dir), seed=3, global_batch_size=8)
    for augment in (True, False):
        task = PuzzleTask(replace(config, task_config=PuzzleConfig(augment=augment)))
        expected = task.train_set.train_batch(seed=3, step=2, batch_size=8, shard=(1, 2), augment=augment)
        assert (task.batch(2, (1, 2))["inputs"] == expected["inputs"]).all()
        task.check(config, Devices(1))
        words = puzzle_set(np.ones(4, int), np.ones(4, int))
        task.train_set = mixture_of([mixture.parts[0], words], [1, 1])
        if augment:
            with pytest.raises(UserError, match="contains sequences of 2 tokens from a vocabulary of 100"):
                task.check(replace(config, data_dir="sudokus,words"), Devices(1))
    with pytest.raises(UserError, match="--augment: x ignores label -100, expected 0"):
        transform_for(replace(words.metadata, ignore_label_id=-100), "x")
