"""`trm solve RUN_DIR`: shows the answer of a trained model to one puzzle after every ACT step."""

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import tyro

from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.report.pixels import animation
from train_jax.report.player import player
from train_jax.report.terminal import trace_text, verdict
from train_jax.run.folder import write_bytes, write_text
from train_jax.run.restore import Restored, restore
from train_jax.tasks.puzzles.kind import PuzzleInput
from train_jax.tasks.puzzles.kinds import trace_of
from train_jax.tasks.puzzles.mixture import data_dirs, load_part
from train_jax.tasks.puzzles.puzzle_input import from_test_set, known_kind
from train_jax.tasks.puzzles.solving import puzzle_task, solve


@dataclasses.dataclass(frozen=True)
class Solve:
    """Solve one puzzle with the averaged weights of a run's newest checkpoint; show the answer after every ACT step."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it."""
    puzzle: str | None = None
    """A Sudoku, row by row: 1 to 9 for a given, '.' or 0 for an empty cell; spaces and box lines are passed over."""
    file: Path | None = None
    """A file instead: a Sudoku; a maze, a line for each row, '#' wall, ' ' or '.' open, 'S' start, 'G' goal; or an ARC
    task as JSON, with the name of a puzzle that was trained on (007bbfb7.json)."""
    index: int | None = None
    """Which puzzle of the test set to take instead, or which test example of an ARC task, from 0; 0 if not given."""
    data_dir: str | None = None
    """Data set whose test set --index counts in, or whose identifiers name ARC puzzles; the run's own if not given."""
    html: Path | None = None
    """Write the ACT steps as an animated page here too."""
    gif: Path | None = None
    """Write them as an animated picture here too."""


def main(config: Solve) -> None:
    _check(config)
    run = restore(config.run_dir)
    puzzle = _puzzle(config, run)
    answers = solve(run, puzzle.tokens, puzzle_identifier=_identifier_in_run(puzzle, config, run))
    predictions, q_halt_logits = answers.tokens[:, 0], answers.q_halt_logits[:, 0]
    trace = trace_of(puzzle.kind, puzzle.tokens, predictions, q_halt_logits, puzzle.solution)
    title = f"{puzzle.name}; {config.run_dir} at step {run.step}, averaged weights"
    result = verdict(trace, unique=puzzle.unique)
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(f"{title}\n")
    print(trace_text(trace, width=shutil.get_terminal_size().columns, styled=styled))
    print(f"\n{result}")
    if config.html is not None:
        write_text(config.html, player(trace, title=title, verdict=result))
        print(f"animation: {config.html}")
    if config.gif is not None:
        write_bytes(config.gif, animation(trace))
        print(f"animation: {config.gif}")


def _check(config: Solve) -> None:
    """What can be said before the work."""
    given = [name for name in ("puzzle", "file") if getattr(config, name) is not None]
    if config.puzzle is not None:
        given += [name for name in ("index", "data_dir") if getattr(config, name) is not None]
    if len(given) > 1:
        one, other = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise UserError(f"{one} and {other} name two puzzles; give one of them")
    for path in (config.html, config.gif):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path.parent} is not a folder; give a file in one that is there")


def _puzzle(config: Solve, run: Restored) -> PuzzleInput:
    """Raises `UserError` for a puzzle of another kind than the run was trained on."""
    trained = known_kind(puzzle_task(run).metadata, "the run was trained on")
    data_dir = config.data_dir or data_dirs(run.config.data_dir)[0]
    if config.puzzle is not None:
        return trained.parse(config.puzzle)
    if config.file is not None:
        return trained.read(config.file, data_dir=data_dir, index=config.index or 0)
    puzzle = from_test_set(data_dir, config.index or 0)
    if puzzle.kind != trained:
        raise UserError(
            f"the model was trained on {trained.name}s, and {data_dir} holds {puzzle.kind.name}s; give a --data-dir "
            f"of {trained.name}s"
        )
    return puzzle


def _identifier_in_run(puzzle: PuzzleInput, config: Solve, run: Restored) -> int | None:
    """The puzzle's identifier as the model numbers it: of a run on several data sets, after those before its own."""
    names = data_dirs(run.config.data_dir)
    if puzzle.puzzle_identifier is None or len(names) == 1:
        return puzzle.puzzle_identifier
    part = load_part(run.config.data_dir, "test", config.data_dir or names[0])
    return puzzle.puzzle_identifier + part.first_identifiers[0]


def cli(argv: list[str]) -> None:
    main(parse(Solve, argv, prog="trm solve"))


if __name__ == "__main__":
    cli(sys.argv[1:])
