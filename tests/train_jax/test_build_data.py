"""`trm build-data sudoku` and `maze`: generated puzzles and public tables end as data sets; mistakes are refused."""

import dataclasses
import sys
import types
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import PUBLISHED, write_source
from support.puzzle_sets import record_of
from support.sudoku_tables import sudoku_rows, write_tables

from tests.references import published
from train_jax.__main__ import main as trm
from train_jax.cli.build_data import cli, main
from train_jax.errors import UserError
from train_jax.puzzles import building
from train_jax.puzzles.arc import data as arc_dataset
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.format import load_split
from train_jax.puzzles.inspection import inspect
from train_jax.puzzles.maze import data as maze_dataset
from train_jax.puzzles.maze import generator as maze_generator
from train_jax.puzzles.maze.data import MazeData
from train_jax.puzzles.maze.grid import search, text_of
from train_jax.puzzles.metadata import FIELDS
from train_jax.puzzles.sudoku import data as sudoku_dataset
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.puzzles.sudoku.grid import grids_of

SIZE = 8
"""Rows and columns of the mazes."""
ONE_PATH = "mazes with several shortest paths"


GENERATED = [
    ("sudoku", ["--size", "4", "--num-aug", "7"], 6, {"empty cells": "8"}),
    ("sudoku", ["--size", "6", "--num-aug", "7"], 8, {"empty cells": "18"}),
    ("sudoku", ["--size", "9", "--num-aug", "7"], 11, {"empty cells": "50"}),
    ("maze", ["--size", "8", "--kind", "corridors", "--augment"], 6, {ONE_PATH: "0 of 60 checked"}),
    ("maze", ["--size", "8", "--kind", "perfect", "--augment"], 6, {ONE_PATH: "0 of 60 checked"}),
    ("maze", ["--size", "8", "--kind", "walls", "--augment"], 6, {}),
]


@pytest.mark.parametrize(("what", "options", "vocab_size", "expected"), GENERATED)
def test_a_generated_set_is_whole_and_its_splits_share_no_puzzle(tmp_path, capsys, what, options, vocab_size, expected):
    counts = ["--num-train", "60", "--num-test", "30", "--output-dir", str(tmp_path / "set")]
    assert trm(["build-data", what, *options, *counts]) == 0
    assert "60 puzzles,         480 examples" in capsys.readouterr().out
    train, test = (load_split(tmp_path / "set", split) for split in ("train", "test"))
    assert (train.num_groups, train.num_examples, test.num_groups, test.num_examples) == (60, 480, 30, 30)
    sizes = (int(options[1]) ** 2, vocab_size, 0)
    assert (train.metadata.seq_len, train.metadata.vocab_size, train.metadata.ignore_label_id) == sizes
    facts = inspect(tmp_path / "set", lambda *_: None)
    wrong = {"sudoku": "labels that are not a solution", "maze": "labels that are not a shortest path"}[what]
    for split in ("train", "test"):
        assert facts[split][wrong].split()[0] == "0"
    unique = {"puzzles without exactly one solution": "0 of 60 checked"} if what == "sudoku" else {}
    assert expected.items() | unique.items() <= facts["train"].items()
    marks, tested = (np.array([*each.kind.fingerprints(each.inputs, each.labels)]) for each in (train, test))
    assert (marks.reshape(60, 8) == marks[::8, None]).all()
    assert len({*marks.tolist(), *tested.tolist()}) == 60 + 30
    assert len(np.unique(train.inputs, axis=0)) > 0.9 * train.num_examples
    findings = record_of(tmp_path / "set")["findings"]
    if what == "maze":
        assert search(train.inputs).steps.min() > 22
        assert findings["test_puzzles_equivalent_to_a_train_puzzle"] == 0
        assert (findings["test_mazes_with_several_shortest_paths"] == 0) == (ONE_PATH in expected)


