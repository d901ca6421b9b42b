"""The data set on disk: it loads again, a damaged one is refused, and a killed build leaves nothing."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from support.puzzle_sets import record_of
from support.small_set import METADATA, RECIPE, arrays, rewrite_json, splits

from train_jax.errors import UserError
from train_jax.tasks.new_dataset import is_built
from train_jax.tasks.puzzles.building import LAYOUT, write_dataset
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.metadata import FIELDS, content_of


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


def test_a_fingerprint_sees_every_array_and_the_metadata(data_set):
    puzzles = load_split(data_set, "train")
    others = [replace(puzzles, metadata=replace(METADATA, ignore_label_id=1))]
    for field in FIELDS:
        changed = getattr(puzzles, field).copy()
        changed.flat[-1] += 1
        others.append(replace(puzzles, **{field: changed}))
    assert len({puzzles.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("content", [None, [], {"train": 3}, {"train": "x" * 32}, {"train": "ab"}, {"test": "0" * 32}])
def test_a_fingerprint_that_is_none_is_computed(data_set, content):
    expected = load_split(data_set, "train").fingerprint
    rewrite_json(data_set / "recipe.json", content=content)
    assert load_split(data_set, "train").fingerprint == expected


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
    (data_set / "recipe.json").unlink()  # as if it came from elsewhere
    with pytest.raises(UserError, match=r"without a valid recipe.json.* choose another --output-dir or pass --overwr"):
        is_built(data_set, RECIPE, LAYOUT)
    (data_set / "thesis.tex").unlink()
    assert not is_built(data_set, RECIPE, LAYOUT, overwrite=True)


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import train_jax.tasks.puzzles.building as writing
from support.small_set import splits
writing.content_of = lambda splits: os.kill(os.getpid(), signal.SIGKILL)
writing.write_dataset({place!r}, splits(), ["<blank>"], {{"maker": "killed"}}, overwrite={overwrite})
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_killed_or_failing_build_leaves_no_half_data_set(tmp_path, overwrite):
    place, broken = tmp_path / "set", splits()
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
