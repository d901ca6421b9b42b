"""`trm build-data maze`: generated and public mazes end as data sets, a mistake ends as one line and status 2."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import PUBLISHED

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.stages.build_data import MazeData, main
from train_jax.tasks.puzzles import tables
from train_jax.tasks.puzzles.format import FIELDS, load_split
from train_jax.tasks.puzzles.maze import dataset as maze_dataset
from train_jax.tasks.puzzles.maze import generator as maze_generator
from train_jax.tasks.puzzles.maze.check import are_shortest_paths, search
from train_jax.tasks.puzzles.maze.generator import generate
from train_jax.tasks.puzzles.maze.grid import GOAL, OPEN, PATH, START, text_of
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.maze.symmetry import fingerprints
from train_jax.tasks.puzzles.recipe import read_recipe

SIZE = 8


def record_of(directory: Path) -> dict:
    record = read_recipe(directory)
    assert record is not None
    return record


@pytest.mark.parametrize("kind", ["corridors", "walls"])
def test_a_generated_set_is_whole_and_its_splits_share_no_maze(tmp_path, kind, capsys):
    main(MazeData(output_dir=tmp_path / "set", size=SIZE, kind=kind, num_train=60, num_test=30, augment=True))
    train, test = (load_split(tmp_path / "set", split) for split in ("train", "test"))
    assert (train.num_groups, train.num_examples, test.num_groups, test.num_examples) == (60, 480, 30, 30)
    for split in (train, test):
        assert (split.metadata.vocab_size, split.metadata.seq_len, split.metadata.ignore_label_id) == (6, 64, 0)
        assert split.kind == MazeKind(SIZE)
        found = search(split.inputs)
        assert are_shortest_paths(split.inputs, split.labels, found).all()
        assert found.steps.min() > 22
        assert found.unique.all() == (kind == "corridors")
    marks = fingerprints(train.inputs).reshape(60, 8)
    assert (marks == marks[:, :1]).all()
    assert len(np.unique(marks)) == 60
    assert len(np.unique(train.inputs, axis=0)) == 480
    assert not np.isin(fingerprints(test.inputs), marks).any()
    assert "60 puzzles,         480 examples" in capsys.readouterr().out
    findings = record_of(tmp_path / "set")["findings"]
    assert findings["test_puzzles_equivalent_to_a_train_puzzle"] == 0
    assert (findings["test_mazes_with_several_shortest_paths"] == 0) == (kind == "corridors")


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


@pytest.fixture(scope="module")
def public_rows() -> list[str]:
    mazes = generate(30, SIZE, 18, "walls", np.random.default_rng(0), lambda *_: None)
    texts = [[text_of(maze).replace("\n", "") for maze in array] for array in mazes]
    return [f",{question},{answer},{i}" for i, (question, answer) in enumerate(zip(*texts, strict=True))]


def write_tables(folder: Path, train: list[str], test: list[str]) -> Path:
    folder.mkdir()
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.csv").write_text("\n".join(["source,question,answer,rating", *rows]) + "\n", "latin-1")
    return folder


def turned_row(row: str, turn: int = 1) -> str:
    columns = row.split(",")
    for column in (1, 2):
        grid = np.rot90(np.array(list(columns[column])).reshape(SIZE, SIZE), turn)
        columns[column] = "".join(grid.ravel())
    return ",".join(columns)


def test_public_tables_are_converted_as_they_are(tmp_path, public_rows):
    folder = write_tables(tmp_path / "csv", public_rows[:20], [*public_rows[20:], turned_row(public_rows[3])])
    for number, source in enumerate((folder, folder / "test.csv")):
        directory = tmp_path / f"set{number}"
        main(MazeData(output_dir=directory, source=str(source)))
        for split, rows in (("train", public_rows[:20]), ("test", public_rows[20:])):
            puzzles = load_split(directory, split)
            for field, column in (("inputs", 1), ("labels", 2)):
                texts = [text_of(maze).replace("\n", "") for maze in getattr(puzzles, field)]
                assert texts[: len(rows)] == [row.split(",")[column] for row in rows]
        findings = record_of(directory)["findings"]
        assert findings["test_puzzles_equivalent_to_a_train_puzzle"] == 1
        assert findings["train_puzzles_equivalent_to_another"] == 0
        assert findings["train_mazes_with_several_shortest_paths"] > 0


def test_min_path_filters_both_tables_and_the_subsample_only_train(tmp_path, public_rows):
    folder = write_tables(tmp_path / "csv", public_rows, public_rows)
    lengths = [row.split(",")[2].count("o") + 1 for row in public_rows]
    bound = sorted(lengths)[20]
    longer = sum(length > bound for length in lengths)
    assert 0 < longer < 30
    options = MazeData(output_dir=tmp_path / "set", source=str(folder), min_path=bound, subsample_size=2)
    main(options)
    assert load_split(tmp_path / "set", "train").num_groups == 2
    assert load_split(tmp_path / "set", "test").num_groups == longer
    for changes, message in (
        ({"subsample_size": 31, "min_path": None}, "--subsample-size 31 of 30 train puzzles"),
        ({"min_path": 99}, "train.csv has no maze whose path has more than 99 steps; use a lower --min-path"),
    ):
        with pytest.raises(UserError, match=message):
            main(MazeData(**{**vars(options), "output_dir": tmp_path / "other", **changes}))
    assert not (tmp_path / "other").exists()


def broken(row: str, column: int, change) -> str:
    columns = row.split(",")
    columns[column] = change(columns[column])
    return ",".join(columns)


def walled_in(row: str) -> str:
    """Walls all around the goal, in question and answer."""
    for column in (1, 2):
        grid = np.array(list(row.split(",")[column])).reshape(SIZE, SIZE)
        ((goal_row, goal_col),) = np.argwhere(grid == "G")
        near = grid[max(goal_row - 1, 0) : goal_row + 2, max(goal_col - 1, 0) : goal_col + 2]
        near[near != "G"] = "#"
        row = broken(row, column, lambda _, grid=grid: "".join(grid.ravel()))
    return row


def detour(row: str) -> str:
    """One more cell marked than the path has."""
    question, answer = row.split(",")[1:3]
    cell = next(i for i, pair in enumerate(zip(question, answer, strict=True)) if pair == (" ", " "))
    return broken(row, 2, lambda text: text[:cell] + "o" + text[cell + 1 :])


BAD_ROWS = [
    (lambda row: broken(row, 1, lambda text: text[:-1]), "the question has 63 cells, expected 64"),
    (lambda row: broken(row, 2, lambda text: text + " "), "the answer has 65 cells, expected 64"),
    (lambda row: broken(row, 1, lambda text: text.replace("S", "x")), "the question is not made of"),
    (lambda row: broken(row, 1, lambda text: text.replace("S", "\xff")), "the question is not made of"),
    (lambda row: broken(row, 1, lambda text: text.replace("S", "#")), "the question is not made of"),
    (lambda row: broken(row, 1, lambda text: text.replace("#", "G", 1)), "the question is not made of"),
    (lambda row: broken(row, 1, lambda text: text.replace(" ", "o", 1)), "the question is not made of"),
    (lambda row: broken(row, 2, lambda text: text.replace("#", " ", 1)), "the answer is not the question with some"),
    (lambda row: broken(row, 2, lambda text: text.replace("o", "x", 1)), "the answer is not the question with some"),
    (lambda row: broken(row, 2, lambda text: text.replace("o", " ", 1)), "the answer is not a shortest path"),
    (detour, "the answer is not a shortest path"),
    (walled_in, "the goal cannot be reached"),
    (lambda row: row + ",1", "5 columns, expected 4"),
    (lambda row: "", "0 columns, expected 4"),
    (lambda row: '"' + row, "unexpected end of data"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_ROWS)
@pytest.mark.parametrize("name", ["train", "test"])
def test_a_bad_row_is_named_by_its_line_and_nothing_is_written(tmp_path, public_rows, spoil, message, name):
    rows = list(public_rows)
    rows[17] = spoil(rows[17])
    rows[20] = broken(rows[20], 1, lambda text: text.replace("S", "?"))
    both = {"train": public_rows, "test": public_rows, name: rows}
    folder = write_tables(tmp_path / "csv", both["train"], both["test"])
    with pytest.raises(UserError) as caught:
        main(MazeData(output_dir=tmp_path / "set", source=str(folder)))
    line = 1 + len(rows) if message == "unexpected end of data" else 19
    assert f"{folder / name}.csv line {line}: {message}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


def test_tables_that_do_not_go_together_are_said(tmp_path, public_rows):
    smaller = generate(3, 6, 5, "walls", np.random.default_rng(0), lambda *_: None)
    others = [",".join(["", *(text_of(array[i]).replace("\n", "") for array in smaller), "1"]) for i in range(3)]
    folder = write_tables(tmp_path / "csv", public_rows, others)
    with pytest.raises(
        UserError, match=r"mazes of 64 cells in train.csv and of 36 in test.csv; use tables of one size"
    ):
        main(MazeData(output_dir=tmp_path / "set", source=str(folder)))
    (folder / "train.csv").write_text("source,question,answer,rating\n,####,####,1\n")
    with pytest.raises(UserError, match=r"line 2: the question has 4 cells, expected a square of 4x4 to 50x50"):
        main(MazeData(output_dir=tmp_path / "set", source=str(folder)))


def test_options_that_do_not_go_together_are_said(tmp_path):
    for config, message in (
        (MazeData(size=3), "--size 3: mazes have 4 to 50 rows"),
        (MazeData(size=51), "--size 51: mazes have 4 to 50 rows"),
        (MazeData(num_train=0), "--num-train 0: expected 1 to"),
        (MazeData(min_path=-1), "--min-path -1: expected 0 to"),
        (MazeData(seed=-1), "--seed -1: expected 0 to"),
        (MazeData(subsample_size=5), "--subsample-size 5 needs --source"),
        (MazeData(source="x/y", num_train=5), "--num-train 5 does not go with --source"),
        (MazeData(source="x/y", kind="walls"), "--kind walls does not go with --source"),
        (MazeData(source=str(tmp_path)), "train.csv is missing"),
    ):
        with pytest.raises(UserError, match=message):
            main(config)
    assert not any(tmp_path.iterdir())


def test_tables_come_out_of_a_bucket_and_its_client_missing_is_said(tmp_path, public_rows, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    folder = write_tables(tmp_path / "csv", public_rows[:20], public_rows[20:])
    memory = fsspec.filesystem("memory")
    for name in ("train.csv", "test.csv"):
        memory.pipe(f"/mazes/{name}", (folder / name).read_bytes())
    main(MazeData(output_dir=tmp_path / "bucket", source="memory://mazes/"))
    main(MazeData(output_dir=tmp_path / "folder", source=str(folder)))
    hashes = {record_of(tmp_path / name)["content_sha256"] for name in ("bucket", "folder")}
    assert len(hashes) == 1
    with pytest.raises(UserError, match=r"train.csv in memory://nothing could not be read"):
        main(MazeData(output_dir=tmp_path / "x", source="memory://nothing"))

    def without(name: str):
        def absent(asked: str):
            raise ImportError(f"no {asked}") if asked == name else AssertionError(asked)

        return absent

    monkeypatch.setattr(tables.importlib, "import_module", without("fsspec"))
    with pytest.raises(
        UserError, match=r"--source gs://bucket/x: reading it needs `pip install fsspec gcsfs`; or copy"
    ):
        main(MazeData(output_dir=tmp_path / "x", source="gs://bucket/x"))
    assert not (tmp_path / "x").exists()


RUN_PUBLISHED = """
import os, sys, types
import numpy as np
source, output, augment = sys.argv[1:]
command_line = types.ModuleType("argdantic")
command_line.ArgParser = lambda: types.SimpleNamespace(command=lambda **_: lambda function: function)
hub = types.ModuleType("huggingface_hub")
hub.hf_hub_download = lambda repo, name, repo_type: os.path.join(repo, name)
sys.modules |= {"argdantic": command_line, "huggingface_hub": hub}
from build_maze_dataset import DataProcessConfig, preprocess_data
preprocess_data(DataProcessConfig(source_repo=source, output_dir=output, aug=augment == "True"))
from puzzle_dataset import PuzzleDataset, PuzzleDatasetConfig
config = PuzzleDatasetConfig(seed=0, dataset_paths=[sys.argv[2] + "-ours"], global_batch_size=4, test_set_mode=True,
                             epochs_per_iter=1, rank=0, num_replicas=1)
