"""Mazes: solutions (against another search), both kinds, symmetries (against numpy's turns), text, judging paths."""

from collections import deque

import numpy as np
import pytest
from scipy import ndimage

from train_jax.errors import UserError
from train_jax.puzzles.maze import generator as maze_generator
from train_jax.puzzles.maze.generator import boards_of, cells_of, generate
from train_jax.puzzles.maze.grid import (
    GOAL,
    OPEN,
    PATH,
    START,
    WALL,
    Mazes,
    all_turns,
    are_shortest_paths,
    fingerprints,
    parse,
    search,
    text_of,
    tokens_of,
)
from train_jax.puzzles.symmetries import cell_orders

RING = """
######
#S...#
#.##.#
#.##G#
#....#
######
""".strip()
"""Two ways around a block, of four and of six steps."""


def made(size: int, count: int, min_path: int, kind="corridors", **options) -> Mazes:
    return generate(count, size, min_path, kind, np.random.default_rng(0), lambda *_: None, **options)


def walked(maze: np.ndarray) -> tuple[int, int]:
    """Steps and number of the shortest paths, by a queue and a dict of cells, sharing nothing with what is tested."""
    size = int(len(maze) ** 0.5)
    start, goal = (divmod(int(np.flatnonzero(maze == token)[0]), size) for token in (START, GOAL))
    distance = {start: 0}
    ways = {start: 1}
    queue = deque([start])
    while queue:
        row, col = cell = queue.popleft()
        for other in ((row - 1, col), (row + 1, col), (row, col - 1), (row, col + 1)):
            inside = 0 <= other[0] < size and 0 <= other[1] < size
            if not inside or maze[other[0] * size + other[1]] == WALL:
                continue
            if other not in distance:
                distance[other], ways[other] = distance[cell] + 1, 0
                queue.append(other)
            if distance[other] == distance[cell] + 1:
                ways[other] += ways[cell]
    return distance.get(goal, -1), ways.get(goal, 0)


@pytest.mark.parametrize(
    ("kind", "size", "count", "min_path"),
    [("corridors", 5, 60, 8), ("corridors", 10, 40, 29), ("corridors", 30, 6, 110), ("walls", 20, 60, 60)],
)
def test_the_solution_is_a_shortest_path_and_in_corridors_the_only_one(kind, size, count, min_path):
    mazes = made(size, count, min_path, kind)
    assert mazes.inputs.shape == mazes.solutions.shape == (count, size * size)
    for maze, solution in zip(*mazes, strict=True):
        steps, ways = walked(maze)
        assert (ways == 1 or kind == "walls") and steps > min_path
        assert (solution == PATH).sum() == steps - 1
    assert are_shortest_paths(*mazes, search(mazes.inputs)).all()


def test_walls_are_strewn_as_published():
    shares = 1 - maze_generator.random_walls(2000, 50, np.random.default_rng(0)).mean(axis=(1, 2))
    assert 0.26 < shares.min() < 0.31 and 0.49 < shares.max() < 0.54 and abs(shares.mean() - 0.4) < 0.01


def test_of_many_shortest_paths_walls_takes_the_first_of_up_left_down_and_right():
    is_open = boards_of(np.ones((2, 5, 5), bool))
    corners = np.zeros((2, 5, 5), bool)
    corners[0, 4, 4] = corners[1, 0, 0] = True
    paths = maze_generator._solved(is_open, boards_of(corners), boards_of(corners[::-1]))
    assert text_of(paths.solutions[0]).splitlines() == ["Goooo", "    o", "    o", "    o", "    S"]
    assert text_of(paths.solutions[1]).splitlines() == ["S    ", "o    ", "o    ", "o    ", "ooooG"]


def test_corridors_without_loops_are_trees_and_fill_the_square(monkeypatch):
    monkeypatch.setattr(maze_generator, "LOOPS", 0.0)
    ground = maze_generator.corridors(40, 12, np.random.default_rng(0))
    for cells in ground:
        assert loops(cells) == 0
        for row, col in np.argwhere(~cells):
            more = cells.copy()
            more[row, col] = True
            assert loops(more) > 0, "a cell that joins no tree to itself is a wall"


def loops(cells: np.ndarray) -> int:
    """A forest has as many edges as cells, less one for each tree."""
    edges = (cells[1:] & cells[:-1]).sum() + (cells[:, 1:] & cells[:, :-1]).sum()
    return int(edges - cells.sum() + components(cells))


