"""`trm build-data arc`: every puzzle accounted for, every augmentation undone exactly, no test solution trained on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import OFFICIAL, PUBLISHED, SUBSETS, write_files, write_source

from benchmarks import published
from train_jax.errors import UserError
from train_jax.stages.build_data import ArcData, main
from train_jax.tasks.puzzles.arc.canvas import Places, place, placements, render
from train_jax.tasks.puzzles.arc.dataset import build_arc
from train_jax.tasks.puzzles.arc.grid import CELLS, UNKNOWN, Example, Puzzle, sizes_of
from train_jax.tasks.puzzles.arc.json import read_subset
from train_jax.tasks.puzzles.arc.symmetry import Symmetries, canonical, draw, invariant, names_of, parse_names, undo
from train_jax.tasks.puzzles.dihedral import turned
from train_jax.tasks.puzzles.format import FIELDS, PuzzleSet, load_split
from train_jax.tasks.puzzles.recipe import read_recipe

ALL = tuple(SUBSETS)
TESTED = ("evaluation",)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("arc") / "files")


def build(directory: Path, source: Path, **options) -> Path:
    chosen = {"subsets": ALL, "test_subsets": TESTED, "num_aug": 0, "seed": 5} | options
    assert build_arc(directory, source, **chosen)
    return directory


def record(directory: Path) -> dict:
    found = read_recipe(directory)
    assert found is not None
    return found


def identifiers(directory: Path) -> list[str]:
    return json.loads((directory / "identifiers.json").read_text())


def in_corner(tokens: np.ndarray) -> np.ndarray:
    """The canvases with their grids moved to the upper left corner."""
    canvases = tokens.reshape(-1, 30, 30)
    moved = np.zeros_like(canvases)
    for before, after in zip(canvases, moved, strict=True):
        rows, cols = np.nonzero(before >= 2)
        part = before[rows.min() :, cols.min() :]
        after[: part.shape[0], : part.shape[1]] = part
    return moved.reshape(-1, CELLS)


def originals(tokens: np.ndarray, names: list[str]) -> list[list]:
    """The grids behind the canvases, one name for each, every augmentation undone."""
    corner = in_corner(tokens)
    grids, rows, cols = undo(corner, *sizes_of(corner), parse_names(names)[1])
    return [grid.reshape(30, 30)[:r, :c].tolist() for grid, r, c in zip(grids, rows, cols, strict=True)]


def examples_by_name(puzzles: PuzzleSet, names: list[str]) -> dict[str, list[tuple[list, list]]]:
    """Puzzle name -> its examples as the grids of the original."""
    counts = np.diff(puzzles.puzzle_indices)
    of_example = [names[identifier] for identifier in np.repeat(puzzles.puzzle_identifiers, counts)]
    pairs = list(zip(originals(puzzles.inputs, of_example), originals(puzzles.labels, of_example), strict=True))
    starts = puzzles.puzzle_indices
    return {
        names[identifier]: pairs[starts[number] : starts[number + 1]]
        for number, identifier in enumerate(puzzles.puzzle_identifiers)
    }


def test_a_grid_lies_on_the_canvas_with_end_tokens_below_and_to_the_right():
    canvas = placements([np.array([[7, 0, 9], [1, 2, 3]], np.uint8)])[0, 30 - 1, 30 - 2]
    expected = np.zeros((30, 30), int)
    expected[1:4, 2:6] = [[9, 2, 11, 1], [3, 4, 5, 1], [1, 1, 1, 0]]
    assert (canvas == expected).all()
    in_the_last_corner = placements([np.array([[7, 0, 9], [1, 2, 3]], np.uint8)])[0, 30 - 28, 30 - 27]
    expected = np.zeros((30, 30), int)
    expected[28:, 27:] = [[9, 2, 11], [3, 4, 5]]
    assert (in_the_last_corner == expected).all()


TURNED = [
    [[1, 2, 3], [4, 5, 6]],
    [[3, 6], [2, 5], [1, 4]],
    [[6, 5, 4], [3, 2, 1]],
    [[4, 1], [5, 2], [6, 3]],
    [[3, 2, 1], [6, 5, 4]],
    [[4, 5, 6], [1, 2, 3]],
    [[1, 4], [2, 5], [3, 6]],
    [[6, 3], [5, 2], [4, 1]],
]
"""Counter-clockwise by quarters, left-right, up-down, along the main diagonal, along the other."""


@pytest.mark.parametrize("turn", range(8))
def test_the_turns_are_the_published_ones(turn):
    assert turned(np.array(TURNED[0], np.uint8), turn).tolist() == TURNED[turn]


def test_a_name_tells_the_symmetry_and_nothing_else_is_read_as_one():
    colours = np.array([np.arange(10), [0, 3, 1, 2, 9, 8, 7, 6, 5, 4]], np.uint8)
    symmetries = Symmetries(np.array([0, 6], np.uint8), colours)
    names = names_of("00576224", symmetries)
    assert names == ["00576224", "00576224|||t6|||0312987654"]
    found, again = parse_names(names)
    assert found == ["00576224"] * 2
    assert all((one == two).all() for one, two in zip(symmetries, again, strict=True))
    for bad in (
        "a|||t8|||0123456789",
        "a|||t1|||0123456788",
        "a|||t1|||012345678",
        "a|||b",
        "a|||t1|||x|||t1|||0123456789",
    ):
        with pytest.raises(UserError, match="is neither a name nor an augmented one"):
            parse_names([bad])


def test_the_largest_rectangle_of_colours_is_read():
    canvas = np.zeros((5, 30, 30), np.uint8)
    canvas[0, :3, :4] = 5
    canvas[0, 1, 3] = 1  # an end token where there should be a colour: three columns of three are more than four
    canvas[1, 2:, 3:] = 5  # nothing in the corner
    canvas[2] = 11
    canvas[3, :2, :2] = 4
    canvas[3, 0, :4] = 4  # as large as the square: the flatter one counts
    canvas[4, :2, :2] = 12  # no colour
    rows, cols = sizes_of(canvas.reshape(5, CELLS))
    assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == [(3, 3), (0, 0), (30, 30), (1, 4), (0, 0)]


def test_without_augmentations_the_arrays_are_the_published_ones(tmp_path, source):
    """The hash is that of what the published builder wrote for these files with this seed."""
    found = record(build(tmp_path / "set", source))
    assert found["content_sha256"] == GOLDEN
    assert found["findings"]["puzzles"] == SUBSETS


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
        found = examples_by_name(puzzles, names)
        assert (np.diff(puzzles.group_indices) == 31).all()
        for group, start in enumerate(puzzles.group_indices[:-1]):
            of_group = puzzles.puzzle_identifiers[start : puzzles.group_indices[group + 1]]
            (original,) = set(parse_names([names[identifier] for identifier in of_group])[0])
            assert all(found[names[identifier]] == found[original] for identifier in of_group)
        for subset in ALL if split == "train" else TESTED:
            for puzzle in read_subset(source, subset).puzzles:
                kept = puzzle.examples if subset not in TESTED else puzzle.sections[split]
                assert found[puzzle.name] == [(e.input.tolist(), e.output.tolist()) for e in kept]
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
    moved = (train.inputs != in_corner(train.inputs)).any(axis=1)
    # One example of every puzzle stays, and one that fills the canvas.
    assert 0.5 < moved.mean() < 1 - 1 / train.metadata.mean_puzzle_examples
    first = np.add.reduceat(~moved, train.puzzle_indices[:-1])
    assert (first >= 1).all()


def test_places_are_drawn_from_all_that_are_possible():
    """Input 1x2 and output 3x1 under turn 0 and turn 1: rows 0 to 27 and columns 0 to 28, or the other way round."""
    example = Example(np.zeros((1, 2), np.uint8), np.zeros((3, 1), np.uint8))
    turns = np.array([0, 1] * 20_000, np.uint8)
    places = place([example, example], turns, np.random.default_rng(0))
    moved = (places.top > 0) | (places.left > 0)
    assert moved.sum(axis=1).max() == 1
    for turn, ends in ((0, (27, 28)), (1, (28, 27))):
        for drawn, end in zip(places, ends, strict=True):
            counts = np.bincount(drawn[turns == turn][:, 0], minlength=end + 1)
            # Half of the time the other example is the one that moves.
            assert len(counts) == end + 1
            assert counts[1:].min() > 0.6 * 10_000 / (end + 1)
    tokens = render([example.input], Symmetries(turns[:4], np.tile(np.arange(10, dtype=np.uint8), (4, 1))), Places(
        np.full((4, 1), 27), np.full((4, 1), 28)))  # fmt: skip
    assert [tuple(np.argwhere(row.reshape(30, 30) == 2)[0]) for row in tokens] == [(27, 28)] * 4


def test_the_seed_decides_the_bytes_and_workers_and_other_puzzles_do_not(tmp_path, source):
    first = build(tmp_path / "first", source, num_aug=8, workers=1)
    hashes = {name: record(build(tmp_path / name, source, num_aug=8, **options))["content_sha256"]
              for name, options in {"again": {"workers": 5}, "other": {"seed": 6}}.items()}  # fmt: skip
    assert record(first)["content_sha256"] == hashes["again"] != hashes["other"]
    names = set(identifiers(first))
    assert set(identifiers(build(tmp_path / "fewer", source, num_aug=3))) < names
    assert set(identifiers(build(tmp_path / "part", source, num_aug=8, subsets=("evaluation",)))) < names


def only(grid: list[list[int]]) -> Puzzle:
    example = Example(np.array(grid, np.uint8), np.array(grid, np.uint8))
    return Puzzle("only", {"train": [example], "test": [example]})


@pytest.mark.parametrize(
    ("grid", "different"), [([[0]], 1), ([[4]], 9), ([[0, 3]], 4 * 9), ([[1, 0], [0, 0]], 4 * 9), ([[1, 2]], 2 * 9 * 8)]
)
def test_a_puzzle_that_looks_alike_gets_as_many_augmentations_as_there_are(grid, different):
    symmetries = draw(only(grid), 500, np.random.default_rng(0))
    assert len(symmetries.turns) == different
    assert symmetries.turns[0] == 0 and (symmetries.colours[0] == np.arange(10)).all()


def test_symmetries_are_drawn_uniformly():
    puzzle = Puzzle("p", {"train": [Example(np.arange(10, dtype=np.uint8).reshape(2, 5), np.zeros((1, 2), np.uint8))]})
    symmetries = draw(puzzle, 20_000, np.random.default_rng(0))
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
    key = canonical(example)
    assert key == canonical(Example(*(turned(palette[grid], 7) for grid in example)))
    assert key != canonical(Example(turned(palette[example.input], 7), turned(palette[example.output], 1)))
    assert key != canonical(Example(palette[example.input], example.output))
    assert key != canonical(Example(example.input, example.output.reshape(4, 3)))


def copied(folder: Path, source: Path, **subsets: str) -> Path:
    """Files of subsets under other names."""
    for subset, original in subsets.items():
        read = [
            json.loads((source / f"arc-agi_{original}_{kind}.json").read_text()) for kind in ("challenges", "solutions")
        ]
        write_files(folder, subset, *read)
    return folder


def test_a_tested_puzzle_in_a_subset_that_is_trained_on_is_refused(tmp_path, source):
    files = copied(tmp_path / "files", source, evaluation="evaluation", more="evaluation")
    message = "puzzle evaluation0 of the test subset evaluation is also in more, with its solutions; leave more out"
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
    asked = len(challenges["evaluation0"]["test"])
    assert found["test_examples_that_another_puzzle_trains_on"] == ["evaluation0 in x"] * asked


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
    questions = sum(len(p.sections["test"]) for each in read for p in each.puzzles if each.name != "evaluation")
    assert found["original_examples_left_out"] == questions > 0
    demonstrations = sum(len(puzzle.sections["train"]) for each in read for puzzle in each.puzzles)
    assert load_split(directory, "train").num_examples == demonstrations
    labels = load_split(directory, "test").labels
    assert ((labels == 2).sum(axis=1) == 1).all() and (labels[:, 0] == 2).all()


KILLED = """
import os, signal, sys
import train_jax.tasks.puzzles.arc.dataset as maker
from pathlib import Path
count, write = [0], maker.RowFile.write
def write_some(self, first_row, rows):
    count[0] += 1
    if count[0] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, first_row, rows)
