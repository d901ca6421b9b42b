"""Mazes: squares of walls and open cells with a start and a goal, as text and as tokens.

In this package a maze is an array of `size * size` tokens in row-major order. A step goes up, down, left or right; a
path of k steps has k - 1 cells between start and goal. The vocabulary is that of the published Maze-Hard data set.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, UInt8

from train_jax.errors import UserError

PAD, WALL, OPEN, START, GOAL, PATH = range(6)
CHARACTERS = "?# SGo"
"""The character of every token. Inputs contain no path token, and mazes no padding."""
VOCAB_SIZE = len(CHARACTERS)
SMALLEST, LARGEST = 4, 50
"""Bounds of the number of rows."""


class Mazes(NamedTuple):
    """Mazes, and the same mazes with the path from start to goal marked."""

    inputs: UInt8[np.ndarray, "n cells"]
    solutions: UInt8[np.ndarray, "n cells"]


def check_size(size: int) -> None:
    """Raises `UserError` if `size` is out of range."""
    if not SMALLEST <= size <= LARGEST:
        raise UserError(f"--size {size}: mazes have {SMALLEST} to {LARGEST} rows; use a size in that range")


def size_of(cells: int) -> int | None:
    """Returns the number of rows of a maze with `cells` cells; None if there is no such maze."""
    size = round(cells**0.5)
    return size if size * size == cells and SMALLEST <= size <= LARGEST else None


def tokens_of(text: str) -> UInt8[np.ndarray, "cells"]:
    """Returns the token of every character; 255 for a character that does not occur in mazes."""
    table = np.full(256, 255, np.uint8)
    table[[ord(character) for character in CHARACTERS[1:]]] = range(1, VOCAB_SIZE)
    return table[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]


def parse(text: str) -> UInt8[np.ndarray, "cells"]:
    """Parses a maze, one line for each row: '#' wall, ' ' or '.' open, 'S' start, 'G' goal.

    Raises `UserError` for other characters, if the maze is not a square, or unless it has one start and one goal.
    """
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    if not SMALLEST <= len(lines) <= LARGEST:
        raise UserError(f"the maze has {len(lines)} lines, expected {SMALLEST} to {LARGEST}; write one line per row")
    for number, line in enumerate(lines, 1):
        for position, character in enumerate(line, 1):
            if character not in "# .SG":
                raise UserError(
                    f"{character!r} at line {number}, column {position} of the maze is invalid; write '#' for a wall, "
                    "' ' or '.' for an open cell, 'S' for the start and 'G' for the goal"
                )
        if len(line) != len(lines):
            raise UserError(
                f"line {number} of the maze has {len(line)} cells, expected {len(lines)}, the number of lines; "
                "write '.' for open cells at the end of a line, where blanks may be lost"
            )
    tokens = tokens_of("".join(lines).replace(".", " "))
    for token, name in ((START, "start"), (GOAL, "goal")):
        count = int((tokens == token).sum())
        if count != 1:
            raise UserError(f"the maze has {count} {name}s, expected one; write {CHARACTERS[token]!r} in one cell")
    return tokens


def text_of(maze: Integer[np.ndarray, "cells"]) -> str:
    """Formats a maze, one line per row, such that `parse` reads an input again."""
    size = round(len(maze) ** 0.5)
    characters = np.array(list(CHARACTERS))[maze].reshape(size, size)
    return "\n".join("".join(row) for row in characters)


def are_mazes(inputs: Integer[np.ndarray, "n cells"]) -> Bool[np.ndarray, "n"]:
    """Returns which rows consist of walls, open cells, one start and one goal."""
    good = ((inputs >= WALL) & (inputs <= GOAL)).all(axis=1)
    for token in (START, GOAL):
        good &= (inputs == token).sum(axis=1) == 1
    return good


def keeps_inputs(
    inputs: Integer[np.ndarray, "n cells"], answers: Integer[np.ndarray, "n cells"]
) -> Bool[np.ndarray, "n"]:
    """Returns which answers differ from their input only by open cells that became path."""
    return ((answers == inputs) | ((inputs == OPEN) & (answers == PATH))).all(axis=1)
