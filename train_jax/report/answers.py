"""Reads the results of a run of puzzles: the answers after every ACT step, how they halt, and how they fail."""

import dataclasses
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.errors import UserError
from train_jax.report.run_page import RunFiles, read_json
from train_jax.run.config import RunConfig
from train_jax.run.files import local_copy
from train_jax.run.folder import RunFolder
from train_jax.tasks.puzzles.batches import data_dirs, loss_labels
from train_jax.tasks.puzzles.format import Metadata, load_split
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import Trace, add_kind, kind_of, trace_of
from train_jax.tasks.puzzles.metadata import read_identifiers
from train_jax.tasks.puzzles.metrics import HaltingCurve, from_json, score_answers
from train_jax.tasks.puzzles.trajectories import Results
from train_jax.tasks.puzzles.trajectories import load as load_trajectories

BLOCK = 16_384
"""Puzzles compared at a time, to limit the memory."""
EXAMPLES = 3
"""Number of solved and of failed puzzles that are drawn."""
RATED = 20_000
"""Up to this number of puzzles, difficulties that need a solver are shown; the hardest puzzles take seconds."""


@dataclass(frozen=True)
class Answers:
    """A test set and the answers of the model, as tokens."""

    data: Metadata
    inputs: Integer[np.ndarray, "examples seq"]
    labels: Integer[np.ndarray, "examples seq"]
    predictions: Integer[np.ndarray, "steps examples seq"]
    q_halt_logits: Float[np.ndarray, "steps examples"]
    first_step: int = 1
    """The ACT step of the first predictions: for large test sets only the last ones are kept."""
    puzzle_identifiers: Integer[np.ndarray, "puzzles"] | None = None
    """The identifiers of the puzzles that begin at `puzzle_indices`, if they have names."""
    puzzle_indices: Integer[np.ndarray, "puzzles+1"] | None = None
    names: Sequence[str] = ()
    """The names of the puzzles, by identifier."""

    def name(self, example: int) -> str:
        """Returns the name of the example's puzzle; "" if puzzles have no names."""
        if self.puzzle_identifiers is None or self.puzzle_indices is None or not self.names:
            return ""
        puzzle = np.searchsorted(self.puzzle_indices, example, side="right") - 1
        return self.names[int(self.puzzle_identifiers[puzzle])]

    def trace(self, example: int, *, last: bool = False) -> Trace | None:
        """Returns the trace of one puzzle, with all answers or only the `last`; None for an unknown kind."""
        kind = kind_of(self.data)
        if kind is None:
            return None
        steps = slice(-1 if last else 0, None)
        return trace_of(
            kind,
            self.inputs[example],
            self.predictions[steps, example],
            self.q_halt_logits[steps, example],
            self.labels[example],
        )


@dataclass(frozen=True)
class ActSteps:
    """Metrics of the answers after each ACT step, with the definitions of the loss head; NaN if no puzzle has a
    public solution."""

    token_accuracy: Float[np.ndarray, "steps"]
    """Mean over the puzzles of the share of their labels that are predicted correctly."""
    exact_accuracy: Float[np.ndarray, "steps"]
    """Share of the puzzles whose labels are all predicted correctly."""
    halting: Float[np.ndarray, "steps"]
    """Share of the puzzles whose halting logit is above 0."""
    solved: Bool[np.ndarray, "steps examples"]


@dataclass(frozen=True)
class PuzzleResults:
    """The results of a run of puzzles; what it does not have is None."""

    answers: Answers | None = None
    answers_missing: str = ""
    """The reason if `answers` is None."""
    halting_curve: HaltingCurve | None = None
    """Accuracy with early halting, from the last evaluation on the whole test set."""
    halted_early: dict[str, float] | None = None
    """Metrics of the last evaluation with early halting, and its `threshold`."""
    trajectories: Results | None = None
    """The last evaluation with several trajectories."""


def read_results(files: RunFiles) -> PuzzleResults:
    """Reads the answers and the evaluations of a run."""
    folder, config = files.folder, files.config
    add_kind(getattr(config.task_config, "kind", ""))
    try:
        answers, missing = _answers(folder, config, files.test), ""
    except UserError as error:
        answers, missing = None, str(error)
    return PuzzleResults(
        answers,
        missing,
        _valid(folder.halting_curve("test"), _curve),
        read_json(folder.halted_early("test")),
        _valid(folder.trajectories("test"), lambda _: load_trajectories(folder, "test")),
    )


def by_act_step(answers: Answers) -> ActSteps:
    """Computes the metrics, one ACT step at a time to limit the memory."""
    labels = loss_labels(answers.labels, answers.data.ignore_label_id)
    scores = [score_answers(predictions, labels) for predictions in answers.predictions]
    labelled = scores[0].labelled
    count = labelled.sum() or np.nan
    return ActSteps(
        token_accuracy=np.array([each.accuracy[labelled].sum() for each in scores]) / count,
        exact_accuracy=np.array([each.exact[labelled].sum() for each in scores]) / count,
        halting=(answers.q_halt_logits[:, labelled] > 0).sum(axis=1) / count,
        solved=np.array([each.exact for each in scores]),
    )