@pytest.mark.parametrize(
    ("make", "augmented"),
    [
        (partial(SudokuData, size=6, num_train=30, num_test=10), {"num_aug": 2}),
        (partial(MazeData, size=SIZE, num_train=20, num_test=5), {"augment": True}),
    ],
)
def test_the_seed_decides_the_bytes_and_augmentation_adds_to_the_same_puzzles(tmp_path, make, augmented):
    seeds = {"first": {}, "again": {}, "other": {"seed": 1}}
    for name, seed in seeds.items():
        main(make(output_dir=tmp_path / name, **augmented, **seed))
    first, again, other = (record_of(tmp_path / name)["content_sha256"] for name in seeds)
    assert first == again != other
    main(make(output_dir=tmp_path / "plain"))
    plain, train = (load_split(tmp_path / name, "train") for name in ("plain", "first"))
    assert (train.inputs[train.puzzle_indices[train.group_indices[:-1]]] == plain.inputs).all()


def test_the_defaults_of_every_size_can_be_met(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for size, train, test, empty in ((4, 500, 250, 8), (6, 1000, 1000, 18), (9, 1000, 1000, 50)):
        cli(["sudoku", "--size", str(size)])
        directory = Path("data") / f"sudoku-{size}x{size}"
        splits = load_split(directory, "train"), load_split(directory, "test")
        assert tuple(puzzles.num_groups for puzzles in splits) == (train, test)
        assert all(((grids_of(puzzles.inputs) == 0).sum(axis=1) == empty).all() for puzzles in splits)
    cli(["sudoku"])
    assert "data/sudoku-9x9 already exists" in capsys.readouterr().out


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


def test_options_that_do_not_go_together_are_refused(tmp_path):
    for config, message in (
        (SudokuData(size=5), "a Sudoku of size 5 is not supported; use one of 4, 6, 9"),
        (SudokuData(subsample_size=5), "--subsample-size 5 needs --source"),
        (SudokuData(source="x/y", num_train=5), "--num-train 5 does not go with --source"),
        (SudokuData(source="x/y", size=6), "--size 6 with --source: the tables contain 9x9 Sudokus"),
        (SudokuData(source=str(tmp_path / "none")), "none does not exist; give a folder or a bucket"),
        (SudokuData(source=str(tmp_path)), "train.csv is missing; --source needs a folder with"),
        (MazeData(size=3), "--size is 3; use at least 4"),
        (MazeData(num_train=0), "--num-train is 0; use at least 1"),
        (MazeData(size=9, max_path=5), "--max-path 5: shortest paths have more than 25 steps"),
        (MazeData(source="x", max_path=5), "--max-path 5 does not go with --source"),
        (MazeData(source="x/y", kind="walls"), "--kind walls does not go with --source"),
    ):
        with pytest.raises(UserError, match=message):
            main(config)
    assert not any(tmp_path.iterdir())


# ---- public tables


@cache
def maze_rows() -> list[str]:
    mazes = maze_generator.generate(30, SIZE, 18, "walls", np.random.default_rng(0), lambda *_: None)
    texts = [[text_of(maze).replace("\n", "") for maze in array] for array in mazes]
    return [f",{maze},{answer},{i}" for i, (maze, answer) in enumerate(zip(*texts, strict=True))]


def column_of(rows: list[str], column: int) -> list[str]:
    return [row.split(",")[column] for row in rows]


def changed(row: str, column: int, change) -> str:
    columns = row.split(",")
    columns[column] = change(columns[column])
    return ",".join(columns)


def digits(grids: np.ndarray) -> list[str]:
    return ["".join(map(str, grid)) for grid in grids_of(grids)]


def test_tables_of_sudokus_are_converted_as_they_are(tmp_path):
    rows = [row.replace(".", "0") for row in sudoku_rows()]
    tables = write_tables(tmp_path / "csv", sudoku_rows()[:30], sudoku_rows()[25:])
    options = SudokuData(output_dir=tmp_path / "set", source=str(tables), num_aug=3)
    main(options)
    train, test = (load_split(tmp_path / "set", split) for split in ("train", "test"))
    assert digits(train.inputs[::4]) == column_of(rows[:30], 1)
    assert digits(train.labels[::4]) == column_of(rows[:30], 2)
    assert digits(test.inputs) == column_of(rows[25:], 1)
    findings = record_of(tmp_path / "set")["findings"]
    assert findings["test_puzzles_equivalent_to_a_train_puzzle"] == 5
    assert findings["train_puzzles_equivalent_to_another"] == 0
    with (tables / "test.csv").open("a") as file:
        file.write(sudoku_rows()[0] + "\n")
    with pytest.raises(UserError, match="other options"):
        main(options)


def turned(text: str) -> str:
    return "".join(np.rot90(np.array(list(text)).reshape(SIZE, SIZE)).ravel())


def test_tables_of_mazes_are_converted_as_they_are(tmp_path):
    rows = maze_rows()
    folder = write_tables(tmp_path / "csv", rows[:20], [*rows[20:], changed(changed(rows[3], 1, turned), 2, turned)])
    main(MazeData(output_dir=tmp_path / "set", source=str(folder)))
    for split, expected in (("train", rows[:20]), ("test", rows[20:])):
        puzzles = load_split(tmp_path / "set", split)
        for field, column in (("inputs", 1), ("labels", 2)):
            texts = [text_of(maze).replace("\n", "") for maze in getattr(puzzles, field)]
            assert texts[: len(expected)] == column_of(expected, column)
    findings = record_of(tmp_path / "set")["findings"]
    assert findings["test_puzzles_equivalent_to_a_train_puzzle"] == 1
    assert findings["train_puzzles_equivalent_to_another"] == 0
    assert findings["train_mazes_with_several_shortest_paths"] > 0


def test_difficulty_filters_both_tables_and_the_subsample_only_train(tmp_path):
    lengths = [answer.count("o") + 1 for answer in column_of(maze_rows(), 2)]
    bound = sorted(lengths)[20]
    longer = sum(length > bound for length in lengths)
    assert 0 < longer < 30
    for make, rows, option, least, kept, nothing in (
        (SudokuData, sudoku_rows()[:30], "min_difficulty", 20, 10, "no puzzle of at least difficulty 99"),
        (MazeData, maze_rows(), "min_path", bound, longer, "no maze with a path of more than 99 steps"),
    ):
        tables = write_tables(tmp_path / f"{option}-csv", rows, rows)
        own = partial(make, source=str(tables))
        main(own(output_dir=tmp_path / option, subsample_size=2, **{option: least}))
        train, test = (load_split(tmp_path / option, split) for split in ("train", "test"))
        assert (train.num_groups, test.num_groups) == (2, kept)
        assert {each.tobytes() for each in train.inputs} < {each.tobytes() for each in test.inputs}
        if make is SudokuData:
            assert digits(test.inputs) == column_of([row.replace(".", "0") for row in rows[20:]], 1)
        for changes, message in (
            ({"subsample_size": 31}, "--subsample-size 31: there are 30 train puzzles"),
            ({option: 99}, f"train.csv has {nothing}; use a lower --{option.replace('_', '-')}"),
        ):
            with pytest.raises(UserError, match=message):
                main(own(output_dir=tmp_path / "other", **changes))
        assert not (tmp_path / "other").exists()


def other_digit(text: str) -> str:
    return "".join(str(int(each) % 9 + 1) if each in "123456789" else each for each in text)


def walled_in(row: str) -> str:
    """Walls all around the goal, in question and answer."""
    for column in (1, 2):
        grid = np.array(list(row.split(",")[column])).reshape(SIZE, SIZE)
        ((goal_row, goal_col),) = np.argwhere(grid == "G")
        near = grid[max(goal_row - 1, 0) : goal_row + 2, max(goal_col - 1, 0) : goal_col + 2]
        near[near != "G"] = "#"
        row = changed(row, column, lambda _, grid=grid: "".join(grid.ravel()))
    return row


def detour(row: str) -> str:
    """Marks one more cell than the path has."""
    maze, answer = row.split(",")[1:3]
    cell = next(i for i, pair in enumerate(zip(maze, answer, strict=True)) if pair == (" ", " "))
    return changed(row, 2, lambda text: text[:cell] + "o" + text[cell + 1 :])


NO_DIGIT = "the question contains a character that is neither"
UNSOLVED = "the answer is not a solved Sudoku"
NO_MAZE = "the question does not consist of"
OTHER_MAZE = "the answer is not the question with some"


@pytest.mark.parametrize(
    ("make", "column", "spoil", "message"),
    [
        (SudokuData, 1, lambda text: text[:-1], "the question has 80 cells, expected 81"),
        (SudokuData, 2, lambda text: text + "1", "the answer has 82 cells, expected 81"),
        (SudokuData, 1, lambda text: "x" + text[1:], NO_DIGIT),
        (SudokuData, 1, lambda text: "\xff" + text[1:], NO_DIGIT),
        (SudokuData, 2, lambda text: "0" + text[1:], UNSOLVED),
        (SudokuData, 2, lambda text: text[1] + text[0] + text[2:], UNSOLVED),
        (SudokuData, 2, lambda text: text[:80] + ":", UNSOLVED),
        (SudokuData, 1, other_digit, "the answer does not agree with the question"),
        (SudokuData, 3, lambda text: "1.5", "the rating is '1.5', expected a whole number"),
        (SudokuData, 3, lambda text: "", "the rating is '', expected a whole number"),
        (SudokuData, None, lambda row: row + ",1", "5 columns, expected 4"),
        (SudokuData, None, lambda row: "", "0 columns, expected 4"),
        (SudokuData, None, lambda row: '"' + row, "unexpected end of data"),
        (MazeData, 1, lambda text: text[:-1], "the question has 63 cells, expected 64"),
        (MazeData, 1, lambda text: text.replace("S", "\xff"), NO_MAZE),
        (MazeData, 1, lambda text: text.replace("S", "#"), NO_MAZE),
        (MazeData, 1, lambda text: text.replace("#", "G", 1), NO_MAZE),
        (MazeData, 1, lambda text: text.replace(" ", "o", 1), NO_MAZE),
        (MazeData, 2, lambda text: text.replace("#", " ", 1), OTHER_MAZE),
        (MazeData, 2, lambda text: text.replace("o", "x", 1), OTHER_MAZE),
        (MazeData, 2, lambda text: text.replace("o", " ", 1), "the answer is not a shortest path"),
        (MazeData, None, detour, "the answer is not a shortest path"),
        (MazeData, None, walled_in, "the goal cannot be reached"),
        (MazeData, None, lambda row: row + ",1", "5 columns, expected 4"),
    ],
)
def test_the_first_bad_row_is_named_by_its_line_and_nothing_is_written(tmp_path, make, column, spoil, message):
    good = sudoku_rows()[:30] if make is SudokuData else maze_rows()
    rows = list(good)
    rows[17] = spoil(rows[17]) if column is None else changed(rows[17], column, spoil)
    rows[20] = changed(rows[20], 1, lambda text: text[:-1])
    folder = write_tables(tmp_path / "csv", good, rows)
    with pytest.raises(UserError) as caught:
        main(make(output_dir=tmp_path / "set", source=str(folder)))
    line = 1 + len(rows) if message == "unexpected end of data" else 19
    assert f"{folder}/test.csv line {line}: {message}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


def test_tables_of_different_sizes_are_refused(tmp_path):
    smaller = maze_generator.generate(3, 6, 5, "walls", np.random.default_rng(0), lambda *_: None)
    others = [",".join(["", *(text_of(array[i]).replace("\n", "") for array in smaller), "1"]) for i in range(3)]
    folder = write_tables(tmp_path / "csv", maze_rows(), others)
    with pytest.raises(UserError, match=r"have 64 cells in train.csv and 36 in test.csv, expected the same number"):
        main(MazeData(output_dir=tmp_path / "set", source=str(folder)))
    (folder / "train.csv").write_text("source,question,answer,rating\n,####,####,1\n")
    with pytest.raises(UserError, match=r"line 2: the question has 4 cells, expected a square of 4x4 to 50x50"):
        main(MazeData(output_dir=tmp_path / "set", source=str(folder)))


def test_tables_are_read_from_a_bucket_and_a_missing_client_is_an_error(tmp_path, monkeypatch):
    memory = pytest.importorskip("fsspec").filesystem("memory")
    folder = write_tables(tmp_path / "csv", maze_rows()[:20], maze_rows()[20:])
    for name in ("train.csv", "test.csv"):
        memory.pipe(f"/mazes/{name}", (folder / name).read_bytes())
    main(MazeData(output_dir=tmp_path / "bucket", source="memory://mazes/"))
    main(MazeData(output_dir=tmp_path / "folder", source=str(folder)))
    hashes = {record_of(tmp_path / name)["content_sha256"] for name in ("bucket", "folder")}
    assert len(hashes) == 1
    with pytest.raises(UserError, match=r"train.csv in memory://nothing could not be read"):
        main(MazeData(output_dir=tmp_path / "x", source="memory://nothing"))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UserError, match=r"gs://bucket/x: reading it needs `pip install fsspec gcsfs`; or copy"):
        main(MazeData(output_dir=tmp_path / "x", source="gs://bucket/x"))
    assert not (tmp_path / "x").exists()


