"""Generates mazes from a seed, no two equivalent, whose shortest path is longer than a bound.

There are three styles. `corridors` is a random forest of open cells, with a few more cells opened so that there are
loops. Start and goal are chosen such that there is exactly one shortest path, so exactly one answer is correct.
`perfect` is a random spanning tree of rooms: there is one path between any two open cells. `walls` is the published
procedure: 30 to 50 % of the cells are random walls. Such a maze has many shortest paths; its solution takes at every
step the first possible one of up, left, down and right.

The searches use bit boards: bit c of word r is cell (r, c), and the mazes are the last axis. One step of a search in
thousands of mazes is then a dozen operations on contiguous memory.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from jaxtyping import Bool, Integer, UInt64

from train_jax.errors import UserError
from train_jax.puzzles.maze.grid import GOAL, OPEN, PATH, START, WALL, Mazes, fingerprints
from train_jax.puzzles.symmetries import first_of_each
from train_jax.storage.new_dataset import Progress

Style = Literal["corridors", "perfect", "walls"]
Boards = UInt64[np.ndarray, "rows n"]

LOOPS = 0.02
"""Share of the cells of a `corridors` maze that are opened even if that closes a loop. A path of more than 110 steps
exists in 65 % of the 30x30 mazes without loops, in 38 % with this share and in 16 % with a share of 5 %."""
WALLS = (0.3, 0.5)
"""Bounds of the share of walls in a `walls` maze, which is drawn uniformly."""
ONE_PATH: tuple[Style, ...] = ("corridors", "perfect")
"""The styles whose mazes have exactly one shortest path."""
BATCH = 2048
LEAST_YIELD = 5e-4
"""The generator stops with an error if less than this share of `PATIENCE` mazes is new and has a long enough path."""
PATIENCE = 20_000
MOVES = ((-1, 0), (0, -1), (1, 0), (0, 1))
ONE = np.uint64(1)


def usual_min_path(size: int) -> int:
    """Returns the default of `min_path`: 110 for 30x30, as in the published set, scaled by the size to the power 1.2.

    It is 3 for 4x4, since only about 1 350 different 4x4 mazes have a longer path.
    """
    if size == 4:
        return 3
    return int(110 * (size / 30) ** 1.2)


def generate(
    count: int,
    size: int,
    min_path: int,
    style: Style,
    rng: np.random.Generator,
    progress: Progress,
    *,
    max_path: int | None = None,
) -> Mazes:
    """Generates `count` mazes, no two equivalent under a symmetry.

    Their shortest paths have more than `min_path` steps and at most `max_path` (None: any number). Raises `UserError`
    if not enough such mazes can be generated.
    """
    parts = [Mazes(*np.empty((2, 0, size * size), np.uint8))]
    known = np.empty(0, np.uint64)
    tried = 0
    tried_since = 0
    longest = 0
    while len(known) < count:
        cells = GROUND[style](BATCH, size, rng)
        mazes, reached = between_far_ends(
            boards_of(cells), min_path, only_one=style in ONE_PATH, rng=rng, max_path=max_path
        )
        marks = fingerprints(mazes.inputs)
        fresh = np.flatnonzero(first_of_each(marks, known=known))[: count - len(known)]
        parts.append(Mazes(*(array[fresh] for array in mazes)))
        known = np.concatenate([known, marks[fresh]])
        tried = tried + BATCH
        longest = max(longest, reached)
        tried_since = 0 if len(fresh) >= LEAST_YIELD * BATCH else tried_since + BATCH
        if tried_since > PATIENCE:
            raise UserError(
                f"only {len(known)} of {count} mazes of {size}x{size} with a shortest path of more than {min_path} "
                f"steps{'' if max_path is None else f' and at most {max_path}'} were generated in {tried:,} attempts, "
                f"the longest path has {longest}; use a lower --min-path, fewer mazes or a larger --size"
            )
        progress(f"{size}x{size} mazes", len(known), count)
    return Mazes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def corridors(n: int, size: int, rng: np.random.Generator) -> Bool[np.ndarray, "n size size"]:
    """Returns a mask of open cells: cells are opened in random order unless that closes a loop.

    Union-find keeps track of the trees of open cells, for all mazes at once, inside a frame of walls. A cell points to
    another cell of its tree, a root to itself and a wall to cell 0.
    """
    width = size + 2
    inner = (np.arange(1, size + 1)[:, None] * width + np.arange(1, size + 1)).ravel()
    order = rng.permuted(np.tile(inner, (n, 1)), axis=1) + np.arange(n)[:, None] * width**2
    pointers = np.zeros(n * width**2, np.intp)
    sizes = np.zeros(n * width**2, np.int32)
    nowhere = np.arange(n)[:, None] * width**2
    pointers[:] = np.repeat(nowhere, width**2)
    for cells in order.T:
        around = cells[:, None] + np.array([-width, -1, 1, width])
        roots = pointers[around]
        while ((above := pointers[roots]) != roots).any():
            roots = above
        pointers[around] = roots
        in_order = np.sort(roots, axis=1)
        twice = ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] > nowhere)).any(axis=1)
        cells = cells[~twice]
        roots = roots[~twice]
        own_nowhere = nowhere[~twice]
        weights = sizes[roots]
        heaviest = np.take_along_axis(roots, weights.argmax(axis=1)[:, None], axis=1)
        root = np.where(heaviest > own_nowhere, heaviest, cells[:, None])
        joined = roots > own_nowhere
        pointers[roots[joined]] = np.broadcast_to(root, roots.shape)[joined]
        pointers[cells] = root[:, 0]
        sizes[root[:, 0]] = 1 + weights.sum(axis=1)
    is_open = (pointers.reshape(n, -1) > nowhere).reshape(n, width, width)[:, 1:-1, 1:-1]
    return is_open | (rng.random(is_open.shape, np.float32) < LOOPS)


def spanning_trees(n: int, size: int, rng: np.random.Generator) -> Bool[np.ndarray, "n size size"]:
    """Returns a mask of open cells: rooms at every second row and column, joined to a random spanning tree.

    The cells between two rooms are opened in random order, each if it joins two trees (Kruskal's algorithm with random
    weights). The last row and the last column of an even size are walls.
    """
    rooms = (size + 1) // 2
    is_room = np.zeros((size, size), bool)
    is_room[: 2 * rooms : 2, : 2 * rooms : 2] = True
    numbers = np.arange(rooms**2).reshape(rooms, rooms)
    pairs = np.concatenate([np.stack((first.ravel(), second.ravel()), 1) for first, second in _adjacent(numbers)])
    rows, cols = np.divmod(pairs, rooms)
    between = rows.sum(axis=1) * size + cols.sum(axis=1)  # halfway between the cells (2 row, 2 column) of both rooms
    is_open = np.tile(is_room.ravel(), (n, 1))
    # A tree is identified by one of its rooms. Relabelling a whole tree is fast, because there are few rooms.
    trees = np.tile(np.arange(rooms**2, dtype=np.int16), (n, 1))
    mazes = np.arange(n)
    for edges in rng.permuted(np.tile(np.arange(len(pairs)), (n, 1)), axis=1).T:
        ours, theirs = (trees[mazes, pairs[edges, end]] for end in (0, 1))
        joins = np.flatnonzero(ours != theirs)
        is_open[joins, between[edges[joins]]] = True
        of_joined = trees[joins]
        trees[joins] = np.where(of_joined == theirs[joins, None], ours[joins, None], of_joined)
    return is_open.reshape(n, size, size)


def _adjacent(numbers: Integer[np.ndarray, "rows cols"]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Returns the numbers of all pairs of rooms that are one below the other, and side by side."""
    return (numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:])


