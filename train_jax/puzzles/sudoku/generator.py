"""Generates Sudokus with exactly one solution, no two of them equivalent, from a seed."""

import collections
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Integer, UInt8

from train_jax.errors import UserError
from train_jax.puzzles.sudoku.grid import Geometry
from train_jax.puzzles.sudoku.solver import (
    all_digits,
    candidates_of,
    digits_of,
    is_single,
    ratings,
    search,
    settle,
)
from train_jax.puzzles.sudoku.symmetry import fingerprints
from train_jax.puzzles.symmetries import first_of_each
from train_jax.runtime.backend import cores
from train_jax.storage.new_dataset import Progress

FEWEST_GIVENS = {4: 4, 6: 8, 9: 17}
"""Fewest givens with which a Sudoku of this size can have only one solution (9x9: McGuire et al., arXiv 1201.0749)."""

BATCH = 4096
SMALLEST_BATCH = 512
LEAST_YIELD = 0.02
"""The generator stops with an error if less than this share of a batch of grids gives new puzzles."""
RAREST = 4096
"""The generator stops with an error if fewer than one random puzzle in this many reaches `min_difficulty`."""


class Originals(NamedTuple):
    """Puzzles and their solutions, before any augmentation."""

    puzzles: UInt8[np.ndarray, "n cells"]
    solutions: UInt8[np.ndarray, "n cells"]


def generate(
    count: int,
    num_empty: int | None,
    geometry: Geometry,
    rng: np.random.Generator,
    *,
    min_difficulty: int = 0,
    progress: Progress,
) -> Originals:
    """Generates `count` puzzles with one solution and `num_empty` empty cells each, no two equivalent.

    If `num_empty` is None, as many cells are emptied as each grid allows. Every puzzle needs at least `min_difficulty`
    guesses (`solver.py`). Raises `UserError` if not enough such puzzles can be generated.
    """
    most_empty = geometry.cells - FEWEST_GIVENS.get(geometry.size, 1)
    if num_empty is not None and not 1 <= num_empty <= most_empty:
        raise UserError(
            f"--num-empty {num_empty}: a {geometry} Sudoku with one solution has 1 to {most_empty} empty cells; use "
            f"--num-empty {min(max(num_empty, 1), most_empty)} or a number that is easier to reach"
        )
    parts = [Originals(*[np.empty((0, geometry.cells), np.uint8)] * 2)]
    known = np.empty(0, np.uint64)
    tried = hard = 0
    with contextlib.closing(_rated_batches(num_empty, geometry, rng)) as rated_batches:
        while len(known) < count:
            wanted = count - len(known)
            tries = BATCH if min_difficulty else min(BATCH, max(SMALLEST_BATCH, wanted + wanted // 16))
            batch = next(rated_batches) if min_difficulty else _dug(tries, num_empty, geometry, rng)
            good = np.flatnonzero(batch.empties == num_empty) if num_empty else np.arange(tries)
            if min_difficulty:
                rated = batch.ratings[good]
                tried = tried + tries
                hard = hard + int((rated >= min_difficulty).sum())
                if hard * RAREST < tried:
                    raise _too_hard(min_difficulty, hard, tried, rated, num_empty, geometry)
                good = good[rated >= min_difficulty]
            marks = fingerprints(batch.puzzles[good], geometry)
            fresh = np.flatnonzero(first_of_each(marks, known=known))[:wanted]
            if len(fresh) < min(wanted, 1 if min_difficulty else LEAST_YIELD * tries):
                raise _exhausted(len(known) + len(fresh), count, num_empty, min_difficulty, geometry, batch.empties)
            parts.append(Originals(batch.puzzles[good][fresh], batch.grids[good][fresh]))
            known = np.concatenate([known, marks[fresh]])
            progress(f"{geometry} puzzles", len(known), count)
    return Originals(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


class _Dug(NamedTuple):
    """Random grids, the puzzles made from them, the number of emptied cells, and the ratings if they were requested."""

    grids: UInt8[np.ndarray, "n cells"]
    puzzles: UInt8[np.ndarray, "n cells"]
    empties: Integer[np.ndarray, "n"]
    ratings: Integer[np.ndarray, "n"]


def _dug(
    tries: int, num_empty: int | None, geometry: Geometry, rng: np.random.Generator, *, rated: bool = False
) -> _Dug:
    grids = random_grids(tries, geometry, rng)
    puzzles, empties = dig(grids, num_empty or geometry.cells, geometry, rng)
    return _Dug(grids, puzzles, empties, ratings(puzzles, geometry) if rated else np.empty(0, int))


def _rated_batches(num_empty: int | None, geometry: Geometry, rng: np.random.Generator) -> Generator[_Dug, None, None]:
    """Yields batches without end, prefetched by one process per core; the puzzles do not depend on the core count."""
    count = cores()
    # Processes instead of threads, because the many small steps of the solver would compete for the GIL.
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), initializer=_end_with_parent)

    def start() -> Future[_Dug]:
        return pool.submit(_dug, BATCH, num_empty, geometry, rng.spawn(1)[0], rated=True)

    try:
        under_way = collections.deque(start() for _ in range(count))
        while True:
            yield under_way.popleft().result()
            under_way.append(start())
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Ends this worker process when the process that builds the data set ends."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _too_hard(
    min_difficulty: int,
    hard: int,
    tried: int,
    rated: Integer[np.ndarray, "n"],
    num_empty: int | None,
    geometry: Geometry,
) -> UserError:
    return UserError(
        f"--min-difficulty {min_difficulty}: {hard} of {tried} random {geometry} puzzles are that hard, expected at "
        f"least one in {RAREST} (the hardest of the last batch has {rated.max(initial=0)}); use a lower one"
        f"{' or omit --num-empty' if num_empty else ''}"
    )


