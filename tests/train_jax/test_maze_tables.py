"""`trm build-data maze --source`: public tables are converted as they are, and a bad row is named."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import PUBLISHED
from support.records import record_of

from train_jax.errors import UserError
from train_jax.stages.build_data import MazeData, main
from train_jax.tasks.puzzles import building
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.maze.generator import generate
from train_jax.tasks.puzzles.maze.grid import text_of
from train_jax.tasks.puzzles.metadata import FIELDS

SIZE = 8


@pytest.fixture(scope="module")
def public_rows() -> list[str]:
    mazes = generate(30, SIZE, 18, "walls", np.random.default_rng(0), lambda *_: None)
    texts = [[text_of(maze).replace("\n", "") for maze in array] for array in mazes]
    return [f",{maze},{answer},{i}" for i, (maze, answer) in enumerate(zip(*texts, strict=True))]


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
    directory = tmp_path / "set"
    main(MazeData(output_dir=directory, source=str(folder)))
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
        ({"subsample_size": 31, "min_path": None}, "--subsample-size 31: there are 30 train puzzles"),
        ({"min_path": 99}, "train.csv has no maze with a path of more than 99 steps; use a lower --min-path"),
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
    """Marks one more cell than the path has."""
    maze, answer = row.split(",")[1:3]
    cell = next(i for i, pair in enumerate(zip(maze, answer, strict=True)) if pair == (" ", " "))
    return broken(row, 2, lambda text: text[:cell] + "o" + text[cell + 1 :])


BAD_ROWS = [
    (lambda row: broken(row, 1, lambda text: text[:-1]), "the question has 63 cells, expected 64"),
    (lambda row: broken(row, 2, lambda text: text + " "), "the answer has 65 cells, expected 64"),
    (lambda row: broken(row, 1, lambda text: text.replace("S", "x")), "the question does not consist of"),
    (lambda row: broken(row, 1, lambda text: text.replace("S", "\xff")), "the question does not consist of"),
    (lambda row: broken(row, 1, lambda text: text.replace("S", "#")), "the question does not consist of"),
    (lambda row: broken(row, 1, lambda text: text.replace("#", "G", 1)), "the question does not consist of"),
    (lambda row: broken(row, 1, lambda text: text.replace(" ", "o", 1)), "the question does not consist of"),
    (lambda row: broken(row, 2, lambda text: text.replace("#", " ", 1)), "the answer is not the question with some"),
    (lambda row: broken(row, 2, lambda text: text.replace("o", "x", 1)), "the answer is not the question with some"),
    (lambda row: broken(row, 2, lambda text: text.replace("o", " ", 1)), "the answer is not a shortest path"),
    (detour, "the answer is not a shortest path"),
    (walled_in, "the goal cannot be reached"),
    (lambda row: row + ",1", "5 columns, expected 4"),
    (lambda row: "", "0 columns, expected 4"),
    (lambda row: '"' + row, "unexpected end of data"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), [*(("train", *row) for row in BAD_ROWS), ("test", *BAD_ROWS[0])])
def test_a_bad_row_is_named_by_its_line_and_nothing_is_written(tmp_path, public_rows, name, spoil, message):
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


def test_tables_of_different_sizes_are_refused(tmp_path, public_rows):
    smaller = generate(3, 6, 5, "walls", np.random.default_rng(0), lambda *_: None)
    others = [",".join(["", *(text_of(array[i]).replace("\n", "") for array in smaller), "1"]) for i in range(3)]
    folder = write_tables(tmp_path / "csv", public_rows, others)
    with pytest.raises(UserError, match=r"have 64 cells in train.csv and 36 in test.csv, expected the same number"):
        main(MazeData(output_dir=tmp_path / "set", source=str(folder)))
    (folder / "train.csv").write_text("source,question,answer,rating\n,####,####,1\n")
    with pytest.raises(UserError, match=r"line 2: the question has 4 cells, expected a square of 4x4 to 50x50"):
        main(MazeData(output_dir=tmp_path / "set", source=str(folder)))


def test_tables_are_read_from_a_bucket_and_a_missing_client_is_an_error(tmp_path, public_rows, monkeypatch):
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
        def absent(module: str):
            raise ImportError(f"no {module}") if module == name else AssertionError(module)

        return absent

    monkeypatch.setattr(building.importlib, "import_module", without("fsspec"))
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
