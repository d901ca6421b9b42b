"""`trm build-data arc`: puzzles are accounted for, augmentations undone exactly, test solutions never trained on."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import OFFICIAL, PUBLISHED, SUBSETS, random_grid, random_puzzle, write_files, write_source
from support.arc_sets import ALL, TESTED, build, copied, examples_by_name, identifiers, in_corner, read_files
from support.puzzle_sets import record_of

from tests.references import published
from train_jax.cli.build_data import main
from train_jax.errors import UserError
from train_jax.puzzles.arc import grid as arc_grid
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.arc.grid import UNKNOWN, Example, Symmetries, parse_names
from train_jax.puzzles.arc.json import read_subset
from train_jax.puzzles.format import load_split
from train_jax.puzzles.inspection import inspect
from train_jax.puzzles.metadata import FIELDS
from train_jax.puzzles.symmetries import turned


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("arc") / "files")


def test_without_augmentations_the_arrays_are_the_published_ones(tmp_path, source):
    """The hash is that of the arrays that the published builder wrote for these files with this seed."""
    facts = record_of(build(tmp_path / "set", source))
    assert facts["content_sha256"] == "bbd634b14a8d3e9eaefc87b097f098f11ca115c51b4c7cd6172c8d9b93df7472"
    assert facts["findings"]["puzzles"] == SUBSETS


@pytest.mark.skipif(PUBLISHED is None, reason="TRM_PUBLISHED does not give the folder of the published code")
@pytest.mark.parametrize("seed", [42, 7])
@pytest.mark.parametrize("edition", ["", "2"])
def test_the_published_builder_writes_the_same(tmp_path, source, edition, seed):
    files = source
    subsets = ALL
    tested = TESTED
    if OFFICIAL is not None:
        files = Path(OFFICIAL)
        tested = (f"evaluation{edition}",)
        subsets = (f"training{edition}", *tested, "concept")
    ours = build(tmp_path / "ours", files, subsets=subsets, test_subsets=tested, seed=seed)
    published.run(str(PUBLISHED), "arc", files / "arc-agi", tmp_path / "theirs", ",".join(subsets), tested[0], 0, seed)
    for split in ("train", "test"):
        for name in (f"{split}/all__{field}.npy" for field in FIELDS):
            assert (ours / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    for name in ("train/dataset.json", "test/dataset.json", "identifiers.json", "test_puzzles.json"):
        assert json.loads((ours / name).read_text()) == json.loads((tmp_path / "theirs" / name).read_text())


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
    test = load_split(directory, "test")
    train = load_split(directory, "train")
    assert (test.inputs == in_corner(test.inputs)).all() and (train.inputs != in_corner(train.inputs)).any()
    corner = np.concatenate([in_corner(train.inputs), in_corner(train.labels)], axis=1)
    for start, end in zip(train.group_indices[:-1], train.group_indices[1:], strict=True):
        copies = [
            tuple(sorted(row.tobytes() for row in corner[train.puzzle_indices[i] : train.puzzle_indices[i + 1]]))
            for i in range(start, end)
        ]
        assert len(set(copies)) == len(copies)


def test_the_seed_decides_the_bytes_and_workers_and_other_puzzles_do_not(tmp_path, source):
    made = {"first": {"workers": 1}, "again": {"workers": 5}, "other": {"seed": 6}}
    sets = [build(tmp_path / name, source, num_aug=8, **options) for name, options in made.items()]
    hashes = [record_of(directory)["content_sha256"] for directory in sets]
    assert hashes[0] == hashes[1] != hashes[2]
    names = set(identifiers(sets[0]))
    assert set(identifiers(build(tmp_path / "fewer", source, num_aug=3))) < names
    assert set(identifiers(build(tmp_path / "part", source, num_aug=8, subsets=("evaluation",)))) < names


# ---- subsets


def test_a_puzzle_of_several_subsets_is_taken_once_and_never_tested_and_trained_on(tmp_path, source):
    subsets = {"evaluation": "evaluation", "more": "evaluation", "training": "training", "again": "training"}
    files = copied(tmp_path / "files", source, **subsets)
    message = "puzzle evaluation0 of the test subset evaluation is also in more, whose solutions are trained"
    for both in (("evaluation", "more"), ("more", "evaluation")):
        with pytest.raises(UserError, match=message):
            build(tmp_path / "set", files, subsets=both)
    assert not (tmp_path / "set").exists()
    directory = build(tmp_path / "set", files, subsets=("training", "again", "evaluation"))
    key = "puzzles_left_out_because_another_subset_has_them"
    assert record_of(directory)["findings"][key] == SUBSETS["training"]
    names = identifiers(directory)
    assert len(set(names)) == len(names) == 1 + SUBSETS["training"] + SUBSETS["evaluation"]


def test_a_test_example_that_a_puzzle_of_another_name_trains_on_is_reported(tmp_path, source):
    files = copied(tmp_path / "files", source, evaluation="evaluation")
    challenges, solutions = read_files(source, "evaluation")
    write_files(files, "other", {"x": challenges["evaluation0"]}, {"x": solutions["evaluation0"]})
    found = record_of(build(tmp_path / "set", files, subsets=("evaluation", "other")))["findings"]
    num_tested = len(challenges["evaluation0"]["test"])
    assert found["test_examples_that_another_puzzle_trains_on"] == ["evaluation0 in x"] * num_tested


def test_without_solutions_questions_are_asked_and_never_trained_on(tmp_path, source):
    for subset in ALL:
        write_files(tmp_path / "files", subset, read_files(source, subset)[0], None)
    read = [read_subset(tmp_path / "files", subset) for subset in ALL]
    asked = [example for each in read for puzzle in each.puzzles for example in puzzle.sections["test"]]
    assert all(example.output is UNKNOWN for example in asked)
    directory = build(tmp_path / "set", tmp_path / "files")
    found = record_of(directory)["findings"]
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
    # A black cell is a solution where a puzzle has another one.
    puzzles, solutions = read_files(source, "evaluation")
    write_files(tmp_path / "black", "x", puzzles, solutions | {"evaluation0": [[[0]]] * len(solutions["evaluation0"])})
    black = build(tmp_path / "other", tmp_path / "black", subsets=("x",), test_subsets=("x",))
    assert (load_split(black, "test").labels != 0).any(axis=1).all()


def test_one_file_for_each_task_is_the_same_data_set(tmp_path, source):
    """The repository of ARC-AGI has such files; the order of their creation does not matter."""
    for subset in ALL:
        challenges, solutions = read_files(source, subset)
        (tmp_path / "data" / subset).mkdir(parents=True)
        for name, puzzle in challenges.items():
            test = [{**one, "output": grid} for one, grid in zip(puzzle["test"], solutions[name], strict=True)]
            (tmp_path / "data" / subset / f"{name}.json").write_text(json.dumps(puzzle | {"test": test}))
    ours = build(tmp_path / "ours", tmp_path / "data")
    official = build(tmp_path / "official", source)
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
    assert identifiers(directory)[1] == "0a" and record_of(directory)["findings"]["puzzles"]["tasks"] == 1
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
    # The beginning of the names serves as source where a folder is ambiguous.
    files = copied(tmp_path / "files", source, training="training", evaluation="evaluation", concept="concept")
    (files / "mine_training_challenges.json").write_text("{}")
    with pytest.raises(UserError, match=r"both arc-agi_training_.* and mine_training_.*/files/arc-agi$"):
        build(tmp_path / "set", files)
    build(tmp_path / "set", files / "arc-agi")


# ---- grids on the canvas and their symmetries


def test_a_grid_lies_on_the_canvas_with_end_tokens_below_and_to_the_right():
    canvases = arc_grid.placements([np.array([[7, 0, 9], [1, 2, 3]], np.uint8)])[0]
    inside, in_the_last_corner = np.zeros((2, 30, 30), int)
    inside[1:4, 2:6] = [[9, 2, 11, 1], [3, 4, 5, 1], [1, 1, 1, 0]]
    in_the_last_corner[28:, 27:] = [[9, 2, 11], [3, 4, 5]]
    assert (canvases[30 - 1, 30 - 2] == inside).all()
    assert (canvases[30 - 28, 30 - 27] == in_the_last_corner).all()


def test_a_name_tells_the_symmetry_and_nothing_else_is_read_as_one():
    colours = np.array([np.arange(10), [0, 3, 1, 2, 9, 8, 7, 6, 5, 4]], np.uint8)
    symmetries = Symmetries(np.array([0, 6], np.uint8), colours)
    names = arc_grid.names_of("00576224", symmetries)
    assert names == ["00576224", "00576224|||t6|||0312987654"]
    found, again = parse_names(names)
    assert found == ["00576224"] * 2
    assert all((one == two).all() for one, two in zip(symmetries, again, strict=True))
    endings = ("t8|||0123456789", "t1|||0123456788", "t1|||012345678", "b", "t1|||x|||t1|||0123456789")
    for bad in (f"a|||{ending}" for ending in endings):
        with pytest.raises(UserError, match="is invalid, expected NAME or NAME"):
            parse_names([bad])


def test_the_largest_rectangle_of_colours_is_read():
    canvas = np.zeros((5, 30, 30), np.uint8)
    canvas[0, :3, :4] = 5
    canvas[0, 1, 3] = 1  # an end token where there should be a colour: three columns of three are more than four
    canvas[1, 2:, 3:] = 5  # nothing in the corner
    canvas[2] = 11
    canvas[3, :2, :2] = 4
    canvas[3, 0, :4] = 4  # as large as the square; the flatter of the two counts
    canvas[4, :2, :2] = 12  # no colour
    rows, cols = arc_grid.sizes_of(canvas.reshape(5, arc_grid.CELLS))
    assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == [(3, 3), (0, 0), (30, 30), (1, 4), (0, 0)]


def test_places_are_drawn_from_all_that_are_possible():
    """Input 1x2 and output 3x1 under turn 0 and turn 1: rows 0 to 27 and columns 0 to 28, or the other way round."""
    example = Example(np.zeros((1, 2), np.uint8), np.zeros((3, 1), np.uint8))
    turns = np.array([0, 1] * 20_000, np.uint8)
    places = arc_grid.place([example, example], turns, np.random.default_rng(0))
    is_moved = (places.top > 0) | (places.left > 0)
    assert is_moved.sum(axis=1).max() == 1
    for turn, ends in ((0, (27, 28)), (1, (28, 27))):
        for offsets, end in zip(places, ends, strict=True):
            counts = np.bincount(offsets[turns == turn][:, 0], minlength=end + 1)
            # Half of the time the other example is the one that moves.
            assert len(counts) == end + 1
            assert counts[1:].min() > 0.6 * 10_000 / (end + 1)
    symmetries = Symmetries(turns[:4], np.tile(np.arange(10, dtype=np.uint8), (4, 1)))
    tokens = arc_grid.render([example.input], symmetries, arc_grid.Places(np.full((4, 1), 27), np.full((4, 1), 28)))
    assert [tuple(np.argwhere(row.reshape(30, 30) == 2)[0]) for row in tokens] == [(27, 28)] * 4


@pytest.mark.parametrize(
    ("grid", "different"), [([[0]], 1), ([[4]], 9), ([[0, 3]], 4 * 9), ([[1, 0], [0, 0]], 4 * 9), ([[1, 2]], 2 * 9 * 8)]
)
def test_a_puzzle_that_looks_alike_gets_as_many_augmentations_as_there_are(grid, different):
    example = Example(np.array(grid, np.uint8), np.array(grid, np.uint8))
    symmetries = arc_grid.draw(arc_grid.Puzzle("only", {"train": [example]}), 500, np.random.default_rng(0))
    assert len(symmetries.turns) == different
    assert symmetries.turns[0] == 0 and (symmetries.colours[0] == np.arange(10)).all()


def test_symmetries_are_drawn_uniformly():
    puzzle = arc_grid.Puzzle(
        "p", {"train": [Example(np.arange(10, dtype=np.uint8).reshape(2, 5), np.zeros((1, 2), np.uint8))]}
    )
    symmetries = arc_grid.draw(puzzle, 20_000, np.random.default_rng(0))
    assert len(symmetries.turns) == 20_001
    assert np.bincount(symmetries.turns[1:]).min() > 0.9 * 20_000 / 8
    assert (symmetries.colours[:, 0] == 0).all()
    for colour in range(1, 10):
        counts = np.bincount(symmetries.colours[1:, colour], minlength=10)
        assert counts[0] == 0 and counts[1:].min() > 0.9 * 20_000 / 9


def test_examples_that_a_symmetry_relates_are_known_as_the_same():
    rng = np.random.default_rng(0)
    example = Example(*(rng.integers(0, 10, (3, 4), dtype=np.uint8) for _ in range(2)))
    palette = np.array([0, 2, 1, 4, 3, 5, 9, 8, 7, 6], np.uint8)
    key = arc_grid.canonical(example)
    assert key == arc_grid.canonical(Example(*(turned(palette[grid], 7) for grid in example)))
    assert key != arc_grid.canonical(Example(turned(palette[example.input], 7), turned(palette[example.output], 1)))
    assert key != arc_grid.canonical(Example(palette[example.input], example.output))
    assert key != arc_grid.canonical(Example(example.input, example.output.reshape(4, 3)))
    for _ in range(20):
        example = Example(*(rng.integers(0, 10, rng.integers(1, 5, 2), dtype=np.uint8) for _ in range(2)))
        for turn in range(8):
            assert arc_grid.invariant(example) == arc_grid.invariant(
                Example(*(turned(palette[grid], turn) for grid in example))
            )
        assert arc_grid.invariant(example) != arc_grid.invariant(
            Example(example.input, np.vstack([example.output, example.output]))
        )