print(sum(size for _, _, size in PuzzleDataset(config, split="test")))
"""


@pytest.mark.skipif(PUBLISHED is None, reason="TRM_PUBLISHED does not give the folder of the published code")
@pytest.mark.parametrize("augment", [False, True])
def test_the_published_builder_writes_the_same_arrays_and_its_loader_reads_ours(tmp_path, public_rows, augment):
    folder = write_tables(tmp_path / "csv", public_rows[:20], public_rows[20:])
    main(MazeData(output_dir=tmp_path / "set-ours", source=str(folder), augment=augment))
    paths = f"{PUBLISHED}:{PUBLISHED}/dataset"
    ran = subprocess.run(
        [sys.executable, "-c", RUN_PUBLISHED, str(folder), str(tmp_path / "set"), str(augment)],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.split()[-1:]) == (0, ["10"]), ran.stderr
    for split in ("train", "test"):
        ours, theirs = (load_split(tmp_path / name, split) for name in ("set-ours", "set"))
        assert ours.metadata == theirs.metadata
        for field in FIELDS:
            one, other = getattr(ours, field), getattr(theirs, field)
            assert one.dtype == other.dtype and (one == other).all()


def test_the_command_line_builds_and_fails_in_one_line(tmp_path, capsys):
    arguments = ["build-data", "maze", "--size", "6", "--num-train", "10", "--num-test", "4"]
    assert trm([*arguments, "--output-dir", str(tmp_path / "set")]) == 0
    out = capsys.readouterr().out
    assert "10 puzzles" in out and f"sha256 {record_of(tmp_path / 'set')['content_sha256']}" in out
    assert trm([*arguments, "--min-path", "33", "--output-dir", str(tmp_path / "x")]) == 2
    captured = capsys.readouterr()
    error = captured.err.strip().splitlines()[-1]
    assert captured.out == "" and error.startswith(
        "trm: 0 of 14 mazes of 6x6 with a shortest path of more than 33 steps"
    )
    assert not (tmp_path / "x").exists()


def test_a_label_has_a_path_wherever_an_input_is_open(tmp_path):
    """What the model has to find: open cells that become path; everything else it copies."""
    main(MazeData(output_dir=tmp_path / "set", size=SIZE, num_train=10, num_test=5))
    train = load_split(tmp_path / "set", "train")
    changed = train.inputs != train.labels
    assert (train.inputs[changed] == OPEN).all() and (train.labels[changed] == PATH).all()
    assert ((train.inputs == START).sum(axis=1) == 1).all() and ((train.inputs == GOAL).sum(axis=1) == 1).all()
    assert maze_dataset.MAKER_VERSION == 1