maker.RowFile.write = write_some
maker.build_arc(Path(sys.argv[1]), sys.argv[2], subsets=("training", "evaluation", "concept"),
                test_subsets=("evaluation",), num_aug=4, seed=5)
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


def test_what_cannot_be_asked_for_is_said_and_nothing_is_written(tmp_path, source, monkeypatch):
    arc = {"output_dir": tmp_path / "set", "source": str(source), "num_aug": 2}
    for options, message in (
        ({"num_aug": -1}, "--num-aug -1: expected 0 to 999999"),
        ({"seed": 2**32}, "--seed 4294967296: expected 0 to 4294967295"),
        ({"test_subsets": ("concept2",)}, "--test-subsets concept2 is not among --subsets training evaluation concept"),
        ({"subsets": ("concept", "concept")}, "--subsets concept concept: expected different names"),
        ({"subsets": ("../x", "evaluation")}, "subset '../x' is not a name"),
        ({"subsets": ("concept", "nothing"), "test_subsets": ("concept",)}, "_nothing_challenges.json is missing"),
        ({"subsets": ("concept",), "output_dir": None}, "--subsets concept needs --output-dir"),
        ({"source": str(tmp_path / "none")}, "none_training_challenges.json is missing; give --source the folder"),
        ({"num_aug": 900_000}, "GB of (room|memory)"),
    ):
        with monkeypatch.context() as patched:
            if options == {"num_aug": 900_000}:
                options = {}
                patched.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
            with pytest.raises(UserError, match=message):
                main(ArcData(**(arc | options)))
    assert not list(tmp_path.iterdir())