def slowest_solved(solved: Bool[np.ndarray, "steps examples"]) -> int | None:
    """Returns the puzzle that took most ACT steps until it was solved; the first of equals, None if there is none.

    It is one of the puzzles that stayed solved or, if there are none, of those solved after the last step.
    """
    candidates = stayed_solved(solved)
    if not candidates.any():
        candidates = solved[-1]
    return int(np.argmax(np.where(candidates, np.argmax(solved, axis=0), -1))) if candidates.any() else None


def stayed_solved(solved: Bool[np.ndarray, "steps examples"]) -> Bool[np.ndarray, "examples"]:
    """Returns which puzzles are solved after the last step and were never unsolved again once solved."""
    return solved[-1] & (solved[1:] >= solved[:-1]).all(axis=0)


def first_unsolved(answers: Answers, solved: Bool[np.ndarray, "steps examples"]) -> int | None:
    """Returns the first puzzle that is not solved after the last step; None if there is none."""
    failed = ~solved[-1] & counted_labels(answers.labels, answers.data.ignore_label_id).any(axis=1)
    return int(np.argmax(failed)) if failed.any() else None


def counted_labels(
    labels: Integer[np.ndarray, "examples seq"], ignored: int | None
) -> Bool[np.ndarray, "examples seq"]:
    return np.ones(labels.shape, bool) if ignored is None else labels != ignored


def _answers(folder: RunFolder, config: RunConfig, test: dict[str, float] | None) -> Answers:
    path = folder.predictions("test")
    if test is None or not path.is_file():
        raise UserError("the run has not been evaluated on its whole test set; run `trm evaluate`")
    try:
        with local_copy(path) as local, np.load(local) as arrays:
            predictions, logits = arrays["predictions"], arrays["q_halt_logits"]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error}); run `trm evaluate` to write it again") from error
    if len(data_dirs(config.data_dir)) > 1:
        raise UserError(
            "answers are shown only for runs on one data set; use `trm evaluate --data-dir` for each data set"
        )
    puzzles = load_split(config.data_dir, "test")
    answers = Answers(
        puzzles.metadata,
        puzzles.inputs,
        puzzles.labels,
        predictions,
        logits,
        max(1, getattr(config.arch, "halt_max_steps", 1) - len(predictions) + 1),
        puzzles.puzzle_identifiers,
        puzzles.puzzle_indices,
        _names(config.data_dir, puzzles.metadata),
    )
    if predictions.shape[1:] != puzzles.labels.shape or logits.shape != predictions.shape[:2] or not len(predictions):
        raise UserError(
            f"the predictions have shape {predictions.shape[1:]}, the test set in {config.data_dir} has "
            f"{puzzles.labels.shape}; run `trm evaluate` to evaluate the run on this test set"
        )
    last = by_act_step(dataclasses.replace(answers, predictions=predictions[-1:], q_halt_logits=logits[-1:]))
    if abs(last.exact_accuracy[0] - test["exact_accuracy"]) > 0.5 / puzzles.num_examples:
        raise UserError(
            f"the predictions have exact accuracy {last.exact_accuracy[0]:.4f} on the test set in {config.data_dir}, "
            f"expected {test['exact_accuracy']:.4f} as in their evaluation, so the test set has changed; run "
            "`trm evaluate` to evaluate the run on this test set"
        )
    return answers


def _names(data_dir: str, data: Metadata) -> Sequence[str]:
    """Reads the names of ARC tasks; other kinds have no names of puzzles."""
    kind = kind_of(data)
    if kind is None or not kind.has_named_puzzles:
        return ()
    try:
        names = read_identifiers(data_dir)
    except UserError:
        return ()
    return names if len(names) >= data.num_puzzle_identifiers else ()


def _curve(path: Path) -> HaltingCurve | None:
    content = read_json(path)
    return None if content is None else from_json(content)