def components(cells: np.ndarray) -> int:
    return ndimage.label(cells)[1]


def test_floods_agree_with_the_search_on_distances_and_on_what_one_path_leads_to():
    rng = np.random.default_rng(3)
    ground = maze_generator.random_walls(50, 9, rng)
    start = maze_generator.any_cell(boards_of(ground), rng)
    inputs = np.where(ground, OPEN, WALL).astype(np.uint8)
    inputs[cells_of(start)] = START
    flooded = np.full(ground.shape, -1)
    before = one_way = start
    alone = cells_of(start)
    for step, wave in enumerate(maze_generator.waves(boards_of(ground), start)):
        if step:
            one_way = maze_generator.reached_one_way(wave, before, one_way)
            alone |= cells_of(one_way)
        before = wave
        flooded[cells_of(wave)] = step
    for maze, distances, unique in zip(inputs.reshape(50, -1), flooded, alone, strict=True):
        for cell in np.flatnonzero(maze == OPEN):
            other = maze.copy()
            other[cell] = GOAL
            steps, ways = walked(other)
            assert distances.ravel()[cell] == steps
            assert unique.ravel()[cell] == (ways == 1)
            paths = search(other[None])
            assert (paths.steps[0], paths.unique[0]) == (steps, ways == 1)


def test_fingerprints_are_the_same_under_every_turn_and_exchange_of_the_ends():
    inputs = made(10, 40, 15).inputs
    marks = fingerprints(inputs)
    assert len(set(marks.tolist())) == 40
    for turn in range(8):
        turned = all_turns(inputs)[:, turn]
        exchanged = np.where(turned == START, GOAL, np.where(turned == GOAL, START, turned)).astype(np.uint8)
        assert (fingerprints(turned) == marks).all() and (fingerprints(exchanged) == marks).all()
    changed = inputs.copy()
    changed[np.arange(40), np.argmax(inputs == OPEN, axis=1)] = WALL
    assert not np.isin(fingerprints(changed), marks).any()


def test_turns_are_the_published_ones():
    grid = np.arange(25).reshape(5, 5)
    quarter = np.rot90(grid)
    expected = [grid, quarter, np.rot90(grid, 2), np.rot90(grid, 3), np.fliplr(grid), np.flipud(grid), grid.T]
    expected.append(np.fliplr(quarter))
    assert [order.tolist() for order in cell_orders(5)] == [each.ravel().tolist() for each in expected]


def with_cells(maze: np.ndarray, **cells: str) -> np.ndarray:
    """`r2c4="o"`: that cell is a path cell."""
    changed = maze.copy()
    size = int(len(maze) ** 0.5)
    for place, character in cells.items():
        row, col = place[1:].split("c")
        changed[int(row) * size + int(col)] = tokens_of(character)[0]
    return changed


def test_the_second_opinion_knows_a_shortest_path_from_what_is_not():
    maze = parse(RING)
    paths = search(maze[None])
    assert (paths.steps[0], paths.unique[0]) == (5, True)
    right = with_cells(maze, r1c2="o", r1c3="o", r1c4="o", r2c4="o")
    wrong = {
        "the long way": with_cells(maze, r2c1="o", r3c1="o", r4c1="o", r4c2="o", r4c3="o", r4c4="o"),
        "both ways": with_cells(right, r2c1="o", r3c1="o", r4c1="o", r4c2="o", r4c3="o", r4c4="o"),
        "a gap": with_cells(right, r1c3=" "),
        "a gap, as many cells": with_cells(right, r1c3=" ", r4c1="o"),
        "nothing": maze,
        "through the wall": with_cells(maze, r2c1="o", r3c1="o", r3c2="o", r3c3="o"),
        "a wall gone": with_cells(right, r2c2=" "),
        "another start": with_cells(right, r1c1="o", r4c1="S"),
        "padding": with_cells(right, r0c0="?"),
    }
    assert are_shortest_paths(maze[None], right[None], paths).tolist() == [True]
    for what, answer in wrong.items():
        assert are_shortest_paths(maze[None], answer[None], paths).tolist() == [False], what
    cut_off = parse(RING.replace("S...", "S#..").replace("#....#", "##...#"))
    paths = search(cut_off[None])
    assert (paths.steps[0], paths.unique[0]) == (-1, False)
    assert not are_shortest_paths(cut_off[None], with_cells(cut_off, r1c3="o")[None], paths)[0]
    empty = search(np.empty((0, 36), np.uint8))
    assert len(empty.steps) == 0 and len(are_shortest_paths(*np.empty((2, 0, 36), np.uint8), empty)) == 0


