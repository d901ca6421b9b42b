"""Perfect mazes: every one is a spanning tree of its rooms, all trees are as likely, and paths keep to their bounds."""

import numpy as np
import pytest

from train_jax.errors import UserError
from train_jax.tasks.puzzles.maze.generator import generate, spanning_trees
from train_jax.tasks.puzzles.maze.grid import are_shortest_paths, search


def silent(*_):
    pass


@pytest.mark.parametrize("size", [5, 8, 11])
def test_a_perfect_maze_is_one_tree_of_all_rooms(size):
    """As many passages as a tree has, and all cells reached from the first one by a search with a list."""
    rooms = (size + 1) // 2
    mazes = spanning_trees(200, size, np.random.default_rng(1))
    assert mazes[:, : 2 * rooms : 2, : 2 * rooms : 2].all()
    assert (mazes.sum(axis=(1, 2)) == 2 * rooms**2 - 1).all()
    assert not mazes[:, 1::2, 1::2].any() and (size % 2 or not (mazes[:, -1].any() or mazes[:, :, -1].any()))
    for maze in mazes:
        reached, todo = {(0, 0)}, [(0, 0)]
        while todo:
            row, col = todo.pop()
            for cell in ((row - 1, col), (row + 1, col), (row, col - 1), (row, col + 1)):
                if cell not in reached and min(cell) >= 0 and max(cell) < size and maze[cell]:
                    reached.add(cell)
                    todo.append(cell)
        assert len(reached) == maze.sum()


def test_every_spanning_tree_of_four_rooms_is_as_likely():
    mazes = spanning_trees(4000, 4, np.random.default_rng(0))
    _, counts = np.unique(mazes.reshape(4000, -1), axis=0, return_counts=True)
    assert len(counts) == 4 and (abs(counts - 1000) < 150).all()


def test_the_path_of_a_perfect_maze_is_the_only_one_and_within_its_bounds():
    mazes = generate(300, 12, 10, "perfect", np.random.default_rng(0), silent, max_path=20)
    paths = search(mazes.inputs)
    assert paths.unique.all() and paths.steps.min() == 11 and paths.steps.max() == 20
    assert are_shortest_paths(*mazes, paths).all()
    with pytest.raises(UserError, match=r"more than 60 steps and at most 61 were generated.*use a lower --min-path"):
        generate(10, 5, 60, "perfect", np.random.default_rng(0), silent, max_path=61)