def _valid(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except ValueError as error:
        raise UserError(f"{path} is invalid ({error}); remove it and run `trm evaluate` to write it again") from error


# ---- failures


@dataclass(frozen=True)
class Share:
    """The number of puzzles and of failed puzzles in one range of difficulty."""

    name: str
    count: int
    failed: int


@dataclass(frozen=True)
class Failures:
    """Statistics of failed puzzles. A puzzle fails if its answer after the last ACT step differs from a label."""

    count: int
    failed: int
    wrong_cells: Integer[np.ndarray, "failed"]
    """Number of wrong cells of each failed puzzle."""
    unknown_count: Integer[np.ndarray, "cells"]
    """For each cell, the number of puzzles whose input does not give it."""
    wrong_count: Integer[np.ndarray, "cells"]
    """For each cell, the number of these puzzles in which it is wrong."""
    by_difficulty: dict[str, list[Share]]
    broken_rules: dict[str, int]
    """For each rule, the number of failed answers that break it."""
    no_rule_broken: int
    """Number of failed answers that break no rule."""
    solved_earlier: int
    """Number of failed puzzles that were solved after an earlier ACT step."""
    predicted_correct: int
    """Number of failed puzzles with a halting logit above 0, which predicts a correct answer."""
    solved_examples: list[int]
    failed_examples: list[int]

    @property
    def error_rate(self) -> Float[np.ndarray, "cells"]:
        """The error rate of each cell; NaN if every input gives it."""
        return np.where(self.unknown_count > 0, self.wrong_count / np.maximum(self.unknown_count, 1), np.nan)


def failures_of(answers: Answers, kind: Kind, solved: Bool[np.ndarray, "steps examples"]) -> Failures:
    """Computes the statistics; `kind` is the kind of the data set, `solved` the result of `by_act_step`."""
    labelled = np.any(counted_labels(answers.labels, answers.data.ignore_label_id), axis=1)
    failed = labelled & ~solved[-1]
    unknown_count, wrong_count = np.zeros((2, kind.drawing.rows * kind.drawing.cols), int)
    wrong_cells = np.zeros(len(failed), int)
    difficulties: dict[str, list[np.ndarray]] = {}
    rules: dict[str, int] = {}
    no_rule_broken = 0
    for start in range(0, len(failed), BLOCK):
        rows = slice(start, start + BLOCK)
        inputs, answer, solution = (
            kind.values(np.asarray(tokens[rows]))
            for tokens in (answers.inputs, answers.predictions[-1], answers.labels)
        )
        differs = (answer != solution) & kind.checking.scored_cells(solution) & labelled[rows, None]
        unknown = kind.checking.unknown_cells(inputs, solution) & labelled[rows, None]
        unknown_count += unknown.sum(axis=0)
        wrong_count += (differs & unknown).sum(axis=0)
        wrong_cells[rows] = differs.sum(axis=1)
        for name, values in kind.checking.difficulties(inputs, solution, thorough=len(failed) <= RATED).items():
            difficulties.setdefault(name, []).append(values)
        here = failed[rows]
        broken = kind.checking.broken_rules(inputs[here], answer[here], solution[here])
        for name, which in broken.items():
            rules[name] = rules.get(name, 0) + int(which.sum())
        no_rule_broken += int((~np.any(list(broken.values()), axis=0)).sum())
    hard = {name: np.concatenate(parts) for name, parts in difficulties.items()}
    hardest = next(iter(hard.values()))
    return Failures(
        count=int(labelled.sum()),
        failed=int(failed.sum()),
        wrong_cells=wrong_cells[failed],
        unknown_count=unknown_count,
        wrong_count=wrong_count,
        by_difficulty={name: shares(values[labelled], failed[labelled]) for name, values in hard.items()},
        broken_rules=rules,
        no_rule_broken=no_rule_broken,
        solved_earlier=int((failed & solved.any(axis=0)).sum()),
        predicted_correct=int((failed & (answers.q_halt_logits[-1] > 0)).sum()),
        solved_examples=spread(np.flatnonzero(solved[-1]), hardest),
        failed_examples=spread(np.flatnonzero(failed), wrong_cells),
    )


def shares(values: Integer[np.ndarray, "n"], failed: Bool[np.ndarray, "n"], most: int = 8) -> list[Share]:
    """Returns the shares of puzzles that failed by `ranges` of a difficulty."""
    names, group = ranges(values, most)
    inside = [group == number for number in range(len(names))]
    return [Share(name, int(each.sum()), int(failed[each].sum())) for name, each in zip(names, inside, strict=True)]


def ranges(values: Integer[np.ndarray, "n"], most: int) -> tuple[list[str], Integer[np.ndarray, "n"]]:
    """Groups puzzles by value or, for more than `most` values, by ranges with about equally many puzzles.

    Returns the names of the groups, and the group of each puzzle.
    """
    lows = np.unique(values)
    if len(lows) > most:
        lows = np.unique(np.quantile(values, np.arange(most) / most, method="higher"))
    group = np.searchsorted(lows, values, side="right") - 1
    highs = [int(values[group == number].max()) for number in range(len(lows))]
    pairs = zip(lows.tolist(), highs, strict=True)
    return [f"{low:,}" if high == low else f"{low:,} to {high:,}" for low, high in pairs], group


def spread(examples: Integer[np.ndarray, "n"], values: Integer[np.ndarray, "all"], count: int = EXAMPLES) -> list[int]:
    """Selects the examples with the lowest and the highest value, and others evenly spaced between them."""
    if not len(examples):
        return []
    ordered = examples[np.argsort(values[examples], kind="stable")]
    places = np.unique(np.round(np.linspace(0, len(ordered) - 1, min(count, len(ordered)))).astype(int))
    return ordered[places].tolist()