def test_two_cells_as_near_that_do_not_touch_are_no_path():
    """The answer has as many cells as a shortest path, one at each distance, and is no path."""
    maze = np.full((7, 7), OPEN, np.uint8)
    maze[0, 0], maze[6, 6] = START, GOAL
    answer = maze.copy()
    for row, col in ((0, 1), (0, 2), (0, 3), (4, 0), (5, 0), (6, 0), (6, 1), (6, 2), (6, 3), (6, 4), (6, 5)):
        answer[row, col] = PATH
    paths = search(maze.reshape(1, -1))
    distances = paths.distances.reshape(7, 7)[(answer == PATH)]
    assert sorted(distances.tolist()) == list(range(1, 12)) and paths.steps[0] == 12
    assert not are_shortest_paths(maze.reshape(1, -1), answer.reshape(1, -1), paths)[0]


def test_parse_reads_what_text_of_writes_and_what_people_type():
    maze = made(8, 1, 10).inputs[0]
    assert tokens_of("# SGo").tolist() == [1, 2, 3, 4, 5], "the published ones"
    assert tokens_of("?x\xff\u2603").tolist() == [255] * 4
    assert (parse(text_of(maze)) == maze).all()
    assert (parse(text_of(maze).replace(" ", ".").replace("\n", "\r\n") + "\r\n") == maze).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the maze has 1 lines, expected 4 to 50"),
        ("\n" * 5, r"line 1 of the maze has 0 cells, expected 5, .* write '\.' for open cells at the end"),
        (RING.replace("#S...#", "#S... #"), "line 2 of the maze has 7 cells, expected 6"),
        (RING.replace("S", "x"), "'x' at line 2, column 2 of the maze is invalid; write '#' for a wall"),
        (RING.replace("S", "."), "the maze has 0 starts, expected one; write 'S' in one cell"),
        (RING.replace("....", ".GG."), "the maze has 3 goals, expected one"),
        ((("#" * 51) + "\n") * 51, "the maze has 51 lines, expected 4 to 50"),
    ],
)
def test_a_text_that_is_no_maze_is_an_error(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


@pytest.mark.parametrize("size", [5, 8, 11])
def test_a_perfect_maze_is_one_tree_of_all_rooms(size):
    """A perfect maze has as many passages as a tree, and is connected."""
    rooms = (size + 1) // 2
    mazes = maze_generator.spanning_trees(200, size, np.random.default_rng(1))
    assert mazes[:, : 2 * rooms : 2, : 2 * rooms : 2].all()
    assert (mazes.sum(axis=(1, 2)) == 2 * rooms**2 - 1).all()
    assert not mazes[:, 1::2, 1::2].any() and (size % 2 or not (mazes[:, -1].any() or mazes[:, :, -1].any()))
    assert all(components(maze) == 1 for maze in mazes)


def test_every_spanning_tree_of_four_rooms_is_as_likely():
    mazes = maze_generator.spanning_trees(4000, 4, np.random.default_rng(0))
    _, counts = np.unique(mazes.reshape(4000, -1), axis=0, return_counts=True)
    assert len(counts) == 4 and (abs(counts - 1000) < 150).all()


def test_the_path_of_a_perfect_maze_is_the_only_one_and_within_its_bounds():
    mazes = made(12, 300, 10, "perfect", max_path=20)
    paths = search(mazes.inputs)
    assert paths.unique.all() and paths.steps.min() == 11 and paths.steps.max() == 20
    assert are_shortest_paths(*mazes, paths).all()


def test_mazes_that_cannot_be_generated_are_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(maze_generator, "PATIENCE", 4096)
    for size, count, min_path, options, message in (
        (6, 5, 30, {}, r"0 of 5 mazes of 6x6 .* of more than 30 steps were generated in .*the longest path has 2\d"),
        (5, 50, 15, {}, r"mazes of 5x5 .* use a lower --min-path, fewer mazes or a larger --size"),
        (5, 10, 60, {"kind": "perfect", "max_path": 61}, "more than 60 steps and at most 61 were .*use a lower --min"),
    ):
        with pytest.raises(UserError, match=message):
            made(size, count, min_path, **options)
