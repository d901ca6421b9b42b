"""Predictions for a small ARC data set."""

from pathlib import Path

import numpy as np

from support.arc_files import write_source
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.arc.grid import Places, Puzzle, parse_names, render
from train_jax.puzzles.arc.json import read_test_puzzles
from train_jax.puzzles.format import load_split
from train_jax.puzzles.metadata import read_identifiers
from train_jax.puzzles.voting import Predictions

AUGMENTATIONS = 11


def write_arc_set(folder: Path) -> Path:
    """Builds a data set of five test puzzles with one to three test inputs and eleven augmentations each."""
    source = str(write_source(folder / "files"))
    subsets = {"subsets": ("training", "evaluation", "concept"), "test_subsets": ("evaluation",)}
    ArcData(source, output_dir=folder / "set", **subsets, num_aug=AUGMENTATIONS, seed=0).build()
    return folder / "set"


def perfect(directory: Path) -> Predictions:
    """Returns the labels as answers, in the order of the data set."""
    test = load_split(directory, "test")
    owners = np.repeat(np.arange(test.num_puzzles), np.diff(test.puzzle_indices))
    sure = np.zeros(test.num_examples, np.float32)
    return Predictions(test.puzzle_identifiers[owners], np.asarray(test.inputs), np.asarray(test.labels), sure)


def set_answer(predictions: Predictions, row: int, names: list[str], grid: list[list[int]], logit: float = 0.0) -> None:
    """Sets the answer in `row` to `grid`, a grid of the original puzzle, transformed by the augmentation of the row."""
    _, symmetries = parse_names([names[predictions.puzzle_identifiers[row]]])
    corner = Places(np.zeros((1, 1), int), np.zeros((1, 1), int))
    predictions.preds[row] = render([np.array(grid, np.uint8)], symmetries, corner)[0]
    predictions.q_halt_logits[row] = logit


def rows_by_test_input(
    predictions: Predictions, names: list[str], puzzles: list[Puzzle]
) -> dict[tuple[str, int], list[int]]:
    """Maps (puzzle, number of its test input) to the rows with this input."""
    rows: dict[tuple[str, int], list[int]] = {}
    test_inputs_seen: dict[int, int] = {}
    for row, identifier in enumerate(predictions.puzzle_identifiers.tolist()):
        name = parse_names([names[identifier]])[0][0]
        rows.setdefault((name, test_inputs_seen.get(identifier, 0)), []).append(row)
        test_inputs_seen[identifier] = test_inputs_seen.get(identifier, 0) + 1
    assert set(rows) == {(puzzle.name, n) for puzzle in puzzles for n in range(len(puzzle.sections["test"]))}
    return rows


def copy(predictions: Predictions) -> Predictions:
    return Predictions(*(array.copy() for array in predictions))


def noisy(arc: Path, seed: int) -> Predictions:
    """Returns a few answers to each input, including the solution, some with extra tokens; many ranks tie."""
    predictions = copy(perfect(arc))
    names = read_identifiers(arc)
    puzzles = read_test_puzzles(arc)
    rng = np.random.default_rng(seed)
    for rows in rows_by_test_input(predictions, names, puzzles).values():
        for row in rows:
            if (number := int(rng.integers(4))) > 0:
                set_answer(predictions, row, names, [[number] * 3] * number)
    stray = rng.random(predictions.preds.shape) < 0.01 * (rng.random(len(predictions.preds)) < 0.3)[:, None]
    predictions.preds[stray] = rng.integers(0, 12, stray.sum())
    return predictions._replace(q_halt_logits=rng.integers(-2, 3, len(stray)).astype(np.float32))
