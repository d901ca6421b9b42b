"""Computes shortest paths in mazes and checks solutions, independently of the generator.

The search is breadth-first with lists of cells, over many mazes at once. The generator uses bit boards instead, so that
the two do not share a mistake.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Integer, UInt8

from train_jax.tasks.puzzles.maze.grid import GOAL, OPEN, PATH, START, WALL, keeps_inputs

BLOCK = 512
"""Mazes searched together; their distances fit into the cache."""


class Paths(NamedTuple):
    """The result of a search from the start, for every maze."""

    steps: Integer[np.ndarray, "n"]
    """Length of a shortest path to the goal; -1 if there is none."""
    unique: Bool[np.ndarray, "n"]
    """Whether there is exactly one shortest path."""
    distances: Integer[np.ndarray, "n cells"]
    """Steps from the start; -1 for cells that cannot be reached."""


def search(inputs: UInt8[np.ndarray, "n cells"]) -> Paths:
    """Searches every maze from its start. Every maze must have one start and one goal."""
    blocks = [_search_block(inputs[i : i + BLOCK]) for i in range(0, len(inputs), BLOCK)]
    empty = (np.empty(0, np.int16), np.empty(0, bool), np.empty((0, inputs.shape[1]), np.int16))
    return Paths(*(np.concatenate(arrays) for arrays in zip(empty, *blocks, strict=True)))


def _search_block(inputs: UInt8[np.ndarray, "n cells"]) -> Paths:
    n, size = len(inputs), round(inputs.shape[1] ** 0.5)
    walled = np.full((n, size + 2, size + 2), WALL, np.uint8)
    walled[:, 1:-1, 1:-1] = inputs.reshape(n, size, size)
    cells, width = walled.ravel(), size + 2
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
    """Returns which answers mark one shortest path and change nothing else; `paths` is the result of `search`."""
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
