"""`trm build-data maze`: generated data sets, and the options that are refused."""

from pathlib import Path

import numpy as np
import pytest
from support.records import record_of

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.stages.build_data import MazeData, main
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.maze import generator as maze_generator
from train_jax.tasks.puzzles.maze.grid import are_shortest_paths, fingerprints, search
from train_jax.tasks.puzzles.maze.kind import MazeKind

SIZE = 8


@pytest.mark.parametrize("kind", ["corridors", "perfect", "walls"])
def test_a_generated_set_is_whole_and_its_splits_share_no_maze(tmp_path, kind, capsys):
    sizes = ["--size", str(SIZE), "--num-train", "60", "--num-test", "30", "--augment"]
    assert trm(["build-data", "maze", "--kind", kind, *sizes, "--output-dir", str(tmp_path / "set")]) == 0
    train, test = (load_split(tmp_path / "set", split) for split in ("train", "test"))
    assert (train.num_groups, train.num_examples, test.num_groups, test.num_examples) == (60, 480, 30, 30)
    for split in (train, test):
        assert (split.metadata.vocab_size, split.metadata.seq_len, split.metadata.ignore_label_id) == (6, 64, 0)
        assert split.kind == MazeKind(SIZE)
        found = search(split.inputs)
        assert are_shortest_paths(split.inputs, split.labels, found).all()
        assert found.steps.min() > 22
        assert found.unique.all() == (kind != "walls")
    marks = fingerprints(train.inputs).reshape(60, 8)
    assert (marks == marks[:, :1]).all()
    assert len(np.unique(marks)) == 60
    assert len(np.unique(train.inputs, axis=0)) == 480
    assert not np.isin(fingerprints(test.inputs), marks).any()
    assert "60 puzzles,         480 examples" in capsys.readouterr().out
    findings = record_of(tmp_path / "set")["findings"]
    assert findings["test_puzzles_equivalent_to_a_train_puzzle"] == 0
    assert (findings["test_mazes_with_several_shortest_paths"] == 0) == (kind != "walls")


def test_the_seed_decides_the_bytes_and_augmentation_adds_to_the_same_mazes(tmp_path):
    def build(name: str, **options) -> Path:
        main(MazeData(output_dir=tmp_path / name, size=SIZE, num_train=20, num_test=5, **options))
        return tmp_path / name

    first = build("first", augment=True)
    assert record_of(first)["content_sha256"] == record_of(build("again", augment=True))["content_sha256"]
    assert record_of(first)["content_sha256"] != record_of(build("other", augment=True, seed=1))["content_sha256"]
    plain = load_split(build("plain"), "train")
    assert (load_split(first, "train").inputs[::8] == plain.inputs).all()


def test_a_wrong_generator_is_found_out_and_nothing_is_written(tmp_path, monkeypatch):
    honest = maze_generator.between_far_ends

    def unsolved(*arguments, **options):
        mazes, longest = honest(*arguments, **options)
        return maze_generator.Mazes(mazes.inputs, mazes.inputs), longest

    wrong = {"between_far_ends": unsolved, "reached_one_way": lambda wave, before, one_way: wave}
    for name, function in wrong.items():
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="does not confirm the solution"):
            patched.setattr(maze_generator, name, function)
            main(MazeData(output_dir=tmp_path / "set", size=SIZE, min_path=8, num_train=60, num_test=30))
    assert not any(tmp_path.iterdir())


def test_options_that_contradict_each_other_are_refused(tmp_path):
    for config, message in (
        (MazeData(size=3), "--size is 3; use at least 4"),
        (MazeData(size=51), "--size is 51; use at most 50"),
        (MazeData(num_train=0), "--num-train is 0; use at least 1"),
        (MazeData(min_path=-1), "--min-path is -1; use at least 0"),
        (MazeData(seed=-1), "--seed is -1; use at least 0"),
        (MazeData(size=9, max_path=5), "--max-path 5: shortest paths have more than 25 steps"),
        (MazeData(source="x", max_path=5), "--max-path 5 does not go with --source"),
        (MazeData(subsample_size=5), "--subsample-size 5 needs --source"),
        (MazeData(source="x/y", num_train=5), "--num-train 5 does not go with --source"),
        (MazeData(source="x/y", kind="walls"), "--kind walls does not go with --source"),
        (MazeData(source=str(tmp_path)), "train.csv is missing"),
    ):
        with pytest.raises(UserError, match=message):
            main(config)
    assert not any(tmp_path.iterdir())
