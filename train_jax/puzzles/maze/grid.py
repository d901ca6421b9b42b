"""Mazes: squares of walls and open cells with a start and a goal: text and tokens, shortest paths, symmetries.

In this package a maze is an array of `size * size` tokens in row-major order. A step goes up, down, left or right; a
path of k steps has k - 1 cells between start and goal. The vocabulary is that of the published Maze-Hard data set.

Shortest paths are found independently of the generator: breadth-first with lists of cells, over many mazes at once. The
generator uses bit boards instead, so that the two do not share a mistake."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, UInt8, UInt64

from train_jax.errors import UserError
from train_jax.puzzles.kind import Symmetries, Tokens, Words
from train_jax.puzzles.symmetries import TURNS, cell_orders, mix, turned

PAD, WALL, OPEN, START, GOAL, PATH = range(6)
CHARACTERS = "?# SGo"
"""The character of every token. Inputs contain no path token, and mazes no padding."""
VOCAB_SIZE = len(CHARACTERS)
SMALLEST = 4
LARGEST = 50
"""Bounds of the number of rows."""


class Mazes(NamedTuple):
    """Mazes, and the same mazes with the path from start to goal marked."""

    inputs: UInt8[np.ndarray, "n cells"]
    solutions: UInt8[np.ndarray, "n cells"]


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
    """Returns a mask of the rows that consist of walls, open cells, one start and one goal."""
    good = ((inputs >= WALL) & (inputs <= GOAL)).all(axis=1)
    for token in (START, GOAL):
        good &= (inputs == token).sum(axis=1) == 1
    return good


def keeps_inputs(
    inputs: Integer[np.ndarray, "n cells"], answers: Integer[np.ndarray, "n cells"]
) -> Bool[np.ndarray, "n"]:
    """Returns a mask of the answers that differ from their input only by open cells that became path."""
    return ((answers == inputs) | ((inputs == OPEN) & (answers == PATH))).all(axis=1)


SEARCHED_AT_ONCE = 512
"""Number of mazes that are searched together; their distances fit into the cache."""


class Paths(NamedTuple):
    """The result of a search from the start, for every maze."""

    steps: Integer[np.ndarray, "n"]
    """Length of a shortest path to the goal; -1 if there is none."""
    unique: Bool[np.ndarray, "n"]
    """True if there is exactly one shortest path."""
    distances: Integer[np.ndarray, "n cells"]
    """Steps from the start; -1 for cells that cannot be reached."""


def search(inputs: UInt8[np.ndarray, "n cells"]) -> Paths:
    """Searches every maze from its start. Every maze must have one start and one goal."""
    blocks = [_search_block(inputs[i : i + SEARCHED_AT_ONCE]) for i in range(0, len(inputs), SEARCHED_AT_ONCE)]
    empty = (np.empty(0, np.int16), np.empty(0, bool), np.empty((0, inputs.shape[1]), np.int16))
    return Paths(*(np.concatenate(arrays) for arrays in zip(empty, *blocks, strict=True)))


def _search_block(inputs: UInt8[np.ndarray, "n cells"]) -> Paths:
    n = len(inputs)
    size = round(inputs.shape[1] ** 0.5)
    walled = np.full((n, size + 2, size + 2), WALL, np.uint8)
    walled[:, 1:-1, 1:-1] = inputs.reshape(n, size, size)
    cells = walled.ravel()
    width = size + 2
    distances = np.where(cells == WALL, -2, -1).astype(np.int16)
    ways = np.zeros(len(cells), np.uint8)
    frontier = np.flatnonzero(cells == START)
    distances[frontier], ways[frontier] = 0, 1
    step = 0
    while len(frontier):
        step += 1
        onward = (frontier[:, None] + np.array([-width, -1, 1, width])).ravel()
        fresh = distances[onward] == -1
        reached = onward[fresh]
        distances[reached] = step
        np.add.at(ways, reached, np.repeat(ways[frontier], 4)[fresh])
        frontier = np.unique(reached)
        ways[frontier] = np.minimum(ways[frontier], 2)
    goals = np.flatnonzero(cells == GOAL)
    inner = np.maximum(distances, -1).reshape(walled.shape)[:, 1:-1, 1:-1].reshape(n, -1)
    return Paths(np.maximum(distances[goals], -1), ways[goals] == 1, inner)


def on_shortest_paths(inputs: UInt8[np.ndarray, "n cells"]) -> UInt8[np.ndarray, "n cells"]:
    """Marks every cell that is on a shortest path. If there is only one shortest path, this is the solution."""
    there = search(inputs)
    exchanged = np.where(inputs == START, GOAL, np.where(inputs == GOAL, START, inputs)).astype(np.uint8)
    back = search(exchanged)
    steps = there.steps[:, None]
    marked = (there.distances >= 0) & (back.distances >= 0) & (there.distances + back.distances == steps)
    return np.where(marked & (inputs == OPEN), np.uint8(PATH), inputs)


def are_shortest_paths(
    inputs: UInt8[np.ndarray, "n cells"], answers: Integer[np.ndarray, "n cells"], paths: Paths
) -> Bool[np.ndarray, "n"]:
    """Returns a mask of the answers that only mark one shortest path; `paths` is the result of `search`."""
    size = round(inputs.shape[1] ** 0.5)
    on_path = (answers == PATH) | (answers == START) | (answers == GOAL)
    good = keeps_inputs(inputs, answers) & (paths.steps > 0) & (on_path.sum(axis=1) == paths.steps + 1)
    # The number of marked cells is that of a shortest path. So they form one exactly if every distance occurs and
    # consecutive cells touch. An unreachable cell is clipped to distance 0, a farther one to the longest distance;
    # then another distance has no cell.
    maze, cell = np.nonzero(on_path & good[:, None])
    longest = int(paths.steps.max(initial=0))
    at_distance = np.full((len(inputs), longest + 1), -1)
    at_distance[maze, np.clip(paths.distances[maze, cell], 0, longest)] = cell
    due = np.arange(longest + 1) <= paths.steps[:, None]
    rows, cols = np.divmod(at_distance, size)
    touches = np.abs(np.diff(rows, axis=1)) + np.abs(np.diff(cols, axis=1)) == 1
    return good & ((at_distance >= 0) | ~due).all(axis=1) & (touches | ~due[:, 1:]).all(axis=1)


HASHED_AT_ONCE = 1024


def all_turns(mazes: UInt8[np.ndarray, "n cells"]) -> UInt8[np.ndarray, "n 8 cells"]:
    """Applies the eight turns to every maze, in the order of the published builder; the first is the identity."""
    return mazes[:, cell_orders(round(mazes.shape[1] ** 0.5))]


def transform_tokens(inputs: Tokens, labels: Tokens, words: Words) -> tuple[Tokens, Tokens]:
    """Transforms every example of a batch by the turn that its random words select, all turns equally likely."""
    size = round(inputs.shape[1] ** 0.5)
    turns = _turns(words)
    new_inputs = np.empty_like(inputs)
    new_labels = np.empty_like(labels)
    for turn in range(len(TURNS)):
        rows = np.flatnonzero(turns == turn)
        for tokens, new in ((inputs, new_inputs), (labels, new_labels)):
            new[rows] = turned(tokens[rows].reshape(-1, size, size), turn).reshape(-1, size**2)
    return new_inputs, new_labels


def symmetries_of(words: Words, size: int) -> Symmetries:
    """Returns the symmetries of `transform_tokens`."""
    turns = _turns(words)
    tokens = np.broadcast_to(np.arange(VOCAB_SIZE), (len(turns), VOCAB_SIZE))
    return Symmetries(cell_orders(size)[turns], tokens)


def _turns(words: Words) -> Integer[np.ndarray, "n"]:
    return (words[0] >> np.uint64(61)).astype(np.intp)


@lru_cache
def _cell_numbers(size: int) -> UInt64[np.ndarray, "cells vocab"]:
    """Returns a random number for every token in every cell (Zobrist hashing); start and goal share their number."""
    rng = np.random.Generator(np.random.Philox(key=size))
    numbers = rng.integers(2**64, size=(size**2, VOCAB_SIZE), dtype=np.uint64)
    numbers[:, GOAL] = numbers[:, START]
    return numbers


def fingerprints(inputs: UInt8[np.ndarray, "n cells"]) -> UInt64[np.ndarray, "n"]:
    """Returns a hash for every maze, equal for two mazes that a turn makes equal, up to an exchange of start and goal.

    The reversed path is the same path, so such mazes count as equivalent when train and test splits are compared. Two
    other mazes have equal hashes with probability 2**-64.
    """
    blocks = [_fingerprint_block(inputs[i : i + HASHED_AT_ONCE]) for i in range(0, len(inputs), HASHED_AT_ONCE)]
    return np.concatenate([np.empty(0, np.uint64), *blocks])


def _fingerprint_block(inputs: Integer[np.ndarray, "n cells"]) -> UInt64[np.ndarray, "n"]:
    size = round(inputs.shape[1] ** 0.5)
    numbers = _cell_numbers(size)
    of_turn = np.zeros((len(cell_orders(size)), len(inputs)), np.uint64)
    for turn, order in enumerate(cell_orders(size)):
        # Transforming the maze is equivalent to transforming the numbers by the inverse.
        for cell, own in enumerate(order):
            of_turn[turn] += numbers[cell][inputs[:, own]]
    return mix(of_turn).min(axis=0)
