"""What a maze is: a square of walls and open cells with a start and a goal, its text and its tokens in a data set.

Everywhere in these rooms a maze is a row of `size * size` tokens, read row by row. One moves up, down, left or right; a
path of k steps has k - 1 cells between start and goal. Vocabulary and numbers are those of the published Maze-Hard set.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, UInt8

from train_jax.errors import UserError

PAD, WALL, OPEN, START, GOAL, PATH = range(6)
CHARACTERS = "?# SGo"
"""By token; a input holds no path, and no maze any padding."""
VOCAB_SIZE = len(CHARACTERS)
SMALLEST, LARGEST = 4, 50
"""Rows of a maze."""


class Mazes(NamedTuple):
    """Questions, and the same with the path from start to goal marked."""

    inputs: UInt8[np.ndarray, "n cells"]
    solutions: UInt8[np.ndarray, "n cells"]


def check_size(size: int) -> None:
    """Raises `UserError` for mazes of so many rows."""
    if not SMALLEST <= size <= LARGEST:
        raise UserError(f"--size {size}: mazes have {SMALLEST} to {LARGEST} rows; use a size in that range")


def size_of(cells: int) -> int | None:
    """Rows of a maze of so many cells; None where there is none."""
    size = round(cells**0.5)
    return size if size * size == cells and SMALLEST <= size <= LARGEST else None


def tokens_of(text: str) -> UInt8[np.ndarray, "cells"]:
    """By character; what is none of a maze's becomes 255."""
    table = np.full(256, 255, np.uint8)
    table[[ord(character) for character in CHARACTERS[1:]]] = range(1, VOCAB_SIZE)
    return table[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def parse(text: str) -> UInt8[np.ndarray, "cells"]:
    """The maze that a text shows, a line for each row: '#' wall, ' ' or '.' open, 'S' start, 'G' goal.

    Raises `UserError` for anything else, for lines that make no square, and unless there is one start and one goal.
    """
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not SMALLEST <= len(lines) <= LARGEST:
        raise UserError(f"the maze has {len(lines)} lines, expected {SMALLEST} to {LARGEST}; write a line for each row")
    for number, line in enumerate(lines, 1):
        for position, character in enumerate(line, 1):
            if character not in "# .SG":
                raise UserError(
                    f"{character!r} at line {number}, column {position} of the maze; write '#' for a wall, ' ' or '.' "
                    "for an open cell, 'S' for the start and 'G' for the goal"
                )
        if len(line) != len(lines):
            raise UserError(
                f"line {number} of the maze has {len(line)} cells, expected {len(lines)}, as many as there are lines; "
                "write '.' for open cells where blanks at the end of a line get lost"
            )
    tokens = tokens_of("".join(lines).replace(".", " "))
    for token, name in ((START, "start"), (GOAL, "goal")):
        count = int((tokens == token).sum())
        if count != 1:
            raise UserError(f"the maze has {count} {name}s, expected one; write {CHARACTERS[token]!r} in one cell")
    return tokens


def text_of(maze: Integer[np.ndarray, "cells"]) -> str:
    """A line for each row; `parse` reads that of a input again."""
    size = round(len(maze) ** 0.5)
    characters = np.array(list(CHARACTERS))[maze].reshape(size, size)
    return "\n".join("".join(row) for row in characters)


def are_mazes(inputs: Integer[np.ndarray, "n cells"]) -> Bool[np.ndarray, "n"]:
    """Which are made of walls, open cells, one start and one goal."""
    good = ((inputs >= WALL) & (inputs <= GOAL)).all(axis=1)
    for token in (START, GOAL):
        good &= (inputs == token).sum(axis=1) == 1
    return good


def keeps_inputs(
    inputs: Integer[np.ndarray, "n cells"], answers: Integer[np.ndarray, "n cells"]
) -> Bool[np.ndarray, "n"]:
    """Which answers differ from their input by nothing but open cells that became path."""
    return ((answers == inputs) | ((inputs == OPEN) & (answers == PATH))).all(axis=1)
