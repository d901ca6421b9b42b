"""`trm solve RUN_DIR`: shows the answer of a trained model to one puzzle after every ACT step."""

import dataclasses
import itertools
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.puzzles.batches import load_part
from train_jax.puzzles.kind import PuzzleInput
from train_jax.puzzles.kinds import trace_of
from train_jax.puzzles.solving import from_test_set, known_kind, puzzle_task, solve
from train_jax.puzzles.stepping import Stepper, choose_view, stacked
from train_jax.puzzles.terminal import trace_text, verdict
from train_jax.run.mixing import data_dirs
from train_jax.run.restore import Restored, restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host


@dataclasses.dataclass(frozen=True)
class Solve:
    """Solve one puzzle with the averaged weights of a run; show the answer after every ACT step."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step."""
    puzzle: str | None = None
    """A Sudoku, row by row: 1 to 9 for a given, '.' or 0 for an empty cell; spaces and box lines are ignored."""
    file: Path | None = None
    """A file with a Sudoku; a maze, one line per row, '#' wall, ' ' or '.' open, 'S' start, 'G' goal; or an ARC task as
    JSON, with the name of a puzzle of the training (007bbfb7.json)."""
    index: Annotated[int, Range(0, 10**12)] | None = None
    """Index of the puzzle in the test set, or of the test example of an ARC task, from 0; by default 0."""
    data_dir: str | None = None
    """Data set of --index, or with the identifiers of ARC puzzles; by default that of the run."""
    views: Annotated[int, Range(1, 64)] = 1
    """Number of views of a Sudoku or a maze: the puzzle and symmetric images of it. The answer, in the frame of the
    puzzle, is that of the highest halting logit of all views and ACT steps."""
    agree: bool = False
    """With --views, the answer is the first one that two views share."""
    platform: Platform = "auto"
    """Platform; on one host of a TPU pod, auto is the CPU."""


def main(config: Solve) -> None:
    use_on_one_host(config.platform)
    _check(config)
    run = restore(config.run_dir, step=config.step)
    puzzle = _puzzle(config, run)
    where = ""
    if config.views > 1:
        predictions, q_halt_logits, where = _answers_in_views(config, run, puzzle)
    else:
        answers = solve(run, puzzle.tokens, puzzle_identifier=_identifier_in_run(puzzle, config, run))
        predictions = answers.tokens[:, 0]
        q_halt_logits = answers.q_halt_logits[:, 0]
    trace = trace_of(puzzle.kind, puzzle.tokens, predictions, q_halt_logits, puzzle.solution)
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(f"{puzzle.name}; {config.run_dir} at step {run.step}, {run.weights}{where}\n")
    print(trace_text(trace, width=shutil.get_terminal_size().columns, styled=styled))
    print(f"\n{verdict(trace, unique=puzzle.unique)}")


def _answers_in_views(config: Solve, run: Restored, puzzle: PuzzleInput) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the answers and halting logits of the chosen view up to its answer, and which view it is, in words."""
    stepper = Stepper(run)
    steps = stepper.steps(puzzle.tokens, trajectories=config.views, views=config.views)
    answers = list(itertools.islice(steps, stepper.task.halt_max_steps))
    view, step, agrees = choose_view(answers, agree=config.agree)
    tokens, logits = (each[:, view] for each in stacked(answers[: step + 1]))
    same = ", the answer of an earlier view too" if agrees else ", which no earlier view gives" if config.agree else ""
    return tokens, logits, f"; view {view + 1} of {config.views}{same}"


def _check(config: Solve) -> None:
    """Raises `UserError` for options that conflict."""
    if config.agree and config.views == 1:
        raise UserError("--agree compares the answers of several views; add --views")
    given = [name for name in ("puzzle", "file") if getattr(config, name) is not None]
    if config.puzzle is not None:
        given += [name for name in ("index", "data_dir") if getattr(config, name) is not None]
    if len(given) > 1:
        one, other = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise UserError(f"{one} and {other} both select a puzzle; give only one of them")


def _puzzle(config: Solve, run: Restored) -> PuzzleInput:
    """Returns the puzzle to solve. Raises `UserError` if its kind differs from that of the training."""
    trained = known_kind(puzzle_task(run).metadata, "the run was trained on")
    data_dir = config.data_dir or data_dirs(run.config.data_dir)[0]
    if config.puzzle is not None:
        return trained.parse(config.puzzle)
    if config.file is not None:
        return trained.read(config.file, data_dir=data_dir, index=config.index or 0)
    puzzle = from_test_set(data_dir, config.index or 0)
    if puzzle.kind != trained:
        raise UserError(
            f"{data_dir} contains {puzzle.kind.name}s, expected {trained.name}s as in training; give a --data-dir "
            f"of {trained.name}s"
        )
    return puzzle


def _identifier_in_run(puzzle: PuzzleInput, config: Solve, run: Restored) -> int | None:
    """Returns the puzzle's identifier in the model's numbering, which counts over all data sets of the run."""
    names = data_dirs(run.config.data_dir)
    if puzzle.puzzle_identifier is None or len(names) == 1:
        return puzzle.puzzle_identifier
    part = load_part(run.config.data_dir, "test", config.data_dir or names[0])
    return puzzle.puzzle_identifier + part.first_identifiers[0]
