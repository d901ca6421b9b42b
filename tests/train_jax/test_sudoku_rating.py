"""Difficulty: the guesses of another solver, asked for and shown; data sets made without it stay the same."""

import os

import numpy as np
import pytest
from support.sudoku_tables import hash_of, sudoku_rows, write_tables

from train_jax.__main__ import main as trm
from train_jax.errors import UserError
from train_jax.stages.build_data import SudokuData, main
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.inspection import inspect
from train_jax.tasks.puzzles.metadata import read_recipe
from train_jax.tasks.puzzles.sudoku import generator as sudoku_generator
from train_jax.tasks.puzzles.sudoku.generator import dig, generate, random_grids
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, Geometry, grids_of
from train_jax.tasks.puzzles.sudoku.solver import describe_guesses, ratings


@pytest.fixture
def public_rows() -> list[str]:
    return list(sudoku_rows())


def silent(*_):
    pass


def guesses_by_hand(puzzle: np.ndarray, geometry: Geometry) -> int:  # noqa: C901 (its two local functions are counted too)
    """Returns the rating by its definition, on sets, one cell at a time; shares only the units with the solver."""

    def singles(options: list[set[int]]) -> bool:
        """Fills in until nothing changes; False for a contradiction."""
        changed = True
        while changed:
            before = [set(each) for each in options]
            for cells in geometry.units:
                for cell in cells:
                    if len(options[cell]) == 1:
                        for other in cells:
                            if other != cell:
                                options[other] -= options[cell]
                for digit in range(1, geometry.size + 1):
                    places = [cell for cell in cells if digit in options[cell]]
                    if not places:
                        return False
                    if len(places) == 1:
                        options[places[0]] = {digit}
            changed = before != options
        return all(options)

    def tree(options: list[set[int]]) -> int:
        if not singles(options) or all(len(each) == 1 for each in options):
            return 0
        fewest = min(len(each) for each in options if len(each) > 1)
        cell = next(cell for cell, each in enumerate(options) if len(each) == fewest)
        lowest, both = min(options[cell]), 1
        for digits in ({lowest}, options[cell] - {lowest}):
            both += tree([set(each) if other != cell else set(digits) for other, each in enumerate(options)])
        return both

    return tree([{int(digit)} if digit else set(range(1, geometry.size + 1)) for digit in puzzle])


@pytest.mark.parametrize(("size", "count"), [(9, 24), (6, 60)])
def test_a_rating_is_the_number_of_guesses_of_its_definition(size, count):
    geometry, rng = GEOMETRIES[size], np.random.default_rng(5)
    puzzles, _ = dig(random_grids(count, geometry, rng), geometry.cells, geometry, rng)
    found = ratings(puzzles, geometry)
    assert found.max() > 0
    assert found.tolist() == [guesses_by_hand(puzzle, geometry) for puzzle in puzzles]


@pytest.mark.slow
def test_easier_puzzles_are_left_out_and_the_distribution_is_shown(tmp_path, capsys):
    main(SudokuData(output_dir=tmp_path / "set", size=6, num_train=30, num_test=10, min_difficulty=2, num_aug=1))
    out = capsys.readouterr().out
    facts = inspect(tmp_path / "set", silent)
    for split, count in (("train", 30), ("test", 10)):
        puzzles = load_split(tmp_path / "set", split)
        grids = grids_of(puzzles.inputs[puzzles.group_indices[:-1]])
        found = [guesses_by_hand(grid, GEOMETRIES[6]) for grid in grids]
        assert len(found) == count and min(found) >= 2
        words = f"{min(found)} to {max(found)} guesses, mean {np.mean(found):.1f}, median {np.median(found):g}, 100.0%"
        assert f"{split} difficulty: {words} need one\n" in out
        assert facts[split]["difficulty"].startswith(words)
    assert facts["data set"]["recipe: min_difficulty"] == "2"


