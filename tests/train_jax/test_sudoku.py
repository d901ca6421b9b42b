"""Sudokus: one solution each (against another solver), symmetries (against every symmetry), text."""

from itertools import permutations
from operator import eq

import numpy as np
import pytest

from train_jax.errors import UserError
from train_jax.tasks.puzzles.sudoku.generator import dig, generate, random_grids
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES, is_solution, parse
from train_jax.tasks.puzzles.sudoku.solver import solve
from train_jax.tasks.puzzles.sudoku.symmetry import augment, fingerprints, line_orders

HARD_ONES = [
    "8..........36......7..9.2...5...7.......457.....1...3...1....68..85...1..9....4..",
    "..............3.85..1.2.......5.7.....4...1...9.......5......73..2.1........4...9",
]


def silent(*_):
    pass


def made(size: int, count: int, num_empty: int, seed: int = 0):
    return generate(count, num_empty, GEOMETRIES[size], np.random.default_rng(seed), progress=silent)


def backtracked_solutions(puzzle, box_rows: int, box_cols: int, limit: int = 2) -> list[list[int]]:
    """Solves by lists and sets; shares nothing with the solver under test."""
    size = box_rows * box_cols
    cells, solutions = range(size * size), []
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


@pytest.mark.parametrize(("size", "count", "num_empty"), [(4, 60, 8), (6, 20, 22), (9, 8, 50)])
def test_generated_puzzles_have_the_asked_empties_and_exactly_one_solution(size, count, num_empty):
    geometry = GEOMETRIES[size]
    originals = made(size, count, num_empty)
    assert originals.puzzles.shape == originals.solutions.shape == (count, geometry.cells)
    assert ((originals.puzzles == 0).sum(axis=1) == num_empty).all()
    for puzzle, solution in zip(originals.puzzles, originals.solutions, strict=True):
        assert backtracked_solutions(puzzle, geometry.box_rows, geometry.box_cols) == [solution.tolist()]


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


def test_solver_searches_where_singles_do_not_reach():
    grids = np.array([parse(text)[0] for text in HARD_ONES])
    solutions = solve(grids, GEOMETRIES[9])
    assert solutions.counts.tolist() == [1, 1]
    assert is_solution(solutions.grids, GEOMETRIES[9]).all()
    assert solve(np.zeros((1, 81), np.uint8), GEOMETRIES[9]).counts.tolist() == [2]


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


def moved_by_hand(puzzle: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Applies a few elementary symmetries, each written out; shares nothing with `augment`."""
    box_rows, box_cols = {4: (2, 2), 6: (2, 3), 9: (3, 3)}[size]
    grid = puzzle.reshape(size, size)
    for _ in range(12):
        bands = grid.reshape(-1, box_rows, size)
        stacks = grid.T.reshape(-1, box_cols, size)
        move = rng.integers(6)
        if move == 0:
            grid = bands[rng.permutation(len(bands))].reshape(size, size)
        elif move == 1:
            grid = stacks[rng.permutation(len(stacks))].reshape(size, size).T
        elif move == 2:
            grid = bands[:, rng.permutation(box_rows)].reshape(size, size)
        elif move == 3:
            grid = stacks[:, rng.permutation(box_cols)].reshape(size, size).T
        elif move == 4 and box_rows == box_cols:
            grid = grid.T
        else:
            grid = np.concatenate([[0], rng.permutation(size) + 1]).astype(np.uint8)[grid]
    return grid.ravel()


@pytest.mark.parametrize(("size", "num_empty"), [(4, 8), (6, 18), (9, 50)])
def test_fingerprint_is_the_same_under_every_symmetry_and_differs_between_puzzles(size, num_empty):
    geometry, rng = GEOMETRIES[size], np.random.default_rng(2)
    puzzles = made(size, 150, num_empty).puzzles
    marks = fingerprints(puzzles, geometry)
    transformed = np.array([moved_by_hand(puzzle, size, rng) for puzzle in puzzles])
    assert (transformed != puzzles).any(axis=1).mean() > 0.95
    assert (fingerprints(transformed, geometry) == marks).all()
    assert len(set(marks.tolist())) == len(puzzles)
    one_less = puzzles.copy()
    one_less[np.arange(len(puzzles)), np.argmax(puzzles > 0, axis=1)] = 0
    assert not np.isin(fingerprints(one_less, geometry), marks).any()


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
def test_augmentation_keeps_the_puzzle_with_its_solution(size, num_empty):
    geometry = GEOMETRIES[size]
    originals = made(size, 30, num_empty)
    repeated = [np.repeat(array, 40, axis=0) for array in originals]
    puzzles, solutions = augment(*repeated, geometry, np.random.default_rng(5))
    assert puzzles.dtype == solutions.dtype == np.uint8
    assert is_solution(solutions, geometry).all()
    assert ((puzzles == 0) | (puzzles == solutions)).all()
    assert ((puzzles == 0).sum(axis=1) == num_empty).all()
    assert (fingerprints(puzzles, geometry) == np.repeat(fingerprints(originals.puzzles, geometry), 40)).all()
    assert len(np.unique(puzzles, axis=0)) > 0.9 * len(puzzles)
    # Every digit and every place of the first cell is met, so no kind of move is missing.
    assert all(len(np.unique(puzzles[:, cell])) == size + 1 for cell in (0, geometry.cells - 1))


def test_augmentation_draws_every_symmetry_of_4x4():
    """2 transposes x 8 row orders x 8 column orders x 24 digit orders, of a puzzle that none of them maps to itself."""
    geometry = GEOMETRIES[4]
    original = made(4, 1, 8)
    puzzles, _ = augment(*(np.repeat(array, 60_000, axis=0) for array in original), geometry, np.random.default_rng(6))
    assert len(np.unique(puzzles, axis=0)) == 2 * 8 * 8 * 24