def random_walls(n: int, size: int, rng: np.random.Generator) -> Bool[np.ndarray, "n size size"]:
    """Returns a mask of open cells, with a random share of walls in each maze."""
    shares = rng.uniform(*WALLS, size=(n, 1, 1)).astype(np.float32)
    return rng.random((n, size, size), np.float32) >= shares


GROUND: dict[str, Callable[[int, int, np.random.Generator], Bool[np.ndarray, "n size size"]]] = {
    "corridors": corridors,
    "perfect": spanning_trees,
    "walls": random_walls,
}


def boards_of(cells: Bool[np.ndarray, "n rows cols"]) -> Boards:
    return (cells * (ONE << np.arange(cells.shape[2], dtype=np.uint64))).sum(axis=2, dtype=np.uint64).T.copy()


def cells_of(boards: Boards) -> Bool[np.ndarray, "n rows cols"]:
    return (boards.T[:, :, None] >> np.arange(len(boards), dtype=np.uint64)) & ONE == 1


def beside(boards: Boards) -> tuple[Boards, Boards, Boards, Boards]:
    """Moves the cells by one step in each of the four directions."""
    down = np.zeros_like(boards)
    up = np.zeros_like(boards)
    down[1:] = boards[:-1]
    up[:-1] = boards[1:]
    return down, up, boards << ONE, boards >> ONE


