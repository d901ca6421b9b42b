"""Sudokus: one solution each (against another solver), symmetries (against every symmetry), difficulty, text."""

import os
from itertools import permutations
from operator import eq

import numpy as np
import pytest
from support.puzzle_sets import record_of
from support.sudoku_tables import sudoku_rows, write_tables

from train_jax.__main__ import main as trm
from train_jax.cli.build_data import main
from train_jax.errors import UserError
from train_jax.puzzles.format import load_split
from train_jax.puzzles.sudoku import generator as sudoku_generator
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.puzzles.sudoku.generator import dig, generate, random_grids
from train_jax.puzzles.sudoku.grid import (
    GEOMETRIES,
    Geometry,
    grids_of,
    is_solution,
    parse,
    tokens_of,
)
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.sudoku.solver import describe_guesses, ratings, solve
from train_jax.puzzles.sudoku.symmetry import augment, fingerprints, line_orders
from train_jax.puzzles.terminal import grid_text


def made(size: int, count: int, num_empty: int, seed: int = 0):
    return generate(count, num_empty, GEOMETRIES[size], np.random.default_rng(seed), progress=lambda *_: None)


def backtracked_solutions(puzzle, box_rows: int, box_cols: int, limit: int = 2) -> list[list[int]]:
    """Solves by lists and sets; shares nothing with the solver under test."""
    size = box_rows * box_cols
    cells = range(size * size)
    solutions = []
    grid = [int(digit) for digit in puzzle]

    def units(cell: int) -> tuple[int, int, int]:
        row, col = divmod(cell, size)
        return row, size + col, 2 * size + row // box_rows * box_rows + col // box_cols

    peers = [[other for other in cells if other != cell and any(map(eq, units(cell), units(other)))] for cell in cells]

    def fill() -> None:
        options = {cell: set(range(1, size + 1)) - {grid[peer] for peer in peers[cell]} for cell in cells}
        empty = [cell for cell in cells if not grid[cell]]
        if not empty and all(grid[cell] in options[cell] for cell in cells):
            solutions.append(list(grid))
        if not empty:
            return
        cell = min(empty, key=lambda each: len(options[each]))
        for digit in options[cell]:
            grid[cell] = digit
            fill()
            grid[cell] = 0
            if len(solutions) == limit:
                return

    fill()
    return solutions


def test_solver_counts_none_one_and_several_solutions():
    geometry = GEOMETRIES[6]
    rng = np.random.default_rng(1)
    grids = random_grids(40, geometry, rng)
    puzzles = np.where(rng.random(grids.shape) < 0.65, np.uint8(0), grids)
    # A digit other than the one dug from makes some of them impossible.
    puzzles[:20, 0] = grids[:20, 0] % 6 + 1
    expected = [len(backtracked_solutions(puzzle, 2, 3)) for puzzle in puzzles]
    assert set(expected) == {0, 1, 2}
    solutions = solve(puzzles, geometry)
    assert solutions.counts.tolist() == expected
    solved = solutions.counts > 0
    assert is_solution(solutions.grids[solved], geometry).all()
    assert ((puzzles == 0) | (puzzles == solutions.grids))[solved].all()
    assert not solutions.grids[~solved].any()


@pytest.mark.parametrize("size", GEOMETRIES)
def test_random_grids_are_valid_and_of_more_than_one_class(size):
    geometry = GEOMETRIES[size]
    grids = random_grids(300, geometry, np.random.default_rng(0))
    assert is_solution(grids, geometry).all()
    # Relabelled so that the first row counts up, copies of one pattern grid by digit alone would be few.
    relabelled = {tuple(np.argsort(grid[: geometry.size])[grid - 1]) for grid in grids}
    assert len(relabelled) >= {4: 12, 6: 280, 9: 300}[size]


def test_dig_stops_where_no_cell_may_go_and_counts_the_empty_cells():
    geometry = GEOMETRIES[6]
    rng = np.random.default_rng(0)
    puzzles, empties = dig(random_grids(12, geometry, rng), geometry.cells, geometry, rng)
    assert ((puzzles == 0).sum(axis=1) == empties).all()
    for puzzle in puzzles[:3]:
        for cell in np.flatnonzero(puzzle):
            smaller = puzzle.copy()
            smaller[cell] = 0
            assert len(backtracked_solutions(smaller, 2, 3)) == 2


@pytest.mark.parametrize(
    ("size", "count", "num_empty", "message"),
    [
        (9, 5, 70, "--num-empty 70: a 9x9 Sudoku with one solution has 1 to 64 empty cells; use --num-empty 64"),
        (9, 5, 0, "--num-empty 0: .* use --num-empty 1 "),
        (6, 5, 28, r"--num-empty 28: \d+ of the last 512 6x6 grids reach it.*use --num-empty 2\d"),
        (4, 3000, 8, r"only \d+ of 3000 different 4x4 puzzles with 8 empty cells were generated.*use fewer"),
    ],
)
def test_puzzles_that_cannot_be_generated_are_refused_with_a_remedy(size, count, num_empty, message):
    with pytest.raises(UserError, match=message):
        made(size, count, num_empty)


