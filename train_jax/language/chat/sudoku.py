"""Sudokus of 4x4 cells in a chat.

The model calls `sudoku("…")`: a function that is exact while it is trained and measured, a puzzle model in `trm serve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import permutations, product
from random import Random
from typing import Any, ClassVar

from train_jax.errors import UserError
from train_jax.language.chat.conversations import Part
from train_jax.language.chat.problems import Problem, Problems, said, split_of

_SIZE = 4
_CELLS = 16


@cache
def solved_grids() -> tuple[str, ...]:
    """Returns all 288 solutions, as 16 digits."""
    rows = ["".join(order) for order in permutations("1234")]
    bands = [a + b for a, b in product(rows, rows) if len({*a[:2], *b[:2]}) == len({*a[2:], *b[2:]}) == _SIZE]
    return tuple(
        top + bottom
        for top, bottom in product(bands, bands)
        if all(len({*top[column::_SIZE], *bottom[column::_SIZE]}) == _SIZE for column in range(_SIZE))
    )


def solve(text: str) -> str | None:
    """Returns the only solution of a Sudoku, whose empty cells are dots, with `|` between lines; None without one."""
    cells = "".join(character for character in text if character in ".1234")
    found = [grid for grid in solved_grids() if _agrees(cells, grid)]
    return _in_lines(found[0]) if len(found) == 1 else None


def _agrees(cells: str, grid: str) -> bool:
    return len(cells) == _CELLS and all(given in (".", digit) for given, digit in zip(cells, grid, strict=True))


def _in_lines(cells: str) -> str:
    return "|".join(cells[first : first + _SIZE] for first in range(0, _CELLS, _SIZE))


class Sudoku(Problems):
    """A Sudoku with one solution, which the model asks for and repeats."""

    name = "sudoku"
    functions: ClassVar = {"sudoku": solve}
    OPTIONS: ClassVar[dict[str, Any]] = {"empty": 8}
    _QUESTIONS = ("Solve this Sudoku: {}", "{}", "Sudoku: {}", "What is the solution of {}?", "Can you solve {}")

    def items(self, count: int | None) -> Sequence[str]:
        if not 1 <= self.options["empty"] <= 10:
            raise UserError(f"the task sudoku has the option empty={self.options['empty']}; use 1 to 10")
        rng = Random(f"sudoku {self.options} {self.split} {self.seed}")
        items: dict[str, None] = {}
        misses = 0
        wanted = 1000 if count is None else count
        while len(items) < wanted and misses < 1000:
            puzzle = self._puzzle(rng)
            misses = misses + 1 if puzzle in items or split_of(puzzle) != self.split or solve(puzzle) is None else 0
            if not misses:
                items[puzzle] = None
        return list(items)

    def _puzzle(self, rng: Random) -> str:
        cells = list(rng.choice(solved_grids()))
        for place in rng.sample(range(_CELLS), self.options["empty"]):
            cells[place] = "."
        return _in_lines("".join(cells))

    def make(self, item: str, rng: Random) -> Problem:
        solution = str(solve(item))
        call = (Part("python", f'sudoku("{item}")'), Part("python_output", solution), solution)
        return said(rng.choice(self._QUESTIONS).format(item), *call)