def waves(is_open: Boards, start: Boards) -> Iterator[Boards]:
    """Yields the cells that are 0, 1, 2, … steps away from the start, until no maze has any."""
    left = is_open & ~start
    wave = start
    while wave.any():
        yield wave
        down, up, right, back = beside(wave)
        wave = (down | up | right | back) & left
        left = left & ~wave


def reached_one_way(wave: Boards, before: Boards, one_way: Boards) -> Boards:
    """Returns the cells of a wave with exactly one shortest path; `one_way` are these cells of the wave before."""
    once = np.zeros_like(wave)
    twice = np.zeros_like(wave)
    for board in beside(before):
        twice |= once & board
        once |= board
    down, up, right, back = beside(one_way)
    return wave & ~twice & (down | up | right | back)


def any_cell(boards: Boards, rng: np.random.Generator) -> Boards:
    """Returns a random cell of each board; an empty board stays empty."""
    cells = cells_of(boards)
    n = len(cells)
    size = len(boards)
    chosen = np.argmax(cells.reshape(n, size * size) * (1 - rng.random((n, size * size), np.float32)), axis=1)
    board = np.zeros_like(boards)
    board[chosen // size, np.arange(n)] = ONE << (chosen % size).astype(np.uint64)
    return board & boards


def between_far_ends(
    is_open: Boards, min_path: int, *, only_one: bool, rng: np.random.Generator, max_path: int | None = None
) -> tuple[Mazes, int]:
    """Returns the mazes with a path of more than `min_path` steps, with their solutions, and the longest distance.

    One end of the path is a cell at the largest distance from a random cell. The other end is drawn from the cells more
    than `min_path` and at most `max_path` steps away; with `only_one`, from those of them with a single shortest path.
    Which end is the start is random.
    """
    first = any_cell(is_open, rng)
    last = first
    for wave in waves(is_open, first):
        last = np.where(wave.any(axis=0), wave, last)
    end = any_cell(last, rng)
    eligible = np.zeros_like(end)
    before = one_way = end
    longest = 0
    for step, wave in enumerate(waves(is_open, end)):
        if only_one and step:
            one_way = reached_one_way(wave, before, one_way)
        before = wave
        longest = step
        if step > min_path and (max_path is None or step <= max_path):
            eligible |= one_way if only_one else wave
    good = eligible.any(axis=0)
    is_open = is_open[:, good]
    end = end[:, good]
    eligible = eligible[:, good]
    other = any_cell(eligible, rng)
    swapped = rng.integers(2, size=good.sum(), dtype=bool)
    start = np.where(swapped, other, end)
    goal = np.where(swapped, end, other)
    return _solved(is_open, start, goal), longest


def _solved(is_open: Boards, start: Boards, goal: Boards) -> Mazes:
    """Marks the path from the start that takes at every step the first neighbour, in `MOVES`, nearer to the goal."""
    n = is_open.shape[1]
    size = len(is_open)
    to_goal = np.full((n, size + 2, size + 2), -1, np.int16)
    for step, wave in enumerate(waves(is_open, goal)):
        to_goal[:, 1:-1, 1:-1][cells_of(wave)] = step
    inputs = np.full((n, size, size), WALL, np.uint8)
    for token, boards in ((OPEN, is_open), (START, start), (GOAL, goal)):
        inputs[cells_of(boards)] = token
    solutions = inputs.copy()
    rows, cols = _place_of(start)
    mazes = np.arange(n)
    left = to_goal[mazes, rows + 1, cols + 1]
    while len(mazes := mazes[left > 1]):
        rows = rows[left > 1]
        cols = cols[left > 1]
        left = left[left > 1] - 1
        nearer = [to_goal[mazes, rows + 1 + down, cols + 1 + right] == left for down, right in MOVES]
        first = np.argmax(nearer, axis=0)
        rows = rows + np.array(MOVES)[first, 0]
        cols = cols + np.array(MOVES)[first, 1]
        solutions[mazes, rows, cols] = PATH
    return Mazes(*(grids.reshape(n, size * size) for grids in (inputs, solutions)))


def _place_of(cell: Boards) -> tuple[Integer[np.ndarray, "n"], Integer[np.ndarray, "n"]]:
    """Returns the row and the column of the cell of each board; every board has one cell."""
    rows = np.argmax(cell > 0, axis=0)
    return rows, np.bitwise_count(cell.max(axis=0) - ONE).astype(np.intp)
