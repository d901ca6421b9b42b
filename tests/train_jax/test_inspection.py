"""`trm build-data inspect` counts known faults of data sets, draws examples and writes nothing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import write_source

from train_jax.stages.build_data import ArcData, Inspect, MazeData, SudokuData, main
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.inspection import inspect, row_marks

LEAKS = "between train and test"
EQUIVALENT = "test examples that are a symmetry of a train example"


def silent(*_):
    pass


@pytest.fixture(scope="module")
def whole_sets(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sets")
    main(SudokuData(output_dir=folder / "sudoku", size=6, num_train=20, num_test=10, num_aug=3))
    main(MazeData(output_dir=folder / "maze", size=7, num_train=20, num_test=10, augment=True))
    main(ArcData(str(write_source(folder / "source")), output_dir=folder / "arc", num_aug=2))
    return {name: folder / name for name in ("sudoku", "maze", "arc")}


@pytest.fixture
def sets(whole_sets, tmp_path) -> dict[str, Path]:
    """Copies, to be damaged."""
    return {name: shutil.copytree(path, tmp_path / name) for name, path in whole_sets.items()}


def put(directory: Path, split: str, field: str, row: int, values) -> None:
    path = directory / split / f"all__{field}.npy"
    array = np.load(path)
    array[row] = values
    np.save(path, array)


def test_a_whole_set_is_counted_and_nothing_is_wrong_with_it(whole_sets):
    facts = inspect(whole_sets["sudoku"], silent)
    assert facts["data set"]["kind"] == "6x6 Sudokus"
    assert facts["data set"]["recipe: num_aug"] == "3"
    assert facts["data set"]["content"] == "as it was written (SHA-256)"
    assert facts["train"] == {
        "puzzles": "20",
        "with augmentations": "80 (4 of each)",
        "examples": "80 (1 of each)",
        "puzzle identifiers": "1",
        "examples that repeat another": "0",
        "inputs with several labels": "0 more labels than inputs",
        "empty cells": "18",
        "labels that are not a solution": "0",
        "puzzles without exactly one solution": "0 of 20 checked",
        "difficulty": "0 to 0 guesses, mean 0.0, median 0, 0.0% need one, of 20 checked",
        "augmentations that are not a symmetry of their original": "0 of 2,000 checked",
    }
    assert facts[LEAKS] == {"test inputs that are also train inputs": "0 of 10", EQUIVALENT: "0 of 10"}
    mazes = inspect(whole_sets["maze"], silent)
    assert mazes["data set"]["kind"] == "7x7 mazes"
    assert mazes["train"]["with augmentations"] == "160 (8 of each)"
    assert mazes["train"]["mazes with several shortest paths"] == "0 of 20 checked"
    arc = inspect(whole_sets["arc"], silent)
    assert arc["data set"]["kind"] == "ARC puzzles"
    assert arc["test"]["with augmentations"] == "15 (3 of each)"
    assert arc[LEAKS][EQUIVALENT].startswith("0 of")


def test_repeated_and_leaked_examples_are_counted(sets):
    sudoku = sets["sudoku"]
    train, test = load_split(sudoku, "train"), load_split(sudoku, "test")
    put(sudoku, "train", "inputs", 5, train.inputs[4])
    put(sudoku, "train", "labels", 5, train.labels[4])
    put(sudoku, "test", "inputs", 0, train.inputs[0])
    put(sudoku, "test", "inputs", 1, train.inputs[9])  # an augmentation
    put(sudoku, "test", "labels", 1, train.labels[9])
    put(sudoku, "test", "inputs", 3, test.inputs[2])
    facts = inspect(sudoku, silent)
    assert facts["data set"]["content"] == "CHANGED since it was written (SHA-256)"
    assert facts["train"]["examples that repeat another"] == "1"
    assert facts["test"]["inputs with several labels"] == "1 more labels than inputs"
    assert facts["test"]["labels that are not a solution"] == "2"
    assert facts[LEAKS] == {"test inputs that are also train inputs": "2 of 10", EQUIVALENT: "2 of 10"}


def test_faults_of_each_kind_are_counted_and_leaks_under_symmetries(sets):
    put(sets["sudoku"], "train", "inputs", 0, 1)
    facts = inspect(sets["sudoku"], silent)["train"]
    assert facts["puzzles without exactly one solution"] == "1 of 20 checked"
    # The 2000 checked are spread evenly over 80 examples, so the three copies of the first are 75 or 76 of them.
    unlike = int(facts["augmentations that are not a symmetry of their original"].split()[0])
    assert 74 <= unlike <= 77
    for field in ("inputs", "labels"):
        turned = np.rot90(getattr(load_split(sets["maze"], "train"), field)[8].reshape(7, 7)).ravel()
        put(sets["maze"], "test", field, 2, turned)
    assert inspect(sets["maze"], silent)[LEAKS][EQUIVALENT] == "1 of 10"
    train = load_split(sets["arc"], "train")
    example = train.puzzle_indices[train.group_indices[1]]
    colours = np.concatenate([[0, 1, 2], 3 + np.random.default_rng(0).permutation(9)]).astype(np.uint8)
    for field in ("inputs", "labels"):
        canvas = colours[getattr(train, field)[example].reshape(30, 30).T].ravel()
        put(sets["arc"], "test", field, 0, canvas)
    assert inspect(sets["arc"], silent)[LEAKS][EQUIVALENT].startswith("1 of")
    put(sets["maze"], "train", "labels", 0, load_split(sets["maze"], "train").inputs[0])
    assert inspect(sets["maze"], silent)["train"]["labels that are not a shortest path"] == "1 of 20 checked"
    put(sets["maze"], "train", "inputs", 0, 2)
    assert inspect(sets["maze"], silent)["train"]["inputs that are not mazes"] == "1 of 20 checked"


def test_row_marks_are_equal_for_equal_rows_only():
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 12, (9000, 30)).astype(np.uint8)
    rows[7000] = rows[3]
    marks = row_marks(rows)
    assert marks[7000] == marks[3] and len(np.unique(marks)) == 8999
    # Differences in one cell, in the same bit of two cells, and the order of cells all matter.
    near = np.zeros((4, 30), np.int64)
    near[1, 3], near[2, 2], near[3, [2, 3]] = 128, 128, 128
    assert len(np.unique(row_marks(near))) == 4
    assert (row_marks(rows.astype(np.int32)) == marks).all()
    assert (row_marks(np.asfortranarray(rows)) == marks).all()


def test_examples_are_drawn_and_nothing_is_written(whole_sets, capsys):
    for name, directory in whole_sets.items():
        before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
        main(Inspect(directory, examples=2))
        out = capsys.readouterr().out
        assert out.count("solution") >= 4 and "train example 0" in out and "test example 0" in out
        assert f"size on disk: {sum(p.stat().st_size for p in before if p.is_file()) / 1e6:,.1f} MB" in out
        assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
        assert "\x1b" not in out, name


def test_sets_from_elsewhere_and_of_unknown_kinds_are_inspected_too(sets, capsys):
    (sets["sudoku"] / "recipe.json").unlink()
    assert inspect(sets["sudoku"], silent)["data set"]["recipe"] == "none: not built by this project"
    for split in ("train", "test"):
        path = sets["sudoku"] / split / "dataset.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 40}))
    facts = inspect(sets["sudoku"], silent)
    assert facts["data set"]["kind"] == "sequences of 36 tokens from a vocabulary of 40"
    assert facts[LEAKS]["the same under the puzzle's symmetries"] == "unknown for this kind of puzzle"
    main(Inspect(sets["sudoku"]))
    assert "example 0" not in capsys.readouterr().out