def test_fingerprints_part_4x4_puzzles_exactly_as_all_their_symmetries_do():
    geometry = GEOMETRIES[4]
    puzzles = dig(random_grids(400, geometry, np.random.default_rng(3)), 8, geometry, np.random.default_rng(4))[0]
    orders = line_orders(2, 2)
    assert len(orders) == 8
    digit_maps = [np.array([0, *order]) for order in permutations(range(1, 5))]
    weights = 5 ** np.arange(16)

    def least(puzzle):
        grid = puzzle.reshape(4, 4)
        placed = [each[rows][:, cols].ravel() for each in (grid, grid.T) for rows in orders for cols in orders]
        return min((digit_map[np.array(placed)] @ weights).min() for digit_map in digit_maps)

    canonical = [least(puzzle) for puzzle in puzzles]
    marks = fingerprints(puzzles, geometry).tolist()
    pairs = set(zip(canonical, marks, strict=True))
    assert 100 < len(set(canonical)) == len(pairs) == len(set(marks)) < 400


def test_fingerprints_differ_under_transposition_where_it_is_no_symmetry():
    """Two givens in one row and two in one column: the same Sudoku for square boxes, not for boxes of 2 x 3."""
    for size, alike in ((4, True), (6, False), (9, True)):
        in_row, in_col = np.zeros((2, size, size), np.uint8)
        in_row[0, [0, size - 1]] = in_col[[0, size - 1], 0] = [1, 2]
        marks = fingerprints(np.stack([in_row.ravel(), in_col.ravel()]), GEOMETRIES[size])
        assert (marks[0] == marks[1]) == alike


@pytest.mark.parametrize(("size", "num_empty"), [(4, 8), (6, 18), (9, 50)])
def test_augmentation_keeps_the_puzzle_with_its_solution_and_the_fingerprint(size, num_empty):
    geometry = GEOMETRIES[size]
    originals = made(size, 30, num_empty)
    repeated = [np.repeat(array, 40, axis=0) for array in originals]
    puzzles, solutions = augment(*repeated, geometry, np.random.default_rng(5))
    marks = fingerprints(originals.puzzles, geometry)
    assert puzzles.dtype == solutions.dtype == np.uint8
    assert is_solution(solutions, geometry).all()
    assert ((puzzles == 0) | (puzzles == solutions)).all()
    assert ((puzzles == 0).sum(axis=1) == num_empty).all()
    assert (fingerprints(puzzles, geometry) == np.repeat(marks, 40)).all()
    assert len(np.unique(puzzles, axis=0)) > 0.9 * len(puzzles)
    # Every digit and every place of the first cell is met, so no kind of move is missing.
    assert all(len(np.unique(puzzles[:, cell])) == size + 1 for cell in (0, geometry.cells - 1))
    assert len(set(marks.tolist())) == len(marks)
    one_less = originals.puzzles.copy()
    one_less[np.arange(30), np.argmax(one_less > 0, axis=1)] = 0
    assert not np.isin(fingerprints(one_less, geometry), marks).any()


def test_augmentation_draws_every_symmetry_of_4x4():
    """2 transposes x 8 row orders x 8 column orders x 24 digit orders, of a puzzle that none of them maps to itself."""
    geometry = GEOMETRIES[4]
    original = made(4, 1, 8)
    puzzles, _ = augment(*(np.repeat(array, 60_000, axis=0) for array in original), geometry, np.random.default_rng(6))
    assert len(np.unique(puzzles, axis=0)) == 2 * 8 * 8 * 24


# ---- difficulty


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
        lowest = min(options[cell])
        both = 1
        for digits in ({lowest}, options[cell] - {lowest}):
            both += tree([set(each) if other != cell else set(digits) for other, each in enumerate(options)])
        return both

    return tree([{int(digit)} if digit else set(range(1, geometry.size + 1)) for digit in puzzle])


@pytest.mark.parametrize(("size", "count"), [(9, 24), (6, 60)])
def test_a_rating_is_the_number_of_guesses_of_its_definition(size, count):
    geometry = GEOMETRIES[size]
    rng = np.random.default_rng(5)
    puzzles, _ = dig(random_grids(count, geometry, rng), geometry.cells, geometry, rng)
    found = ratings(puzzles, geometry)
    assert found.max() > 0
    assert found.tolist() == [guesses_by_hand(puzzle, geometry) for puzzle in puzzles]


