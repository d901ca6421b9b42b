"""`trm build-data`: generated and public Sudokus end as data sets; mistakes and sizes that do not fit are refused."""

import dataclasses
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import write_source
from support.sudoku_tables import hash_of, sudoku_rows, write_tables

from train_jax.errors import UserError
from train_jax.stages.build_data import ArcData, MazeData, SudokuData, cli, main
from train_jax.tasks.puzzles import building
from train_jax.tasks.puzzles.arc import data as arc_dataset
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.maze import data as maze_dataset
from train_jax.tasks.puzzles.metadata import read_recipe
from train_jax.tasks.puzzles.sudoku import data as sudoku_dataset
from train_jax.tasks.puzzles.sudoku.data import read_table
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, grids_of, is_solution
from train_jax.tasks.puzzles.sudoku.symmetry import fingerprints


@pytest.mark.parametrize(("size", "num_empty"), [(4, 8), (6, 18), (9, 50)])
def test_a_generated_set_is_whole_and_its_splits_share_no_puzzle(tmp_path, size, num_empty):
    main(SudokuData(output_dir=tmp_path / "set", size=size, num_train=90, num_test=40, num_aug=7))
    geometry = GEOMETRIES[size]
    train, test = (load_split(tmp_path / "set", split) for split in ("train", "test"))
    assert (train.num_groups, train.num_examples) == (90, 90 * 8)
    assert (test.num_groups, test.num_examples) == (40, 40)
    for split in (train, test):
        assert (split.metadata.vocab_size, split.metadata.seq_len) == (size + 2, size**2)
        puzzles, solutions = grids_of(split.inputs), grids_of(split.labels)
        assert is_solution(solutions, geometry).all()
        assert ((puzzles == 0) | (puzzles == solutions)).all()
        assert ((puzzles == 0).sum(axis=1) == num_empty).all()
    marks = fingerprints(grids_of(train.inputs), geometry).reshape(90, 8)
    assert (marks == marks[:, :1]).all()
    assert len(np.unique(marks)) == 90
    test_marks = fingerprints(grids_of(test.inputs), geometry)
    assert len(np.unique(test_marks)) == 40
    assert not np.isin(test_marks, marks).any()
    assert len(np.unique(train.inputs, axis=0)) > 0.9 * train.num_examples


def test_the_seed_decides_the_bytes_and_augmentation_adds_to_the_same_puzzles(tmp_path):
    def build(name: str, **options) -> Path:
        main(SudokuData(output_dir=tmp_path / name, size=6, num_train=30, num_test=10, **options))
        return tmp_path / name

    first = build("first", num_aug=2)
    assert hash_of(first) == hash_of(build("again", num_aug=2))
    assert hash_of(first) != hash_of(build("other", num_aug=2, seed=1))
    plain = load_split(build("plain"), "train")
    assert (load_split(first, "train").inputs[::3] == plain.inputs).all()


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


def test_options_that_do_not_go_together_are_refused(tmp_path):
    for config, message in (
        (SudokuData(size=5), "a Sudoku of size 5 is not supported; use one of 4, 6, 9"),
        (SudokuData(subsample_size=5), "--subsample-size 5 needs --source"),
        (SudokuData(source="x/y", num_train=5), "--num-train 5 does not go with --source"),
        (SudokuData(source="x/y", size=6), "--size 6 with --source: the tables contain 9x9 Sudokus"),
        (SudokuData(source=str(tmp_path / "none")), "none does not exist; give a folder or a bucket"),
        (SudokuData(source=str(tmp_path)), "train.csv is missing"),
    ):
        with pytest.raises(UserError, match=message):
            main(config)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def public_rows() -> list[str]:
    return list(sudoku_rows())


def cells_of(rows: list[str], column: int) -> list[list[int]]:
    return [[int(character.replace(".", "0")) for character in row.split(",")[column]] for row in rows]


def test_public_tables_are_converted_as_they_are(tmp_path, public_rows):
    tables = write_tables(tmp_path / "csv", public_rows[:30], public_rows[25:])
    directory = tmp_path / "set"
    main(SudokuData(output_dir=directory, source=str(tables), num_aug=3))
    train, test = (load_split(directory, split) for split in ("train", "test"))
    assert grids_of(train.inputs[::4]).tolist() == cells_of(public_rows[:30], 1)
    assert grids_of(train.labels[::4]).tolist() == cells_of(public_rows[:30], 2)
    assert grids_of(test.inputs).tolist() == cells_of(public_rows[25:], 1)
    record = read_recipe(directory)
    assert record is not None
    assert record["findings"]["test_puzzles_equivalent_to_a_train_puzzle"] == 5
    assert record["findings"]["train_puzzles_equivalent_to_another"] == 0
    with pytest.raises(UserError, match=r"train.csv/train.csv is missing; --source needs a folder with"):
        main(SudokuData(output_dir=tmp_path / "other", source=str(tables / "train.csv")))


