"""Sudokus as text and as tokens: reading, drawing, mistakes."""

import numpy as np
import pytest

from train_jax.errors import UserError
from train_jax.report.terminal import grid_text
from train_jax.tasks.puzzles.sudoku.grid import (
    GEOMETRIES,
    geometry_of_size,
    grids_of,
    parse,
    tokens_of,
)
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind
from train_jax.tasks.puzzles.sudoku.solver import solve

EXAMPLE = """
53. .7. ...  6.. 195 ...  .98 ... .6.
8.. .6. ..3  4.. 8.3 ..1  7.. .2. ..6
.6. ... 28.  ... 419 ..5  ... .8. .79
"""

EXAMPLE_SOLUTION = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"


def drawn(grid, geometry):
    """The grid as `trm solve` prints it."""
    return grid_text(SudokuKind(geometry).drawing, grid).plain


def test_parse_reads_what_is_drawn_and_what_people_type():
    grid, geometry = parse(EXAMPLE)
    assert geometry == GEOMETRIES[9]
    assert grid[:5].tolist() == [5, 3, 0, 0, 7]
    solved = solve(grid[None], geometry)
    assert "".join(map(str, solved.grids[0])) == EXAMPLE_SOLUTION
    for size, text in ((4, "1.......0.......\n"), (6, "." * 35 + "6")):
        small, found = parse(text)
        assert found.size == size
        assert (parse(drawn(small, found))[0] == small).all()
    assert (parse(drawn(grid, geometry))[0] == grid).all()


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


def test_a_size_without_a_geometry_is_refused():
    with pytest.raises(UserError, match="a Sudoku of size 5 is not supported; use one of 4, 6, 9"):
        geometry_of_size(5)
