"""`trm build-data arc`: which puzzles are tested and which are trained on, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import SUBSETS, random_grid, random_puzzle, write_files, write_source
from support.arc_sets import ALL, build, copied, identifiers, record

from train_jax.errors import UserError
from train_jax.stages.build_data import ArcData, main
from train_jax.tasks.puzzles.arc.grid import UNKNOWN
from train_jax.tasks.puzzles.arc.json import read_subset
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.inspection import inspect


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("arc") / "files")


def test_a_tested_puzzle_in_a_subset_that_is_trained_on_is_refused(tmp_path, source):
    files = copied(tmp_path / "files", source, evaluation="evaluation", more="evaluation")
    message = "puzzle evaluation0 of the test subset evaluation is also in more, whose solutions are trained"
    for subsets in (("evaluation", "more"), ("more", "evaluation")):
        with pytest.raises(UserError, match=message):
            build(tmp_path / "set", files, subsets=subsets)
    assert not (tmp_path / "set").exists()


def test_a_test_example_that_a_puzzle_of_another_name_trains_on_is_reported(tmp_path, source):
    files = copied(tmp_path / "files", source, evaluation="evaluation")
    challenges = json.loads((files / "arc-agi_evaluation_challenges.json").read_text())
    solutions = json.loads((files / "arc-agi_evaluation_solutions.json").read_text())
    write_files(files, "other", {"x": challenges["evaluation0"]}, {"x": solutions["evaluation0"]})
    found = record(build(tmp_path / "set", files, subsets=("evaluation", "other")))["findings"]
    num_tested = len(challenges["evaluation0"]["test"])
    assert found["test_examples_that_another_puzzle_trains_on"] == ["evaluation0 in x"] * num_tested


def test_a_puzzle_of_two_trained_subsets_is_taken_once(tmp_path, source):
    files = copied(tmp_path / "files", source, evaluation="evaluation", training="training", again="training")
    directory = build(tmp_path / "set", files, subsets=("training", "again", "evaluation"))
    key = "puzzles_left_out_because_another_subset_has_them"
    assert record(directory)["findings"][key] == SUBSETS["training"]
    names = identifiers(directory)
    assert len(set(names)) == len(names) == 1 + SUBSETS["training"] + SUBSETS["evaluation"]


def test_without_solutions_questions_are_asked_and_never_trained_on(tmp_path, source):
    for subset in ALL:
        write_files(
            tmp_path / "files", subset, json.loads((source / f"arc-agi_{subset}_challenges.json").read_text()), None
        )
    read = [read_subset(tmp_path / "files", subset) for subset in ALL]
    assert all(
        example.output is UNKNOWN for each in read for puzzle in each.puzzles for example in puzzle.sections["test"]
    )
    directory = build(tmp_path / "set", tmp_path / "files")
    found = record(directory)["findings"]
    assert found["test_examples_without_a_solution"] == found["original_examples"]["test"] > 0
    left_out = sum(len(p.sections["test"]) for each in read for p in each.puzzles if each.name != "evaluation")
    assert found["original_examples_left_out"] == left_out > 0
    demonstrations = sum(len(puzzle.sections["train"]) for each in read for puzzle in each.puzzles)
    assert load_split(directory, "train").num_examples == demonstrations
    labels = np.load(directory / "test" / "all__labels.npy")
    assert ((labels == 2).sum(axis=1) == 1).all() and (labels[:, 0] == 2).all()
    puzzles = load_split(directory, "test")
    assert puzzles.labels.shape == labels.shape and (puzzles.labels == puzzles.metadata.ignore_label_id).all()
    assert inspect(directory, lambda *_: None)["data set"]["content"] == "as it was written (SHA-256)"


def test_a_black_cell_is_a_solution_beside_others(tmp_path, source):
    rng = np.random.RandomState(0)
    puzzles = {name: random_puzzle(rng) for name in ("a", "b")}
    solutions = {name: [[[0]] for _ in grids] if name == "a" else grids for name, (_, grids) in puzzles.items()}
    write_files(tmp_path / "files", "x", {name: puzzle for name, (puzzle, _) in puzzles.items()}, solutions)
    labels = load_split(build(tmp_path / "set", tmp_path / "files", subsets=("x",), test_subsets=("x",)), "test").labels
    assert (labels != 0).any(axis=1).all()


def as_one_file_for_each_task(folder, source, subset):
    challenges, solutions = (
        json.loads((source / f"arc-agi_{subset}_{part}.json").read_text()) for part in ("challenges", "solutions")
    )
    (folder / subset).mkdir(parents=True)
    for name, puzzle in challenges.items():
        test = [{**one, "output": grid} for one, grid in zip(puzzle["test"], solutions[name], strict=True)]
        (folder / subset / f"{name}.json").write_text(json.dumps(puzzle | {"test": test}))


def test_one_file_for_each_task_is_the_same_data_set(tmp_path, source):
    """The repository of ARC-AGI has such files; the order of their creation does not matter."""
    for subset in ALL:
        as_one_file_for_each_task(tmp_path / "data", source, subset)
    ours, official = build(tmp_path / "ours", tmp_path / "data"), build(tmp_path / "official", source)
    for split in ("train", "test"):
        for array in ("inputs", "labels"):
            name = f"{split}/all__{array}.npy"
            assert (ours / name).read_bytes() == (official / name).read_bytes()
    options = {"subsets": ALL, "test_subsets": ("evaluation",), "num_aug": 0, "seed": 5}
    again = ArcData(str(tmp_path / "data"), output_dir=ours, **options)
    assert not again.build()
    (tmp_path / "data" / "concept" / "concept1.json").unlink()
    with pytest.raises(UserError, match="contains a data set with other options"):
        again.build()


def test_a_list_of_examples_is_a_task_to_train_on(tmp_path):
    rng = np.random.RandomState(0)
    write_files(tmp_path / "data", "evaluation", *({"a": part} for part in random_puzzle(rng)))
    examples = [{"input": random_grid(rng), "output": random_grid(rng)} for _ in range(7)]
    (tmp_path / "data" / "tasks").mkdir()
    (tmp_path / "data" / "tasks" / "0a.json").write_text(json.dumps(examples))
    directory = build(tmp_path / "set", tmp_path / "data", subsets=("tasks", "evaluation"))
    assert identifiers(directory)[1] == "0a" and record(directory)["findings"]["puzzles"]["tasks"] == 1
    with pytest.raises(UserError, match="puzzle 0a of the test subset tasks is a list of examples"):
        build(tmp_path / "other", tmp_path / "data", subsets=("tasks",), test_subsets=("tasks",))
    (tmp_path / "data" / "tasks" / "0a.json").write_text("[]")
    with pytest.raises(UserError, match="puzzle 0a: train is an empty list"):
        build(tmp_path / "other", tmp_path / "data", subsets=("tasks", "evaluation"))


def test_wrong_options_are_named_and_nothing_is_written(tmp_path, source):
    arc = {"output_dir": tmp_path / "set", "source": str(source), "num_aug": 2}
    for options, message in (
        ({"num_aug": -1}, "--num-aug is -1; use at least 0"),
        ({"seed": 2**32}, "--seed is 4294967296; use at most 4294967295"),
        ({"test_subsets": ("concept2",)}, "--test-subsets concept2 is not among --subsets training evaluation concept"),
        ({"subsets": ("concept", "concept")}, "--subsets concept concept: expected at least one name, each once"),
        ({"subsets": ("../x", "evaluation")}, "subset '../x' is not a valid name"),
        ({"subsets": ("concept", "nothing"), "test_subsets": ("concept",)}, "_nothing_challenges.json is missing"),
        ({"subsets": ("concept",), "output_dir": None}, "--subsets concept needs --output-dir"),
        ({"source": str(tmp_path / "none")}, "none_training_challenges.json is missing; set --source to the folder"),
    ):
        with pytest.raises(UserError, match=message):
            main(ArcData(**(arc | options)))
    assert not list(tmp_path.iterdir())


def test_the_beginning_of_the_names_serves_as_source_where_a_folder_is_ambiguous(tmp_path, source):
    files = copied(tmp_path / "files", source, training="training", evaluation="evaluation", concept="concept")
    (files / "mine_training_challenges.json").write_text("{}")
    with pytest.raises(UserError, match=r"both arc-agi_training_.* and mine_training_.*/files/arc-agi$"):
        build(tmp_path / "set", files)
    build(tmp_path / "set", files / "arc-agi")
