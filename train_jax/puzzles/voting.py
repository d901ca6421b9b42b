"""Files of predictions, and ARC voting: the answers to all augmentations of a puzzle vote for its solution.

As in the published evaluator, the grids answered to a test input, with their symmetries inverted, are ranked by votes,
then by mean halting probability. Remaining ties are resolved by a total order of grids instead of the order of arrival,
and sums are exact, so the result does not depend on the distribution of the examples over devices, hosts and files."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from train_jax.errors import UserError
from train_jax.puzzles.arc.grid import (
    CELLS,
    OUTSIDE,
    SIDE,
    VOCAB_SIZE,
    ColourGrid,
    Puzzle,
    Symmetries,
    parse_names,
    sizes_of,
    undo,
)
from train_jax.puzzles.arc.json import read_test_puzzles
from train_jax.puzzles.metadata import read_identifiers
from train_jax.storage.files import local_copy, whole_file, write_text
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, read_arrays

LARGEST_BYTES = 2**36
"""Limit of the uncompressed size of all arrays: fifty times that of an ARC data set with 1000 augmentations."""


class Predictions(NamedTuple):
    """The answers after the last ACT step, in any order."""

    puzzle_identifiers: Integer[np.ndarray, "examples"]
    """Puzzle identifiers in the numbering of the data set's `identifiers.json`."""
    inputs: Integer[np.ndarray, "examples seq"]
    preds: Integer[np.ndarray, "examples seq"]
    q_halt_logits: Float[np.ndarray, "examples"]


def save_predictions(path: str | Path, predictions: Predictions) -> None:
    """Writes the file atomically. Raises `StorageError` if it cannot be written."""
    with whole_file(path_of(path)) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, **predictions._asdict())


def load_predictions(path: str | Path) -> Predictions:
    """Reads a file. Raises `UserError` if it does not have the format of `save_predictions`."""
    try:
        with local_copy(path_of(path)) as local:
            predictions = Predictions(**read_arrays(local, Predictions._fields, largest_bytes=LARGEST_BYTES))
        _check(predictions)
    except (DamagedError, ValueError, FileNotFoundError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(
            f"{path} contains no predictions ({reason}); use a file of `trm evaluate --predictions`"
        ) from None
    return predictions


def _check(predictions: Predictions) -> None:
    count = len(predictions.puzzle_identifiers)
    expected = {"puzzle_identifiers": 1, "inputs": 2, "preds": 2, "q_halt_logits": 1}
    for name, dimensions in expected.items():
        array = getattr(predictions, name)
        kind = np.floating if name == "q_halt_logits" else np.integer
        if array.ndim != dimensions or len(array) != count or not np.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} is {array.dtype} {array.shape}")
    if predictions.preds.shape != predictions.inputs.shape:
        raise ValueError(f"preds are {predictions.preds.shape}, but inputs {predictions.inputs.shape}")
    if not np.isfinite(predictions.q_halt_logits).all():
        raise ValueError("q_halt_logits are not all finite")


PASSES = (1, 2, 5, 10, 100, 1000)
"""pass@K: the solution is among the first K grids."""
ATTEMPTS = 2
"""Number of grids for each test input in a submission."""
BLOCK = 4096

Key = bytes
"""A grid as bytes: the colours on its canvas, `OUTSIDE` in the other cells."""


class Candidate(NamedTuple):
    """A grid among the answers to a test input."""

    key: Key
    votes: int
    q_halt: float
    """Mean halting probability of its votes."""


Ballots = dict[tuple[str, Key], list[Candidate]]
"""Maps (puzzle, test input) to the candidates, best first."""


class VotingScores(NamedTuple):
    """The outcome of a vote."""

    figures: dict[str, float]
    """`ARC/pass@K`: mean over the puzzles of the share of their test inputs that are solved. Empty if no solution is
    public."""
    submission: dict[str, list[dict[str, list[list[int]]]]]
    """Kaggle's format: two attempts for every test input of every puzzle."""
    unanswered: int
    """Number of test inputs without a vote."""


def score(data_dir: str | Path, files: Sequence[str | Path]) -> VotingScores:
    """Counts the votes of all `files`: the shards of all hosts, or several evaluations.

    Raises `UserError` if the data set is not an ARC data set or a file does not belong to it.
    """
    if len({path_of(file).resolve() for file in files}) < len(files):
        raise UserError(f"{files[0]} … {files[-1]}: a file is given more than once; give each file once")
    return score_predictions(data_dir, (load_predictions(file) for file in files))


def score_predictions(data_dir: str | Path, predictions: Iterable[Predictions]) -> VotingScores:
    """Counts the votes like `score`, with predictions in memory."""
    puzzles = read_test_puzzles(data_dir)
    return outcome(puzzles, count_votes(read_identifiers(data_dir), predictions))


def write_submission(path: str | Path, scores: VotingScores) -> None:
    """Writes the submission atomically. Raises `StorageError` if it cannot be written."""
    write_text(path_of(path), json.dumps(scores.submission))


