"""Reads the results of a puzzle run: the answers after every ACT step, and how they halt."""

import dataclasses
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.errors import UserError
from train_jax.puzzles.batches import loss_labels
from train_jax.puzzles.format import Metadata, load_split
from train_jax.puzzles.kinds import Trace, add_kind, kind_of, trace_of
from train_jax.puzzles.metrics import HaltingCurve, Point, from_json, score_answers
from train_jax.report.run_page import EVALUATE, RunFiles
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder
from train_jax.run.mixing import data_dirs
from train_jax.storage.files import local_copy
from train_jax.storage.json_files import NUMBER, Kind, find_object, list_of, optional, record_of
from train_jax.storage.untrusted import DamagedError, read_arrays

_LARGEST_PREDICTIONS = 2**36
"""Limit of the uncompressed size of the file."""


@dataclass(frozen=True)
class Answers:
    """A test set and the answers of the model as tokens."""

    data: Metadata
    inputs: Integer[np.ndarray, "examples seq"]
    labels: Integer[np.ndarray, "examples seq"]
    predictions: Integer[np.ndarray, "steps examples seq"]
    q_halt_logits: Float[np.ndarray, "steps examples"]
    first_step: int = 1
    """The ACT step of the first predictions: for large test sets only the last ones are kept."""

    def trace(self, example: int) -> Trace | None:
        """Returns the trace of one puzzle; None for an unknown kind."""
        kind = kind_of(self.data)
        if kind is None:
            return None
        predictions = self.predictions[:, example]
        logits = self.q_halt_logits[:, example]
        return trace_of(kind, self.inputs[example], predictions, logits, self.labels[example])


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
    labelled: Bool[np.ndarray, "examples"]
    """The puzzles with a solution to compare with."""


@dataclass(frozen=True)
class PuzzleResults:
    """The results of a run of puzzles; None for those that the run does not have."""

    answers: Answers | None = None
    answers_missing: str = ""
    """The reason if `answers` is None."""
    halting_curve: HaltingCurve | None = None
    """Accuracy with early halting, from the last evaluation on the whole test set."""
    halted_early: dict[str, float] | None = None
    """Metrics of the last evaluation with early halting, and its `threshold`."""


def read_results(files: RunFiles) -> PuzzleResults:
    """Reads the answers and the evaluations of a run."""
    folder = files.folder
    config = files.config
    add_kind(getattr(config.task_config, "kind", ""))
    try:
        answers = _answers(folder, config, files.test)
        missing = ""
    except UserError as error:
        answers = None
        missing = str(error)
    return PuzzleResults(
        answers,
        missing,
        _halting_curve(folder),
        find_object(folder.halted_early("test"), {}, others=NUMBER, remedy=EVALUATE),
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
        labelled=labelled,
    )


def slowest_solved(solved: Bool[np.ndarray, "steps examples"]) -> int | None:
    """Returns the puzzle that took most ACT steps until it was solved; the first of equals, None if there is none.

    It is one of the puzzles that stayed solved or, if there are none, of those solved after the last step.
    """
    candidates = solved[-1] & (solved[1:] >= solved[:-1]).all(axis=0)
    if not candidates.any():
        candidates = solved[-1]
    return int(np.argmax(np.where(candidates, np.argmax(solved, axis=0), -1))) if candidates.any() else None


def first_unsolved(act_steps: ActSteps) -> int | None:
    """Returns the first puzzle that is not solved after the last step; None if there is none."""
    failed = ~act_steps.solved[-1] & act_steps.labelled
    return int(np.argmax(failed)) if failed.any() else None


def _answers(folder: RunFolder, config: RunConfig, test: dict[str, float] | None) -> Answers:
    path = folder.predictions("test")
    if test is None or not path.is_file():
        raise UserError("the run has not been evaluated on its whole test set; run `trm evaluate`")
    try:
        with local_copy(path) as local:
            arrays = read_arrays(local, ("predictions", "q_halt_logits"), largest_bytes=_LARGEST_PREDICTIONS)
        predictions = arrays["predictions"]
        logits = arrays["q_halt_logits"]
        if predictions.dtype.kind not in "iu" or predictions.ndim != 3 or logits.dtype.kind != "f":
            raise DamagedError(f"predictions are {predictions.dtype} {predictions.shape}, logits {logits.dtype}")
    except DamagedError as error:
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
    )
    if predictions.shape[1:] != puzzles.labels.shape or logits.shape != predictions.shape[:2] or not len(predictions):
        raise UserError(
            f"the predictions have shape {predictions.shape[1:]}, the test set in {config.data_dir} has "
            f"{puzzles.labels.shape}; run `trm evaluate` to evaluate the run on this test set"
        )
    last = by_act_step(dataclasses.replace(answers, predictions=predictions[-1:], q_halt_logits=logits[-1:]))
    expected = test.get("exact_accuracy", np.nan)  # absent without a public solution
    if abs(last.exact_accuracy[0] - expected) > 0.5 / puzzles.num_examples:
        raise UserError(
            f"the predictions have exact accuracy {last.exact_accuracy[0]:.4f} on the test set in {config.data_dir}, "
            f"expected {expected:.4f} as in their evaluation, so the test set has changed; run "
            "`trm evaluate` to evaluate the run on this test set"
        )
    return answers


def _halting_curve(folder: RunFolder) -> HaltingCurve | None:
    """Returns the halting curve of the run; None if there is none. Raises `UserError` for a damaged one."""
    number_or_null = optional(Kind("a number, or null", lambda value: value is None or NUMBER.fits(value)))
    point = {field.name: NUMBER for field in dataclasses.fields(Point)} | {"threshold": number_or_null}
    points = list_of(record_of(point, others=Kind("no field", lambda _: False)))
    curve = Kind("a list of points", lambda value: points.fits(value) and len(value) > 0)
    fields = {field.name: curve for field in dataclasses.fields(HaltingCurve)}
    content = find_object(folder.halting_curve("test"), fields, remedy=EVALUATE)
    return None if content is None else from_json(content)