def test_tables_come_from_the_hub_by_its_own_client(tmp_path, monkeypatch):
    options = SudokuData(output_dir=tmp_path / "set", source="someone/some-sudokus")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs `pip install huggingface_hub`; or copy train.csv and test.csv"):
        main(options)
    client = types.ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    tables = write_tables(tmp_path / "csv", sudoku_rows(), sudoku_rows())
    downloads = []

    def download(repo_id: str, filename: str, *, repo_type: str) -> str:
        downloads.append((repo_id, filename, repo_type))
        if len(downloads) == 1:
            raise ConnectionError("no route to host\nand more lines")
        return str(tables / filename)

    monkeypatch.setattr(client, "hf_hub_download", download, raising=False)
    with pytest.raises(UserError, match=r"train.csv in someone/some-sudokus could not be read \(no route to host\)"):
        main(options)
    main(options)
    assert downloads[1:] == [("someone/some-sudokus", name, "dataset") for name in ("train.csv", "test.csv")]
    assert load_split(tmp_path / "set", "train").num_groups == 40


@pytest.mark.skipif(PUBLISHED is None, reason="TRM_PUBLISHED does not give the folder of the published code")
@pytest.mark.parametrize("augment", [False, True])
def test_the_published_builder_writes_the_same_arrays_and_its_loader_reads_ours(tmp_path, augment):
    folder = write_tables(tmp_path / "csv", maze_rows()[:20], maze_rows()[20:])
    main(MazeData(output_dir=tmp_path / "set-ours", source=str(folder), augment=augment))
    sets = folder, tmp_path / "set", augment, tmp_path / "set-ours"
    assert published.run(str(PUBLISHED), "maze", *sets)["found"] == 10
    for split in ("train", "test"):
        ours, theirs = (load_split(tmp_path / name, split) for name in ("set-ours", "set"))
        assert ours.metadata == theirs.metadata
        for field in FIELDS:
            one = getattr(ours, field)
            other = getattr(theirs, field)
            assert one.dtype == other.dtype and (one == other).all()