def count_votes(names: Sequence[str], predictions: Iterable[Predictions]) -> Ballots:
    """Counts votes; `names` are the names by puzzle identifier. Padding votes for "<blank>", which is not scored."""
    votes: dict[tuple[str, Key], dict[Key, list[float]]] = {}
    known: dict[Key, Key] = {}
    for part in predictions:
        for block in _blocks(part, names):
            for test_input, answer, q_halt in block:
                answer = known.setdefault(answer, answer)
                votes.setdefault(test_input, {}).setdefault(answer, []).append(q_halt)
    return {test_input: _ranked(answers) for test_input, answers in votes.items()}


def _ranked(answers: Mapping[Key, Sequence[float]]) -> list[Candidate]:
    # `fsum` does not depend on the order, and ties are resolved by the smaller key instead of the order of arrival.
    candidates = [Candidate(key, len(votes), math.fsum(votes) / len(votes)) for key, votes in answers.items()]
    return sorted(candidates, key=lambda each: (-each.votes, -each.q_halt, each.key))


def _blocks(part: Predictions, names: Sequence[str]) -> Iterator[Iterator[tuple[tuple[str, Key], Key, float]]]:
    """Yields rows of ((puzzle, input), answer, halting probability), one block of examples at a time."""
    identifiers = part.puzzle_identifiers
    tokens = (part.inputs, part.preds)
    if len(identifiers) and not 0 <= identifiers.min() <= identifiers.max() < len(names):
        raise UserError(
            f"the predictions have identifiers {identifiers.min()} to {identifiers.max()}, the data set has 0 to "
            f"{len(names) - 1}; give the data set of these predictions"
        )
    lowest = min(each.min(initial=0) for each in tokens)
    highest = max(each.max(initial=0) for each in tokens)
    if part.inputs.shape[1] != CELLS or lowest < 0 or highest >= VOCAB_SIZE:
        raise UserError(
            f"the predictions are {part.inputs.shape[1]} tokens from {lowest} to {highest}, expected {CELLS} "
            f"from 0 to {VOCAB_SIZE - 1}; give predictions for an ARC data set"
        )
    present, which = np.unique(identifiers, return_inverse=True)
    originals, symmetries = parse_names([names[int(identifier)] for identifier in present])
    q_halt = 1 / (1 + np.exp(-part.q_halt_logits.astype(np.float64)))
    for start in range(0, len(identifiers), BLOCK):
        block = slice(start, start + BLOCK)
        undone = Symmetries(*(array[which[block]] for array in symmetries))
        inputs, answers = (_restored(each[block], undone) for each in tokens)
        test_inputs = zip((originals[number] for number in which[block]), inputs, strict=True)
        yield zip(test_inputs, answers, q_halt[block].tolist(), strict=True)


def _restored(tokens: np.ndarray, symmetries: Symmetries) -> list[Key]:
    tokens = tokens.astype(np.uint8, copy=False)
    canvases, _, _ = undo(tokens, *sizes_of(tokens), symmetries)
    joined = canvases.tobytes()
    return [joined[start : start + CELLS] for start in range(0, len(joined), CELLS)]


def key_of(grid: ColourGrid) -> Key:
    canvas = np.full((SIDE, SIDE), OUTSIDE, np.uint8)
    canvas[: grid.shape[0], : grid.shape[1]] = grid
    return canvas.tobytes()


def grid_of(key: Key) -> list[list[int]]:
    """Converts a grid to JSON values; a grid without cells becomes one black cell."""
    canvas = np.frombuffer(key, np.uint8).reshape(SIDE, SIDE)
    rows = (canvas[:, 0] != OUTSIDE).sum()
    cols = (canvas[0] != OUTSIDE).sum()
    return canvas[:rows, :cols].tolist() or [[0]]


def outcome(puzzles: Sequence[Puzzle], ballots: Ballots) -> VotingScores:
    """Computes the metrics, the submission and the number of unanswered inputs from the counted votes."""
    solved = dict.fromkeys(PASSES, 0.0)
    submission: dict[str, Any] = {}
    unanswered = 0
    for puzzle in puzzles:
        submission[puzzle.name] = []
        ranks = []
        for example in puzzle.sections["test"]:
            candidates = ballots.get((puzzle.name, key_of(example.input)), [])
            unanswered += not candidates
            keys = [candidate.key for candidate in candidates]
            solution = key_of(example.output)
            ranks.append(keys.index(solution) if solution in keys else math.inf)
            grids = [grid_of(key) for key in keys[:ATTEMPTS]] or [[[0]]]
            grids += grids[:1] * (ATTEMPTS - len(grids))
            submission[puzzle.name].append({f"attempt_{number}": grid for number, grid in enumerate(grids, 1)})
        for k in PASSES:
            solved[k] += sum(rank < k for rank in ranks) / len(ranks)
    public = any(example.output.tolist() != [[0]] for puzzle in puzzles for example in puzzle.sections["test"])
    figures = {f"ARC/pass@{k}": count / len(puzzles) for k, count in solved.items()} if public else {}
    return VotingScores(figures, submission, unanswered)
