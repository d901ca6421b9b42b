"""Augmentation on the fly: every symmetry equally often and no other; a pure function of seed, step and row."""

import hashlib
import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from support.puzzle_sets import puzzle_set, train_batch

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.stages.build_data import MazeData, SudokuData, main
from train_jax.tasks.puzzles.batches import IGNORED_LABEL, Mixture, load_mixture, mixture_of
from train_jax.tasks.puzzles.building import write_dataset
from train_jax.tasks.puzzles.format import PuzzleSet, load_split
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.sudoku.generator import generate
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, grids_of, is_solution, tokens_of
from train_jax.tasks.puzzles.sudoku.symmetry import fingerprints
from train_jax.tasks.puzzles.symmetries import transform_for, words_for


def silent(*_):
    pass


def metadata_of(seq_len: int, vocab_size: int) -> Metadata:
    return Metadata(seq_len, vocab_size, 0, 0, 0, 1, 1, 1.0, 1, ("all",))


def rarity(counts: np.ndarray) -> float:
    """Standard deviations that the counts of equally likely outcomes are off (by chi squared)."""
    expected = counts.mean()
    freedom = len(counts) - 1
    return abs(((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom)


def images_of_4x4(grid: np.ndarray) -> set[bytes]:
    """Returns the images under every symmetry: 8 row orders, 8 column orders, transposed or not, 24 names of digits."""
    orders = [(a, b, c, d) for a, b, c, d in permutations(range(4)) if {a // 2, b // 2} in ({0}, {1})]
    images = set()
    for turned in (grid.reshape(4, 4), grid.reshape(4, 4).T):
        for rows in orders:
            for cols in orders:
                for names in permutations((1, 2, 3, 4)):
                    images.add(np.array([0, *names], np.uint8)[turned[np.ix_(rows, cols)]].tobytes())
    return images


def test_every_symmetry_of_a_4x4_puzzle_comes_equally_often_and_no_other():
    puzzle = next(
        puzzle
        for puzzle in generate(20, 8, GEOMETRIES[4], np.random.default_rng(1), progress=silent).puzzles
        if len(images_of_4x4(puzzle)) == 8 * 8 * 2 * 24
    )
    count = 3072 * 40
    tokens = np.broadcast_to(tokens_of(puzzle), (count, 16))
    transformed, labels = transform_for(metadata_of(16, 6))(tokens, tokens, words_for(3, 5, slice(0, count)))
    assert (transformed == labels).all()
    found, counts = np.unique(grids_of(transformed), axis=0, return_counts=True)
    assert {row.tobytes() for row in found} == images_of_4x4(puzzle)
    assert rarity(counts) < 4


@pytest.mark.parametrize(("size", "num_empty"), [(6, 18), (9, 50)])
def test_a_larger_sudoku_stays_itself_with_its_own_solution(size, num_empty):
    geometry = GEOMETRIES[size]
    originals = generate(60, num_empty, geometry, np.random.default_rng(2), progress=silent)
    puzzles, solutions = (np.repeat(array, 200, axis=0) for array in originals)
    move = transform_for(metadata_of(geometry.cells, geometry.vocab_size))
    words = words_for(0, 1, slice(0, len(puzzles)))
    transformed, labels = map(grids_of, move(tokens_of(puzzles), tokens_of(solutions), words))
    assert is_solution(labels, geometry).all() and ((transformed == 0) | (transformed == labels)).all()
    assert (fingerprints(transformed, geometry) == fingerprints(puzzles, geometry)).all()
    assert len(np.unique(transformed, axis=0)) == len(transformed)
    counts = np.bincount(labels[:, 0], minlength=size + 1)[1:]
    assert rarity(counts) < 4
    assert rarity((transformed[:200] > 0).sum(axis=0)) < 4


def test_cells_without_a_label_and_padding_keep_their_tokens():
    """This holds in a data set whose labels are not the whole solution, too."""
    inputs = np.array([[0, 1, 2, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]], np.uint8)
    answer = np.where(inputs == 3, 5, np.where(inputs == 2, 1, 0)).astype(np.uint8)
    count = 400
    transformed, labels = transform_for(metadata_of(16, 6))(
        inputs.repeat(count, 0), answer.repeat(count, 0), words_for(0, 0, slice(0, count))
    )
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
    count = 8000
    inputs, labels = (np.repeat(array[:1], count, axis=0) for array in (stored.inputs, stored.labels))
    transformed = np.concatenate(
        transform_for(stored.metadata)(inputs, labels, words_for(1, 2, slice(0, count))), axis=1
    )
    found, counts = np.unique(transformed, axis=0, return_counts=True)
    assert {row.tobytes() for row in found} == set(pairs)
    assert rarity(counts) < 4


def test_random_words_belong_to_seed_step_and_row_alone():
    whole = words_for(7, 12, slice(0, 96))
    assert (words_for(7, 12, slice(40, 57)) == whole[:, 40:57]).all()
    others = [
        words_for(seed, step, slice(0, 96)) for seed, step in ((7, 12), (12, 7), (7, 13), (8, 12), (0, 0), (-1, 5))
    ]
    assert len(np.unique(others)) == len(others) * 2 * 96
    bits = np.unpackbits(words_for(0, 0, slice(0, 4096)).copy().view(np.uint8)).reshape(-1, 64)
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.03


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


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("sets")
    main(SudokuData(output_dir=folder / "sudoku", size=6, num_train=70, num_test=6, num_aug=1))
    main(MazeData(output_dir=folder / "maze", size=6, num_train=50, num_test=6))
    return folder / "sudoku", folder / "maze"


@pytest.fixture(scope="module")
def mixture(folders) -> Mixture:
    return load_mixture(",".join(map(str, folders)), "train", "2,1")


@pytest.fixture(scope="module")
def one_sudoku(folders) -> PuzzleSet:
    sudoku = load_split(folders[0], "train")
    one = puzzle_set(np.ones(1, int), np.ones(1, int))
    return replace(
        one,
        metadata=sudoku.metadata,
        inputs=sudoku.inputs[:1],
        labels=sudoku.labels[:1],
        puzzle_identifiers=np.zeros(1, int),
    )


def test_shards_join_to_the_whole_batch_and_no_step_depends_on_another(mixture):
    for step in (700, 0, 5):
        whole = mixture.train_batch(seed=1, step=step, batch_size=300, augment=True)
        shards = [mixture.train_batch(seed=1, step=step, batch_size=300, shard=(i, 3), augment=True) for i in range(3)]
        for name, array in whole.items():
            assert (np.concatenate([shard[name] for shard in shards]) == array).all()


def test_the_same_examples_are_drawn_as_without(mixture):
    for step in (0, 3):
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


def test_each_step_and_each_data_set_has_symmetries_of_its_own(one_sudoku):
    seen = [train_batch(one_sudoku, seed=0, step=step, batch_size=50, augment=True)["inputs"] for step in range(20)]
    assert len(np.unique(np.concatenate(seen), axis=0)) == 1000
    batch = mixture_of([one_sudoku, one_sudoku]).train_batch(seed=0, step=0, batch_size=400, augment=True)
    assert len(np.unique(batch["inputs"], axis=0)) == 400


def test_ignored_labels_are_ignored_where_they_went(folders):
    sudoku = load_split(folders[0], "train")
    labels = np.where(np.arange(36) < 6, 0, sudoku.labels).astype(np.uint8)
    part: PuzzleSet = replace(sudoku, labels=labels)
    batch = train_batch(part, seed=0, step=0, batch_size=64, augment=True)
    assert ((batch["labels"] == IGNORED_LABEL).sum(axis=1) == 6).all()
    assert (batch["labels"] == IGNORED_LABEL).any(axis=0).sum() > 30
    with pytest.raises(UserError, match="--augment: x ignores label -100, expected 0"):
        transform_for(replace(sudoku.metadata, ignore_label_id=-100), "x")


def test_a_run_is_augmented_where_it_trains_and_nowhere_else(folders, tmp_path, monkeypatch, capsys):
    """Whole runs with the option, on one device and on eight, killed and continued, are in test_compute_options.py."""

    def refuse(self, **arguments):
        raise UserError(f"asked for a batch with augment {arguments['augment']}")

    monkeypatch.setattr(Mixture, "train_batch", refuse)
    where = ["--data-dir", str(folders[0]), "--run-dir", str(tmp_path / "run")]
    command = ["train", "tiny", *where, "--wandb", "disabled", "--eval-batch-size", "6"]
    for arguments, message in (
        (["--augment"], "asked for a batch with augment True"),
        ([], "augment True there, False requested"),
        (["--run-dir", str(tmp_path / "other")], "asked for a batch with augment False"),
    ):
        assert trm([*command, *arguments]) == 2
        assert message in capsys.readouterr().err
    test = load_mixture(str(folders[0]), "test")
    (batch, _), *_ = test.eval_batches(batch_size=6)
    assert (batch["inputs"] == test.parts[0].inputs).all()


def test_a_data_set_of_another_kind_is_refused_and_no_run_is_begun(folders, tmp_path, capsys):
    other = puzzle_set(np.ones(4, int), np.ones(4, int))
    arrays = {
        name: getattr(other, name)
        for name in ("inputs", "labels", "puzzle_identifiers", "puzzle_indices", "group_indices")
    }
    split = (replace(other.metadata, total_groups=4), arrays)
    write_dataset(tmp_path / "other", {"train": split, "test": split}, ["<blank>"], {"made": "by a test"})
    both = f"{folders[0]},{tmp_path / 'other'}"
    run = tmp_path / "run"
    assert trm(["train", "tiny", "--augment", "--data-dir", both, "--run-dir", str(run), "--wandb", "disabled"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"trm: --augment: {tmp_path / 'other'} contains sequences of 2 tokens from a vocabulary of 100, expected "
    )
    assert said.count("\n") == 1 and not run.exists()