# ---- sizes that do not fit


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SudokuData(num_train=10**9), "needs about 4"),
        (SudokuData(num_aug=10**6 - 1), "needs about 1"),
        (MazeData(num_test=10**9), "needs about 5,4"),
        (MazeData(num_train=10**6, augment=True), "needs about 18"),
        (ArcData("files", num_aug=900_000), "needs about 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_before_the_work(tmp_path, monkeypatch, config, message):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    if isinstance(config, ArcData):
        config = dataclasses.replace(config, source=str(write_source(tmp_path / "files")))
    for module, work in ((sudoku_dataset, "generate"), (maze_dataset, "generate"), (arc_dataset, "draw")):
        monkeypatch.setattr(module, work, lambda *_, **__: pytest.fail("the work was begun"))
    monkeypatch.setattr(building, "available_memory_bytes", lambda: 10**9)
    with pytest.raises(UserError, match=rf"{message}[\d,.]* GB of memory, 1.0 GB are available; use"):
        main(config)
    monkeypatch.setattr(building, "available_memory_bytes", lambda: 10**15)
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=10**9))
    with pytest.raises(UserError, match=r"has 1.0 GB of free space, expected at least .* GB; free some space, choose"):
        main(config)
    assert not list((tmp_path / "work").iterdir())


def test_the_available_memory_is_known():
    assert 10**7 < building.available_memory_bytes() < 10**15