def _exhausted(
    made: int, count: int, num_empty: int | None, min_difficulty: int, geometry: Geometry, empties
) -> UserError:
    if num_empty is not None and (empties == num_empty).mean() < LEAST_YIELD:
        usual = int(np.quantile(empties, 0.25))
        return UserError(
            f"--num-empty {num_empty}: {(empties == num_empty).sum()} of the last {len(empties)} {geometry} grids "
            f"reach it, expected at least {LEAST_YIELD:.0%}; use --num-empty {usual}"
        )
    empty = num_empty or "as many as possible"
    hard = f" and difficulty {min_difficulty}" if min_difficulty else ""
    return UserError(
        f"only {made} of {count} different {geometry} puzzles with {empty} empty cells{hard} were generated before "
        "new ones became rare; use fewer puzzles, another --num-empty or a larger --size"
    )


def random_grids(n: int, geometry: Geometry, rng: np.random.Generator) -> UInt8[np.ndarray, "n cells"]:
    """Generates random complete grids; every grid is possible.

    A grid that reaches a contradiction is restarted, because backtracking by one step would favour similar grids. The
    distribution is still not exactly uniform: among the 288 grids of size 4, the rarest occurred 0.7 times as often as
    the average and the most frequent 1.2 times.
    """
    grids = np.zeros((n, geometry.cells), np.uint8)
    blank = candidates_of(grids[:1], geometry)
    rows = np.arange(n)
    candidates = np.repeat(blank, n, axis=1)
    while len(rows):
        settled = settle(_guess(candidates, geometry, rng), geometry)
        grids[rows[settled.solved_rows]] = digits_of(settled.solved)
        contradicted = np.ones(len(rows), bool)
        contradicted[settled.solved_rows] = contradicted[settled.stalled_rows] = False
        rows = np.concatenate([rows[settled.stalled_rows], rows[contradicted]])
        candidates = np.concatenate([settled.stalled, np.repeat(blank, contradicted.sum(), axis=1)], axis=1)
    return grids


def _guess(candidates, geometry: Geometry, rng: np.random.Generator):
    """Sets a random one of the most constrained open cells of every puzzle to a random one of its candidates."""
    columns = np.arange(candidates.shape[1])
    freedom = np.where(is_single(candidates), 99, np.bitwise_count(candidates))
    cells = np.argmin(freedom + rng.random(candidates.shape, np.float32), axis=0)
    bits = np.uint16(1) << np.arange(geometry.size, dtype=np.uint16)[:, None]
    allowed = candidates[cells, columns] & bits != 0
    choice = np.argmax(allowed * (rng.random(allowed.shape, np.float32) + 1), axis=0)
    candidates = candidates.copy()
    candidates[cells, columns] = bits[choice, 0]
    return candidates


def dig(
    grids: UInt8[np.ndarray, "n cells"], num_empty: int, geometry: Geometry, rng: np.random.Generator
) -> tuple[UInt8[np.ndarray, "n cells"], Integer[np.ndarray, "n"]]:
    """Empties cells in random order while the solution is unique; returns the puzzles and their numbers of empty cells.

    A cell can be emptied if the puzzle has no solution with a different digit in this cell. A cell that cannot be
    emptied now cannot be emptied later, so one attempt per cell is enough.
    """
    n = len(grids)
    order = rng.permuted(np.tile(np.arange(geometry.cells), (n, 1)), axis=1)
    candidates = candidates_of(grids, geometry)
    empties = np.zeros(n, np.int64)
    for attempt in range(geometry.cells):
        rows = np.flatnonzero(empties < num_empty)
        if not len(rows):
            break
        cells = order[rows, attempt]
        trial = candidates[:, rows]
        trial[cells, np.arange(len(rows))] ^= all_digits(geometry)
        removable = search(trial, geometry, limit=1).counts == 0
        candidates[cells[removable], rows[removable]] = all_digits(geometry)
        empties[rows[removable]] += 1
    return np.where(is_single(candidates).T, grids, np.uint8(0)), empties