def test_the_beginning_of_the_names_serves_as_source_where_a_folder_is_ambiguous(tmp_path, source):
    files = copied(tmp_path / "files", source, training="training", evaluation="evaluation", concept="concept")
    (files / "mine_training_challenges.json").write_text("{}")
    with pytest.raises(UserError, match=r"both arc-agi_training_.* and mine_training_.*/files/arc-agi$"):
        build(tmp_path / "set", files)
    build(tmp_path / "set", files / "arc-agi")


def test_the_command_line_builds_and_says_what_is_in_it(tmp_path, source):
    command = [sys.executable, "-m", "train_jax", "build-data", "arc", "--source", str(source), "--num-aug", "3"]
    where = ["--output-dir", str(tmp_path / "set")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    for expected in ("built in", "was already there"):
        shown = subprocess.run([*command, *where], capture_output=True, text=True, env=environment)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert f"{tmp_path / 'set'} {expected}" in shown.stdout
    assert "15 puzzles,          60 with augmentations,         236 examples" in shown.stdout
    assert "puzzles: training 6, evaluation 5, concept 4" in shown.stdout
    assert "test examples that another puzzle trains on: none" in shown.stdout
    assert f"sha256 {record(tmp_path / 'set')['content_sha256']}" in shown.stdout
    failed = subprocess.run([*command, *where, "--seed", "1"], capture_output=True, text=True, env=environment)
    assert (failed.returncode, failed.stdout, failed.stderr.count("\n")) == (2, "", 1)
    assert "another recipe (seed is 42, asked for 1)" in failed.stderr


def test_the_quick_invariant_is_one():
    rng = np.random.default_rng(1)
    for _ in range(20):
        example = Example(*(rng.integers(0, 10, rng.integers(1, 5, 2), dtype=np.uint8) for _ in range(2)))
        palette = np.concatenate([[0], 1 + rng.permutation(9)]).astype(np.uint8)
        for turn in range(8):
            assert invariant(example) == invariant(Example(*(turned(palette[grid], turn) for grid in example)))
        assert invariant(example) != invariant(Example(example.input, np.vstack([example.output, example.output])))