@pytest.mark.campaign
def test_easier_puzzles_are_left_out_with_any_number_of_processes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sudoku_generator, "BATCH", 256)
    for count in (3, 1):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)), raising=False)
        options = {"size": 6, "num_train": 30, "num_test": 10, "min_difficulty": 2, "num_aug": 1}
        main(SudokuData(output_dir=tmp_path / f"{count}", **options))
    assert len({record_of(each)["content_sha256"] for each in tmp_path.iterdir()}) == 1
    out = capsys.readouterr().out
    for split, number in (("train", 30), ("test", 10)):
        puzzles = load_split(tmp_path / "1", split)
        grids = grids_of(puzzles.inputs[puzzles.group_indices[:-1]])
        found = [guesses_by_hand(grid, GEOMETRIES[6]) for grid in grids]
        assert len(found) == number and min(found) >= 2
        words = f"{min(found)} to {max(found)} guesses, mean {np.mean(found):.1f}, median {np.median(found):g}, 100.0%"
        assert f"{split} difficulty: {words} need one\n" in out


def test_both_ratings_of_a_table_are_shown(tmp_path, capsys):
    tables = write_tables(tmp_path / "csv", sudoku_rows()[:30], sudoku_rows()[30:])
    main(SudokuData(output_dir=tmp_path / "set", source=str(tables), min_difficulty=4))
    puzzles = grids_of(load_split(tmp_path / "set", "train").inputs)
    found = [guesses_by_hand(puzzle, GEOMETRIES[9]) for puzzle in puzzles]
    out = capsys.readouterr().out
    assert f"train difficulty: {describe_guesses(np.array(found))}\n" in out
    assert "train rating in the table: 4 to 29, mean 16.5, median 16.5\n" in out


@pytest.mark.slow
def test_a_difficulty_that_cannot_be_reached_is_refused_with_a_remedy(tmp_path, capsys):
    for arguments, message in (
        (["--size", "4", "--min-difficulty", "1"], "--min-difficulty 1: 0 of 4096 random 4x4 puzzles are that hard"),
        (["--size", "6", "--min-difficulty", "9", "--num-empty", "20"], "use a lower one or omit --num-empty"),
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
    record = record_of(tmp_path / "set")
    assert record["content_sha256"] == content
    assert list(record["recipe"]) == [
        "maker", "maker_version", "size", "num_train", "num_test", "num_empty", "num_aug", "seed",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["train", "test"])
def test_a_puzzle_with_two_solutions_is_named_by_its_line_and_nothing_is_written(tmp_path, name):
    rows = list(sudoku_rows())
    source, puzzle, answer, rating = rows[16].split(",")
    # Without givens in the first three rows, these may be exchanged at will within their columns.
    rows[16] = ",".join([source, "." * 27 + puzzle[27:], answer, rating])
    tables = write_tables(tmp_path / "csv", *(rows if name == split else sudoku_rows() for split in ("train", "test")))
    with pytest.raises(UserError) as caught:
        main(SudokuData(output_dir=tmp_path / "set", source=str(tables)))
    assert f"{tables / name}.csv line 18: the question has more than one solution; correct or" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["csv"]
    # Rows that are not used are not solved: it takes minutes for the millions of the public tables.
    main(SudokuData(output_dir=tmp_path / "set", source=str(tables), min_difficulty=17))
    assert load_split(tmp_path / "set", name).num_groups == 23


# ---- text and tokens


def test_parse_reads_what_is_drawn_and_what_people_type():
    typed = "53. .7. ...  6.. 195 ...\n.98 ... .6." + "0" * 54
    for size, text in ((4, "1.......0.......\n"), (6, "." * 35 + "6"), (9, typed)):
        grid, geometry = parse(text)
        assert geometry == GEOMETRIES[size]
        assert (parse(grid_text(SudokuKind(geometry).drawing, grid).plain)[0] == grid).all()
    assert grid[:5].tolist() == [5, 3, 0, 0, 7]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("." * 80, r"the Sudoku has 80 cells, expected one of 16 \(4x4\), 36 \(6x6\), 81 \(9x9\); write '\.'"),
        ("", "the Sudoku has 0 cells"),
        ("12x4" + "." * 12, "'x' at cell 3 of the Sudoku is neither a digit nor '.'"),
        ("7" + "." * 35, "digit 7 in a 6x6 Sudoku; use digits 1 to 6"),
        ("5...5" + "." * 76, "digit 5 more than once in row 1"),
        ("." * 9 + ("." * 8 + "5") * 2 + "." * 54, "digit 5 more than once in column 9"),
        ("1....1" + "." * 10, "digit 1 more than once in box 1"),
    ],
)
def test_parse_names_the_mistake(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


def test_tokens_are_the_published_ones():
    grid = np.arange(10, dtype=np.uint8)
    assert tokens_of(grid).tolist() == list(range(1, 11))
    assert (grids_of(tokens_of(grid)) == grid).all()
    assert grids_of(np.array([0, 1, 10])).tolist() == [0, 0, 9]
    assert GEOMETRIES[9].vocab_size == 11
