"""`trm build-data arc`: every puzzle accounted for, every augmentation undone exactly, no test solution trained on."""

import json
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
    test, train = load_split(directory, "test"), load_split(directory, "train")
    assert (test.inputs == in_corner(test.inputs)).all() and (train.inputs != in_corner(train.inputs)).any()
    corner = np.concatenate([in_corner(train.inputs), in_corner(train.labels)], axis=1)
    for start, end in zip(train.group_indices[:-1], train.group_indices[1:], strict=True):
        copies = [
            tuple(sorted(row.tobytes() for row in corner[train.puzzle_indices[i] : train.puzzle_indices[i + 1]]))
            for i in range(start, end)
        ]
        assert len(set(copies)) == len(copies)


def test_the_seed_decides_the_bytes_and_workers_and_other_puzzles_do_not(tmp_path, source):
    first = build(tmp_path / "first", source, num_aug=8, workers=1)
    hashes = {name: record(build(tmp_path / name, source, num_aug=8, **options))["content_sha256"]
              for name, options in {"again": {"workers": 5}, "other": {"seed": 6}}.items()}  # fmt: skip
    assert record(first)["content_sha256"] == hashes["again"] != hashes["other"]
    names = set(identifiers(first))
    assert set(identifiers(build(tmp_path / "fewer", source, num_aug=3))) < names
    assert set(identifiers(build(tmp_path / "part", source, num_aug=8, subsets=("evaluation",)))) < names
