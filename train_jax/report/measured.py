"""Reads the files of a run of puzzles: metrics and, if the test set exists, the answers after every ACT step."""

import dataclasses
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.errors import UserError
from train_jax.report.run_files import RunFiles, read_json, read_run_files
from train_jax.run.config import RunConfig
from train_jax.run.files import local_copy
from train_jax.run.folder import RunFolder
from train_jax.tasks.puzzles.batches import data_dirs, loss_labels
from train_jax.tasks.puzzles.format import load_split
from train_jax.tasks.puzzles.kinds import Trace, add_kind, kind_of, trace_of
from train_jax.tasks.puzzles.metadata import Metadata, read_identifiers
from train_jax.tasks.puzzles.metrics import HaltingCurve, from_json, score_answers
from train_jax.tasks.puzzles.trajectories import Results
from train_jax.tasks.puzzles.trajectories import load as load_trajectories


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
class Measured(RunFiles):
    """Everything that the report of a run of puzzles may show."""

    answers: Answers | None = None
    answers_missing: str = ""
    """The reason if `answers` is None."""
    halting_curve: HaltingCurve | None = None
    """Accuracy with early halting, from the last evaluation on the whole test set."""
    halted_early: dict[str, float] | None = None
    """Metrics of the last evaluation with early halting, and its `threshold`."""
    trajectories: Results | None = None
    """The last evaluation with several trajectories."""

    @property
    def halt_max_steps(self) -> int:
        return getattr(self.config.arch, "halt_max_steps", 1)

    @property
    def held_out(self) -> dict[str, float]:
        """The metrics of the evaluation on the whole test set, or of the last one during training."""
        return self.held_out_by("exact_accuracy")


def measure(run_dir: str, step: str = "newest") -> Measured:
    """Reads a run of puzzles with the results of a checkpoint; see `read_run_files`."""
    return measured(read_run_files(run_dir, step))


def measured(files: RunFiles) -> Measured:
    """Adds the answers and the evaluations of a run of puzzles."""
    folder, config = files.folder, files.config
    add_kind(getattr(config.task_config, "kind", ""))
    try:
        answers, missing = _answers(folder, config, files.test), ""
    except UserError as error:
        answers, missing = None, str(error)
    return Measured(
        **{field.name: getattr(files, field.name) for field in dataclasses.fields(RunFiles)},
        answers=answers,
        answers_missing=missing,
        halting_curve=_curve(folder.halting_curve("test")),
        halted_early=read_json(folder.halted_early("test")),
        trajectories=_trajectories(folder),
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
    try:
        return None if content is None else from_json(content)
    except ValueError as error:
        raise UserError(f"{path} is invalid ({error}); remove it and run `trm evaluate` to write it again") from error


def _trajectories(folder: RunFolder) -> Results | None:
    try:
        return load_trajectories(folder, "test")
    except ValueError as error:
        path = folder.trajectories("test")
        raise UserError(f"{path} is invalid ({error}); remove it and run `trm evaluate` to write it again") from error
