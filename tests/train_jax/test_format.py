"""The data set on disk: it loads again, a damaged one is refused, a killed build leaves nothing; inspection.

`trm build-data inspect` counts known faults of data sets, draws examples and writes nothing.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import write_source
from support.puzzle_sets import record_of
from support.small_set import METADATA, RECIPE, arrays, rewrite_json, splits

from train_jax.cli.build_data import Inspect, main
from train_jax.errors import UserError
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.building import LAYOUT, write_dataset
from train_jax.puzzles.format import load_split
from train_jax.puzzles.inspection import inspect
from train_jax.puzzles.maze.data import MazeData
from train_jax.puzzles.metadata import FIELDS, content_of
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.storage.content import remembered
from train_jax.storage.new_dataset import is_built


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    assert write_dataset(tmp_path / "set", splits(), ["<blank>", "a", "b"], RECIPE, findings={"odd": 3})
    return tmp_path / "set"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_data_set_that_is_written_has_the_published_layout_and_loads_again(data_set, tmp_path):
    assert names_in(data_set) == ["identifiers.json", "recipe.json", "test", "train"]
    assert names_in(data_set / "train") == sorted([*(f"all__{field}.npy" for field in FIELDS), "dataset.json"])
    assert json.loads((data_set / "identifiers.json").read_text()) == ["<blank>", "a", "b"]
    assert set(json.loads((data_set / "train/dataset.json").read_text())) == {*asdict(METADATA)} - {"kind"}
    for split in ("train", "test"):
        loaded = load_split(data_set, split)
        assert loaded.metadata == METADATA
        assert (loaded.num_examples, loaded.num_groups) == (5, 2)
        for field in FIELDS:
            assert (getattr(loaded, field) == arrays()[field]).all()
        assert isinstance(loaded.inputs.base, np.memmap)
        assert isinstance(loaded.labels.base, np.memmap)
    # An ignored label may lie outside of the vocabulary.
    ignoring = (replace(METADATA, ignore_label_id=-100), arrays() | {"labels": np.full((5, 4), -100)})
    write_dataset(tmp_path / "other", {"train": ignoring, "test": ignoring}, ["<blank>"], RECIPE)
    assert (load_split(tmp_path / "other", "train").labels == -100).all()


def of_field(field: str, array) -> Callable[[Path], None]:
    return lambda train: np.save(train / f"all__{field}.npy", array, allow_pickle=True)


def of_metadata(**changes) -> Callable[[Path], None]:
    return lambda train: rewrite_json(train / "dataset.json", **changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_metadata(seq_len="absent"), "dataset.json: the field seq_len is missing"),
        (of_metadata(seq_len="4"), "dataset.json: seq_len is '4', expected int"),
        (of_metadata(vocab_size=True), "dataset.json: vocab_size is True, expected int"),
        (of_metadata(vocab_size=0), "dataset.json: vocab_size is 0, expected at least 1"),
        (of_metadata(vocab_size=5), r"all__inputs.npy: contains \[5\], expected values from 0 to 4"),
        (of_metadata(seq_len=5), r"all__inputs.npy: shape \(5, 4\), expected \[examples, 5\]"),
        (of_metadata(total_groups=3), "dataset.json: total_groups is 3, expected 2 as in group_indices"),
        (of_metadata(num_puzzle_identifiers=2), r"all__puzzle_identifiers.npy: contains \[2\], expected values from 0"),
        (of_metadata(sets=[]), r"dataset.json: sets is \[\], expected one name, such as all"),
        (of_metadata(sets=["all", "more"]), r"dataset.json: sets is \['all', 'more'\], expected one name, such as all"),
        (of_metadata(sets=["none"]), "none__inputs.npy is missing"),
        (of_field("inputs", np.zeros((5, 4), np.float32)), "dtype float32, expected an integer type"),
        (of_field("inputs", np.array([[None] * 4] * 5)), "is not a valid array"),
        (of_field("inputs", np.zeros((4, 4), np.uint8)), r"all__labels.npy: shape \(5, 4\), expected \(4, 4\)"),
        (of_field("inputs", np.full((5, 4), -1)), r"contains \[-1\], expected values from 0 to 5"),
        (of_field("labels", np.full((5, 4), 6)), r"all__labels.npy: contains \[6\]"),
        (of_field("puzzle_indices", np.array([0, 2, 3, 4])), "vector from 0 to the number of examples, 5"),
        (of_field("puzzle_indices", np.array([1, 2, 3, 5])), "vector from 0 to the number of examples, 5"),
        (of_field("puzzle_indices", np.array([0, 3, 3, 5])), r"entry \[2\] does not exceed the one before it"),
        (of_field("puzzle_indices", np.array([0, 5])), "2 entries, expected one more than the 3 puzzle_identifiers"),
        (of_field("puzzle_indices", np.array(5)), "vector from 0"),
        (of_field("group_indices", np.array([0, 2, 5])), "vector from 0 to the number of puzzles, 3"),
        (of_field("puzzle_identifiers", np.zeros((3, 1), int)), r"shape \(3, 1\), expected \[puzzles\]"),
    ],
)
def test_files_that_do_not_fit_are_refused(data_set, spoil, message):
    spoil(data_set / "train")
    with pytest.raises(UserError, match=message) as caught:
        load_split(data_set, "train")
    assert "build the data set again with `trm build-data`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_fingerprint_is_the_same_however_it_is_come_by(data_set):
    """The builder stores it, or it is computed from the loaded data, or from indices of another integer type."""
    stated = load_split(data_set, "train")
    assert stated.fingerprint == content_of(splits()).fingerprints["train"] == stated.stated_fingerprint
    (data_set / "recipe.json").unlink()
    for dtype in (np.int32, np.uint16, ">i8"):
        for field in ("puzzle_indices", "group_indices"):
            np.save(data_set / "train" / f"all__{field}.npy", arrays()[field].astype(dtype))
        computed = load_split(data_set, "train")
        assert not computed.stated_fingerprint and computed.fingerprint == stated.fingerprint
    assert len(stated.fingerprint) == 32 and load_split(data_set, "test").fingerprint == stated.fingerprint


def test_a_fingerprint_sees_every_array_and_the_metadata_and_is_computed_where_none_is_stated(data_set):
    puzzles = load_split(data_set, "train")
    others = [replace(puzzles, metadata=replace(METADATA, ignore_label_id=1))]
    for field in FIELDS:
        changed = getattr(puzzles, field).copy()
        changed.flat[-1] += 1
        others.append(replace(puzzles, **{field: changed}))
    assert len({puzzles.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
    for content in (None, [], {"train": 3}, {"train": "x" * 32}, {"train": "ab"}, {"test": "0" * 32}):
        rewrite_json(data_set / "recipe.json", content=content)
        assert load_split(data_set, "train").fingerprint == puzzles.fingerprint


def change(path: Path) -> None:
    """Writes other content of the same size into an array file."""
    array = np.load(path)
    np.save(path, np.roll(array, 1, axis=0))


def test_a_fingerprint_is_that_of_the_files_whatever_the_recipe_states(data_set):
    before = load_split(data_set, "test").fingerprint
    change(data_set / "test" / "all__inputs.npy")
    after = load_split(data_set, "test")
    assert after.fingerprint != before == after.stated_fingerprint


def test_the_hash_of_large_files_is_computed_again_only_where_they_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("TRM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "set"
    computed = []
    folder.mkdir()
    files = [folder / "one", folder / "two"]

    def hashed(where: Path = folder) -> str:
        def compute() -> str:
            computed.append(where)
            return "".join((where / path.name).read_text() for path in files)

        return remembered([where / path.name for path in files], "test", compute)

    def times(result: str, count: int, where: Path = folder) -> bool:
        computed.clear()
        return [hashed(where), hashed(where), len(computed)] == [result, result, count]

    for path in files:
        path.write_text(path.name)
    assert times("onetwo", 2), "small files are read"
    monkeypatch.setattr("train_jax.storage.content.LEAST_BYTES", 1)
    assert times("onetwo", 1) and times("onetwo", 0)
    stat = files[1].stat()
    files[1].write_text("owt")
    os.utime(files[1], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert times("oneowt", 1), "the size and the time of the change are as before"
    folder.rename(tmp_path / "moved")
    assert times("oneowt", 0, tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", folder)
    assert times("oneowt", 1)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    assert times("oneowt", 2), "without a cache"


def test_the_same_recipe_is_left_alone_and_another_is_refused(data_set):
    times = {path: path.stat().st_mtime_ns for path in data_set.rglob("*")}
    assert is_built(data_set, RECIPE, LAYOUT)
    assert not write_dataset(data_set, splits(), [], RECIPE, overwrite=True)
    other = {**RECIPE, "seed": 2}
    for call in (lambda: is_built(data_set, other, LAYOUT), lambda: write_dataset(data_set, splits(), [], other)):
        with pytest.raises(UserError, match=r"other options \(seed is 1, requested 2\); choose another --output-dir"):
            call()
    assert {path: path.stat().st_mtime_ns for path in data_set.rglob("*")} == times


def test_overwrite_replaces_a_data_set_and_nothing_else(data_set, tmp_path):
    other = {**RECIPE, "seed": 2}
    assert write_dataset(data_set, splits(), ["<blank>"], other, overwrite=True)
    assert names_in(tmp_path) == ["set"]
    assert record_of(data_set)["recipe"] == other
    (data_set / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"contains thesis.tex, which is not part of a data set"):
        write_dataset(data_set, splits(), [], RECIPE, overwrite=True)
    assert (data_set / "thesis.tex").exists()
    with pytest.raises(UserError, match="is a file; choose another --output-dir"):
        write_dataset(data_set / "thesis.tex", splits(), [], RECIPE, overwrite=True)
    (data_set / "thesis.tex").unlink()
    (data_set / "recipe.json").unlink()  # as if it came from elsewhere
    with pytest.raises(UserError, match=r"without a valid recipe.json.* choose another --output-dir or pass --overwr"):
        is_built(data_set, RECIPE, LAYOUT)
    assert not is_built(data_set, RECIPE, LAYOUT, overwrite=True)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import train_jax.puzzles.building as writing
from support.small_set import splits
writing.content_of = lambda splits: os.kill(os.getpid(), signal.SIGKILL)
writing.write_dataset({place!r}, splits(), ["<blank>"], {{"maker": "killed"}}, overwrite={overwrite})
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_or_failing_build_leaves_no_half_data_set(tmp_path, overwrite):
    place = tmp_path / "set"
    broken = splits()
    del broken["test"][1]["labels"]
    with pytest.raises(KeyError):
        write_dataset(place, broken, [], RECIPE)
    assert names_in(tmp_path) == []
    if overwrite:
        write_dataset(place, splits(), ["<blank>"], RECIPE)
    program = KILLED.format(tests=str(Path(__file__).parents[1]), place=str(place), overwrite=overwrite)
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root).returncode == -signal.SIGKILL
    assert names_in(tmp_path) == [".set.building"] + ["set"] * overwrite
    if overwrite:
        assert is_built(place, RECIPE, LAYOUT)
    assert write_dataset(place, splits(), ["<blank>"], RECIPE) == (not overwrite)
    assert names_in(tmp_path) == ["set"]


# ---- `trm build-data inspect`


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
    train = load_split(sudoku, "train")
    test = load_split(sudoku, "test")
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
        rewrite_json(sets["sudoku"] / split / "dataset.json", vocab_size=40)
    facts = inspect(sets["sudoku"], silent)
    assert facts["data set"]["kind"] == "sequences of 36 tokens from a vocabulary of 40"
    assert facts[LEAKS]["the same under the puzzle's symmetries"] == "unknown for this kind of puzzle"
    main(Inspect(sets["sudoku"]))
    assert "example 0" not in capsys.readouterr().out