def test_difficulty_filters_both_tables_and_the_subsample_only_train(tmp_path, public_rows):
    tables = write_tables(tmp_path / "csv", public_rows[:30], public_rows[:30])
    options = SudokuData(output_dir=tmp_path / "set", source=str(tables), min_difficulty=20, subsample_size=4)
    main(options)
    train, test = (load_split(tmp_path / "set", split) for split in ("train", "test"))
    assert grids_of(test.inputs).tolist() == cells_of(public_rows[20:30], 1)
    kept = grids_of(train.inputs).tolist()
    assert len(kept) == 4
    assert all(row in cells_of(public_rows[20:30], 1) for row in kept)
    for changes, message in (
        ({"subsample_size": 11}, "--subsample-size 11: there are 10 train puzzles"),
        ({"min_difficulty": 99}, "train.csv has no puzzle of at least difficulty 99; use a lower --min-difficulty"),
    ):
        with pytest.raises(UserError, match=message):
            main(SudokuData(**{**vars(options), "output_dir": tmp_path / "other", **changes}))
    assert not (tmp_path / "other").exists()


def test_a_changed_table_is_another_recipe(tmp_path, public_rows):
    tables = write_tables(tmp_path / "csv", public_rows[:30], public_rows[30:])
    options = SudokuData(output_dir=tmp_path / "set", source=str(tables))
    main(options)
    with (tables / "test.csv").open("a") as file:
        file.write(public_rows[0] + "\n")
    with pytest.raises(UserError, match="other options"):
        main(options)


def broken(row: str, column: int, change) -> str:
    columns = row.split(",")
    columns[column] = change(columns[column])
    return ",".join(columns)


BAD_ROWS = [
    (lambda row: broken(row, 1, lambda text: text[:-1]), "the question has 80 cells, expected 81"),
    (lambda row: broken(row, 2, lambda text: text + "1"), "the answer has 82 cells, expected 81"),
    (lambda row: broken(row, 1, lambda text: "x" + text[1:]), "the question contains a character that is neither"),
    (lambda row: broken(row, 1, lambda text: "\xff" + text[1:]), "the question contains a character that is neither"),
    (lambda row: broken(row, 2, lambda text: "0" + text[1:]), "the answer is not a solved Sudoku"),
    (lambda row: broken(row, 2, lambda text: text[1] + text[0] + text[2:]), "the answer is not a solved Sudoku"),
    (lambda row: broken(row, 2, lambda text: text[:80] + ":"), "the answer is not a solved Sudoku"),
    (
        lambda row: broken(row, 1, lambda text: "".join(str(int(d) % 9 + 1) if d in "123456789" else d for d in text)),
        "the answer does not agree with the question",
    ),
    (lambda row: broken(row, 3, lambda text: "1.5"), "the rating is '1.5', expected a whole number"),
    (lambda row: broken(row, 3, lambda text: ""), "the rating is '', expected a whole number"),
    (lambda row: row + ",1", "5 columns, expected 4"),
    (lambda row: "", "0 columns, expected 4"),
    (lambda row: '"' + row, "unexpected end of data"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_ROWS)
def test_a_bad_row_is_named_by_its_line_and_nothing_is_written(tmp_path, public_rows, spoil, message):
    rows = list(public_rows)
    rows[17] = spoil(rows[17])
    folder = write_tables(tmp_path / "csv", public_rows, rows)
    with pytest.raises(UserError) as caught:
        main(SudokuData(output_dir=tmp_path / "set", source=str(folder)))
    line = 1 + len(rows) if message == "unexpected end of data" else 19
    assert f"{folder}/test.csv line {line}: {message}" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]


def test_the_first_bad_row_is_the_one_reported(tmp_path, public_rows):
    rows = list(public_rows)
    rows[5] = broken(rows[5], 2, lambda text: "0" + text[1:])
    rows[9] = broken(rows[9], 1, lambda text: text[:-1])
    folder = write_tables(tmp_path / "csv", rows, rows)
    with pytest.raises(UserError, match="line 7: the answer is not a solved Sudoku"):
        read_table(folder / "train.csv", None, lambda what, done, total: None)


def test_tables_come_from_the_hub_by_its_own_client(tmp_path, public_rows, monkeypatch):
    options = SudokuData(output_dir=tmp_path / "set", source="someone/some-sudokus")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs `pip install huggingface_hub`; or copy train.csv and test.csv"):
        main(options)
    client = types.ModuleType("huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)

    def unreachable(*_, **__):
        raise ConnectionError("no route to host\nand more lines")

    monkeypatch.setattr(client, "hf_hub_download", unreachable, raising=False)
    with pytest.raises(UserError, match=r"train.csv in someone/some-sudokus could not be read \(no route to host\)"):
        main(options)
    tables = write_tables(tmp_path / "csv", public_rows, public_rows)
    downloads = []

    def download(repo_id: str, filename: str, *, repo_type: str) -> str:
        downloads.append((repo_id, filename, repo_type))
        return str(tables / filename)

    monkeypatch.setattr(client, "hf_hub_download", download)
    main(options)
    assert downloads == [("someone/some-sudokus", name, "dataset") for name in ("train.csv", "test.csv")]
    assert load_split(tmp_path / "set", "train").num_groups == 40


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
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10**9}))
    with pytest.raises(
        UserError, match=r"has 1.0 GB of free space, expected at least .* GB; free some space, choose another"
    ):
        main(config)
    assert not list((tmp_path / "work").iterdir())


def test_the_available_memory_is_known():
    assert 10**7 < building.available_memory_bytes() < 10**15
