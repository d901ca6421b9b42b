"""`trm build-data arc`: every puzzle accounted for, every augmentation undone exactly, no test solution trained on."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import OFFICIAL, PUBLISHED, SUBSETS, write_source
from support.arc_sets import ALL, TESTED, build, examples_by_name, identifiers, in_corner, record

from benchmarks import published
from train_jax.tasks.puzzles.arc.grid import parse_names
from train_jax.tasks.puzzles.arc.json import read_subset
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.metadata import FIELDS


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("arc") / "files")


def test_without_augmentations_the_arrays_are_the_published_ones(tmp_path, source):
    """The hash is that of what the published builder wrote for these files with this seed."""
    facts = record(build(tmp_path / "set", source))
    assert facts["content_sha256"] == GOLDEN
    assert facts["findings"]["puzzles"] == SUBSETS


GOLDEN = "bbd634b14a8d3e9eaefc87b097f098f11ca115c51b4c7cd6172c8d9b93df7472"


def assert_equal_to_published(ours: Path, theirs: Path) -> None:
    for split in ("train", "test"):
        for field in FIELDS:
            name = f"{split}/all__{field}.npy"
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        name = f"{split}/dataset.json"
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
    for name in ("identifiers.json", "test_puzzles.json"):
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())


@pytest.mark.skipif(PUBLISHED is None, reason="TRM_PUBLISHED does not give the folder of the published code")
@pytest.mark.parametrize("seed", [42, 7])
@pytest.mark.parametrize("edition", ["", "2"])
def test_the_published_builder_writes_the_same(tmp_path, source, edition, seed):
    files, subsets, tested = source, ALL, TESTED
    if OFFICIAL is not None:
        files, subsets, tested = (
            Path(OFFICIAL),
            (f"training{edition}", f"evaluation{edition}", "concept"),
            (f"evaluation{edition}",),
        )
    ours = build(tmp_path / "ours", files, subsets=subsets, test_subsets=tested, seed=seed)
    published.run(str(PUBLISHED), "arc", files / "arc-agi", tmp_path / "theirs", ",".join(subsets), tested[0], 0, seed)
    assert_equal_to_published(ours, tmp_path / "theirs")


@pytest.mark.skipif(OFFICIAL is None, reason="ARC_DATA does not give the folder of the official files")
@pytest.mark.parametrize(("edition", "counts"), [("", (400, 400, 160)), ("2", (1000, 120, 160))])
def test_the_official_puzzles_are_all_there(tmp_path, edition, counts):
    subsets = (f"training{edition}", f"evaluation{edition}", "concept")
    directory = build(tmp_path / "set", Path(str(OFFICIAL)), subsets=subsets, test_subsets=subsets[1:2])
    assert record(directory)["findings"]["puzzles"] == dict(zip(subsets, counts, strict=True))
    train, test = (load_split(directory, split) for split in ("train", "test"))
    assert (train.num_groups, test.num_groups) == (sum(counts), counts[1])
    assert len(set(identifiers(directory))) == 1 + sum(counts)


def test_every_augmentation_maps_back_to_its_original_and_none_repeats(tmp_path, source):
    directory = build(tmp_path / "set", source, num_aug=30)
    names = identifiers(directory)
    for split in ("train", "test"):
        puzzles = load_split(directory, split)
        facts = examples_by_name(puzzles, names)
        assert (np.diff(puzzles.group_indices) == 31).all()
        for group, start in enumerate(puzzles.group_indices[:-1]):
            of_group = puzzles.puzzle_identifiers[start : puzzles.group_indices[group + 1]]
            (original,) = set(parse_names([names[identifier] for identifier in of_group])[0])
            assert all(facts[names[identifier]] == facts[original] for identifier in of_group)
        for subset in ALL if split == "train" else TESTED:
            for puzzle in read_subset(source, subset).puzzles:
                kept = puzzle.examples if subset not in TESTED else puzzle.sections[split]
                assert facts[puzzle.name] == [(e.input.tolist(), e.output.tolist()) for e in kept]
    train = load_split(directory, "train")
    corner = np.concatenate([in_corner(train.inputs), in_corner(train.labels)], axis=1)
    for start, end in zip(train.group_indices[:-1], train.group_indices[1:], strict=True):
        copies = [
            tuple(sorted(row.tobytes() for row in corner[train.puzzle_indices[i] : train.puzzle_indices[i + 1]]))
            for i in range(start, end)
        ]
        assert len(set(copies)) == len(copies)


def test_a_test_solution_is_never_trained_on(tmp_path, source):
    directory = build(tmp_path / "set", source, num_aug=5)
    train = examples_by_name(load_split(directory, "train"), identifiers(directory))
    trained_on = {json.dumps(pair) for pairs in train.values() for pair in pairs}
    tested = [
        json.dumps([example.input.tolist(), example.output.tolist()])
        for puzzle in read_subset(source, "evaluation").puzzles
        for example in puzzle.sections["test"]
    ]
    assert tested and not trained_on & set(tested)
    puzzles = json.loads((directory / "test_puzzles.json").read_text())
    assert set(puzzles) == {f"evaluation{number}" for number in range(5)}
    assert sorted(json.dumps(list(pair.values())) for each in puzzles.values() for pair in each["test"]) == sorted(
        tested
    )


def test_grids_go_everywhere_they_fit_and_test_grids_stay(tmp_path, source):
    directory = build(tmp_path / "set", source, num_aug=30)
    test = load_split(directory, "test")
    assert (test.inputs == in_corner(test.inputs)).all()
    train = load_split(directory, "train")
    is_moved = (train.inputs != in_corner(train.inputs)).any(axis=1)
    # One example of every puzzle stays, and one that fills the canvas.
    assert 0.5 < is_moved.mean() < 1 - 1 / train.metadata.mean_puzzle_examples
    first = np.add.reduceat(~is_moved, train.puzzle_indices[:-1])
    assert (first >= 1).all()


def test_the_seed_decides_the_bytes_and_workers_and_other_puzzles_do_not(tmp_path, source):
    first = build(tmp_path / "first", source, num_aug=8, workers=1)
    hashes = {name: record(build(tmp_path / name, source, num_aug=8, **options))["content_sha256"]
              for name, options in {"again": {"workers": 5}, "other": {"seed": 6}}.items()}  # fmt: skip
    assert record(first)["content_sha256"] == hashes["again"] != hashes["other"]
    names = set(identifiers(first))
    assert set(identifiers(build(tmp_path / "fewer", source, num_aug=3))) < names
    assert set(identifiers(build(tmp_path / "part", source, num_aug=8, subsets=("evaluation",)))) < names


KILLED = """
import os, signal, sys
import train_jax.tasks.puzzles.arc.data as maker
from pathlib import Path
count, render = [0], maker.render
def render_some(*arguments):
    count[0] += 1
    if count[0] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return render(*arguments)
maker.render = render_some
maker.ArcData(sys.argv[2], output_dir=Path(sys.argv[1]), subsets=("training", "evaluation", "concept"),
              test_subsets=("evaluation",), num_aug=4, seed=5).build()
"""


def test_a_killed_build_leaves_nothing_and_starts_again(tmp_path, source):
    place_of = tmp_path / "set"
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, str(place_of), str(source)], cwd=root)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".set.building"]
    again = record(build(place_of, source, num_aug=4))["content_sha256"]
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    assert again == record(build(tmp_path / "never killed", source, num_aug=4))["content_sha256"]