@pytest.mark.slow
def test_a_difficulty_that_cannot_be_reached_is_refused_with_a_remedy(tmp_path, capsys):
    for arguments, message in (
        (["--size", "4", "--min-difficulty", "1"], "--min-difficulty 1: 0 of 4096 random 4x4 puzzles are that hard"),
        (["--size", "6", "--min-difficulty", "9", "--num-empty", "20"], "use a lower one or omit --num-empty"),
        (["--size", "4", "--min-difficulty", "-1"], "--min-difficulty is -1; use at least 0"),
        (["--min-difficulty", "-1", "--source", "x/y"], "--min-difficulty is -1; use at least 0"),
        (["--min-difficulty", "5", "--num-empty", "70"], "70: a 9x9 Sudoku"),
    ):
        assert trm(["build-data", "sudoku", "--output-dir", str(tmp_path / "set"), *arguments]) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1 and said.startswith("trm: ")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "content"),
    [
        ({"size": 9, "num_train": 20}, "c9e04a51f457cae66ae6a32e822a606e4695fcd227869cc750326e01b62e5cd2"),
        ({"size": 6, "num_train": 20}, "e3e73be5b3d752281025366299d5216f35ff917d09983b586e24e73e2453e9fd"),
    ],
)
def test_without_the_option_nothing_has_changed(tmp_path, options, content):
    """The recipe and the bytes are those of an earlier version, so that its data sets are still known."""
    main(SudokuData(output_dir=tmp_path / "set", num_test=5, num_aug=2, **options))
    record = read_recipe(tmp_path / "set")
    assert record is not None and record["content_sha256"] == content
    assert list(record["recipe"]) == [
        "maker", "maker_version", "size", "num_train", "num_test", "num_empty", "num_aug", "seed",
    ]  # fmt: skip


def test_both_ratings_of_a_table_are_shown(tmp_path, public_rows, capsys):
    tables = write_tables(tmp_path / "csv", public_rows[:30], public_rows[30:])
    main(SudokuData(output_dir=tmp_path / "set", source=str(tables), min_difficulty=4))
    puzzles = grids_of(load_split(tmp_path / "set", "train").inputs)
    found = [guesses_by_hand(puzzle, GEOMETRIES[9]) for puzzle in puzzles]
    out = capsys.readouterr().out
    assert f"train difficulty: {describe_guesses(np.array(found))}\n" in out
    assert "train rating in the table: 4 to 29, mean 16.5, median 16.5\n" in out


def ambiguous(row: str) -> str:
    """The row without givens in its first three rows, which may then be exchanged at will within their columns."""
    source, puzzle, answer, rating = row.split(",")
    return ",".join([source, "." * 27 + puzzle[27:], answer, rating])


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_puzzle_with_two_solutions_is_named_by_its_line_and_nothing_is_written(tmp_path, public_rows, name):
    rows = [*public_rows[:16], ambiguous(public_rows[16]), *public_rows[17:]]
    tables = write_tables(tmp_path / "csv", *(rows if name == split else public_rows for split in ("train", "test")))
    with pytest.raises(UserError) as caught:
        main(SudokuData(output_dir=tmp_path / "set", source=str(tables)))
    assert f"{tables / name}.csv line 18: the question has more than one solution; correct or" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]
    # Rows that are not used are not solved: it takes minutes for the millions of the public tables.
    main(SudokuData(output_dir=tmp_path / "set", source=str(tables), min_difficulty=17))
    assert len(hash_of(tmp_path / "set")) == 64


@pytest.mark.slow
def test_the_number_of_processes_changes_no_hard_puzzle(monkeypatch):
    runs = []
    for count in (1, 3):
        monkeypatch.setattr(sudoku_generator, "BATCH", 256)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=count: set(range(n)), raising=False)
        rng = np.random.default_rng(5)
        runs.append((generate(90, None, GEOMETRIES[6], rng, min_difficulty=1, progress=silent), rng.random()))
    (one, after_one), (three, after_three) = runs
    assert (one.puzzles == three.puzzles).all() and (one.solutions == three.solutions).all()
    assert after_one == after_three, "what is drawn afterwards has changed"
