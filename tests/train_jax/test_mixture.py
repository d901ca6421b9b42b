"""Several data sets as one: shares as asked, no identifier twice, lengths that agree, still a pure function."""

import dataclasses

import numpy as np
import pytest
from support.puzzle_sets import puzzle_set, train_batch

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.tasks.puzzles.batches import (
    IGNORED_LABEL,
    batch_of,
    draw_examples,
    eval_batches,
    load_mixture,
    load_part,
    mixture_of,
)
from train_jax.tasks.puzzles.building import write_dataset
from train_jax.tasks.puzzles.format import PuzzleSet, load_split


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
    first, second = batch["puzzle_identifiers"][:3], batch["puzzle_identifiers"][3:]
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


def test_equal_data_sets_are_not_drawn_alike(parts):
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
        arrays = {name: getattr(puzzles, name) for name in ("puzzle_identifiers", "puzzle_indices", "group_indices")}
        for name in ("inputs", "labels"):
            arrays[name] = np.pad(getattr(puzzles, name), ((0, 0), (0, 1)))
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
def test_a_run_on_two_data_sets_trains_and_is_scored_on_one(two_dirs, tmp_path, capsys):
    run = str(tmp_path / "run")
    command = ["train", "tiny", "--data-dir", ",".join(two_dirs), "--data-weights", "3,1", "--run-dir", run]
    small = ["--arch.H-cycles", "1", "--arch.L-cycles", "1", "--arch.halt-max-steps", "2"]
    assert main([*command, *small, "--steps", "2", "--eval-batch-size", "8", "--wandb", "disabled"]) == 0
    assert "on 16 held-out puzzles" in capsys.readouterr().out
    assert main(["evaluate", run, "--data-dir", two_dirs[1]]) == 0
    assert "count            8" in capsys.readouterr().out
    assert main(["evaluate", run, "--data-dir", "elsewhere"]) == 2
    assert "is not a data set that the run was trained on" in capsys.readouterr().err
