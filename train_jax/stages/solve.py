"""`trm solve RUN_DIR`: shows a trained model think on one Sudoku, ACT step by ACT step."""

import dataclasses
import os
import shutil
import sys
from typing import Annotated

import numpy as np
import tyro

from train_jax.errors import UserError
from train_jax.puzzles.format import Metadata, load_split
from train_jax.puzzles.sudoku import Geometry, grids_of, parse, tokens_of
from train_jax.puzzles.sudoku_solver import solve
from train_jax.report.terminal import thinking, verdict
from train_jax.report.trace import Trace, sudoku_of
from train_jax.restore import restore
from train_jax.thinking import think


@dataclasses.dataclass(frozen=True)
class Solve:
    """Show a run's newest checkpoint think on one Sudoku, with its averaged weights."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it."""
    puzzle: str | None = None
    """The Sudoku, row by row: 1 to 9 for a given, '.' or 0 for an empty cell; spaces and box lines are passed over."""
    index: int | None = None
    """Which puzzle of the test set to take instead, from 0; 0 if neither is given."""
    data_dir: str | None = None
    """Data set whose test set --index counts in; the run's own if not given."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A puzzle to think about, with what is known of it."""

    name: str
    geometry: Geometry
    grid: np.ndarray
    solution: np.ndarray | None
    unique: bool
    puzzle_identifier: int | None = None


def main(config: Solve) -> None:
    if config.puzzle is not None and (config.index is not None or config.data_dir is not None):
        other = "--index" if config.index is not None else "--data-dir"
        raise UserError(f"--puzzle and {other} name two puzzles; give one of them")
    given = None if config.puzzle is None else from_text(config.puzzle)
    run = restore(config.run_dir)
    question = given or from_test_set(config.data_dir or run.config.data_dir, config.index or 0)
    check_fits(question, run.data)
    thoughts = think(run, tokens_of(question.grid), puzzle_identifier=question.puzzle_identifier)
    trace = Trace(
        question.geometry, question.grid, grids_of(thoughts.predictions), thoughts.q_halt_logits, question.solution
    )
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(f"{question.name}; {config.run_dir} at step {run.step}, averaged weights\n")
    print(thinking(trace, width=shutil.get_terminal_size().columns, styled=styled))
    print(f"\n{verdict(trace, unique=question.unique)}")


def from_text(text: str) -> Question:
    """Raises `UserError` for a text that is no Sudoku or one that has no solution."""
    grid, geometry = parse(text)
    found = solve(grid[None], geometry)
    if not found.counts[0]:
        raise UserError(f"the {geometry} Sudoku given has no solution; correct the givens")
    unique = bool(found.counts[0] == 1)
    return Question(f"{geometry} Sudoku given", geometry, grid, found.grids[0] if unique else None, unique)


def from_test_set(data_dir: str, index: int) -> Question:
    """Raises `UserError` where there is no such puzzle."""
    try:
        puzzles = load_split(data_dir, "test")
    except UserError as error:
        raise UserError(f"{error}; or give --puzzle STRING, or another --data-dir") from error
    if not 0 <= index < puzzles.num_examples:
        raise UserError(f"--index {index}: the test set in {data_dir} has puzzles 0 to {puzzles.num_examples - 1}")
    geometry = sudoku_of(puzzles.metadata)
    if geometry is None:
        raise UserError(f"{data_dir} holds no Sudokus; give a --data-dir made by `trm build-data sudoku`")
    owner = np.searchsorted(puzzles.puzzle_indices, index, side="right") - 1
    return Question(
        f"puzzle {index} of the test set in {data_dir}",
        geometry,
        grids_of(puzzles.inputs[index]),
        grids_of(puzzles.labels[index]),
        unique=True,
        puzzle_identifier=int(puzzles.puzzle_identifiers[owner]),
    )


def check_fits(question: Question, data: Metadata) -> None:
    """Raises `UserError` unless the model was trained on Sudokus of this size."""
    trained = sudoku_of(data)
    if trained is None:
        raise UserError(
            f"the run was trained on {data.seq_len} tokens of {data.vocab_size} kinds, which is no Sudoku; "
            "`trm solve` shows Sudokus only"
        )
    if trained != question.geometry:
        raise UserError(
            f"the Sudoku is {question.geometry}, the model was trained on {trained}; give one of {trained.cells} cells"
        )


def cli(argv: list[str]) -> None:
    main(tyro.cli(Solve, args=argv, prog="trm solve"))


if __name__ == "__main__":
    cli(sys.argv[1:])
