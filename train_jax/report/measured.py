"""What the files of a run say: its figures and, with its test set at hand, its answers after every ACT step."""

import dataclasses
import json
import statistics
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder, read_run
from train_jax.run.tracking import read_metrics
from train_jax.tasks.puzzles.accuracy import score_answers
from train_jax.tasks.puzzles.batches import loss_labels
from train_jax.tasks.puzzles.format import Metadata, load_split, read_identifiers
from train_jax.tasks.puzzles.halting import HaltingCurve, from_json
from train_jax.tasks.puzzles.kinds import add_kind, kind_of, trace_of
from train_jax.tasks.puzzles.mixture import data_dirs
from train_jax.tasks.puzzles.trace import Trace


@dataclasses.dataclass(frozen=True)
class Answers:
    """A test set and what the model answered, as tokens."""

    data: Metadata
    inputs: Integer[np.ndarray, "examples seq"]
    labels: Integer[np.ndarray, "examples seq"]
    predictions: Integer[np.ndarray, "steps examples seq"]
    q_halt_logits: Float[np.ndarray, "steps examples"]
    first_step: int = 1
    """The ACT step of the first of them: of large sets only the last answers are kept."""
    puzzle_identifiers: Integer[np.ndarray, "puzzles"] | None = None
    """Of the puzzles that begin at `puzzle_indices`, where they have names."""
    puzzle_indices: Integer[np.ndarray, "puzzles+1"] | None = None
    names: Sequence[str] = ()
    """By identifier."""

    def name(self, example: int) -> str:
        """The puzzle's; "" where puzzles have none."""
        if self.puzzle_identifiers is None or self.puzzle_indices is None or not self.names:
            return ""
        puzzle = np.searchsorted(self.puzzle_indices, example, side="right") - 1
        return self.names[int(self.puzzle_identifiers[puzzle])]

    def trace(self, example: int, *, last: bool = False) -> Trace | None:
        """One puzzle, step by step or its last answer alone; None if it is of no kind that can be drawn."""
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
    """How good the answers are after each ACT step, as the loss head counts it in training and evaluation."""

    token_accuracy: Float[np.ndarray, "steps"]
    """Mean over the puzzles of the share of their labels that is met."""
    exact_accuracy: Float[np.ndarray, "steps"]
    """Share of the puzzles whose every label is met."""
    halting: Float[np.ndarray, "steps"]
    """Share of the puzzles whose halting logit is above 0."""
    solved: Bool[np.ndarray, "steps examples"]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Every figure that a report may show."""

    folder: RunFolder
    config: RunConfig
    records: list[dict[str, float]]
    test: dict[str, float] | None
    """Means of the last evaluation on the whole test set."""
    finished: dict[str, float] | None
    export_check: dict[str, float] | None
    machine: dict[str, Any] | None
    answers: Answers | None
    answers_missing: str
    """Why there are none."""
    halting_curve: HaltingCurve | None
    """What halting earlier than the limit would give, out of the last evaluation on the whole test set."""
    halted_early: dict[str, float] | None
    """Figures of the last evaluation that did, with its `threshold`."""

    @property
    def halt_max_steps(self) -> int:
        return getattr(self.config.arch, "halt_max_steps", 1)

    def curve(self, name: str, over: str = "step") -> list[tuple[float, float]]:
        return [(r[over], r[name]) for r in self.records if name in r and over in r]

    @property
    def train_seconds(self) -> float | None:
        seconds = [r["train_seconds"] for r in self.records if "train_seconds" in r]
        return (self.finished or {}).get("train_seconds", seconds[-1] if seconds else None)

    @property
    def steps(self) -> int:
        """Optimizer steps taken, as far as they were recorded."""
        return int((self.finished or {}).get("train_steps", max((r["step"] for r in self.records), default=0)))

    @property
    def examples_per_second(self) -> float | None:
        """Median over the lines of metrics."""
        seconds = [r["step_seconds"] for r in self.records if r.get("step_seconds", 0) > 0]
        return self.config.global_batch_size / statistics.median(seconds) if seconds else None

    @property
    def weights(self) -> str:
        """What evaluations are made with."""
        return "EMA weights" if self.config.optim.ema_decay else "raw weights"

    @property
    def held_out(self) -> dict[str, float]:
        """The means of the newest evaluation: the one on the whole test set, or the last one during training."""
        if self.test is not None:
            return self.test
        during = [r for r in self.records if "eval/exact_accuracy" in r]
        return {name.removeprefix("eval/"): value for name, value in during[-1].items()} if during else {}


def measure(run_dir: str) -> Measured:
    """Reads a run. Raises `UserError` where there is none, or nothing in it yet."""
    folder, config = read_run(run_dir)
    add_kind(getattr(config.task_config, "kind", ""))
    records, test = read_metrics(folder), _json(folder.evaluation("test"))
    if not records and test is None:
        raise UserError(f"{run_dir} has no metrics yet; train it with `trm train`, or wait for its first line of them")
    try:
        answers, missing = _answers(folder, config, test), ""
    except UserError as error:
        answers, missing = None, str(error)
    return Measured(
        folder=folder,
        config=config,
        records=records,
        test=test,
        finished=_json(folder.finished),
        export_check=_json(folder.export_check),
        machine=_json(folder.machine),
        answers=answers,
        answers_missing=missing,
        halting_curve=_curve(folder.halting_curve("test")),
        halted_early=_json(folder.halted_early("test")),
    )


def by_act_step(answers: Answers) -> ActSteps:
    """One ACT step at a time, so that half a million puzzles need no more memory than their labels."""
    labels = loss_labels(answers.labels, answers.data.ignore_label_id)
    scores = [score_answers(predictions, labels) for predictions in answers.predictions]
    labelled = scores[0].labelled
    return ActSteps(
        token_accuracy=np.array([each.accuracy[labelled].mean() for each in scores]),
        exact_accuracy=np.array([each.exact[labelled].mean() for each in scores]),
        halting=(answers.q_halt_logits[:, labelled] > 0).mean(axis=1),
        solved=np.array([each.exact for each in scores]),
    )


def slowest_solved(solved: Bool[np.ndarray, "steps examples"]) -> int | None:
    """Of the puzzles that stayed solved the one that took most ACT steps, the first of equals; where none stayed, of
    those solved in the end; None where none is."""
    candidates = stayed_solved(solved)
    if not candidates.any():
        candidates = solved[-1]
    return int(np.argmax(np.where(candidates, np.argmax(solved, axis=0), -1))) if candidates.any() else None


def stayed_solved(solved: Bool[np.ndarray, "steps examples"]) -> Bool[np.ndarray, "examples"]:
    """The puzzles that were solved at some step and at every later one."""
    return solved[-1] & (solved[1:] >= solved[:-1]).all(axis=0)


def first_unsolved(answers: Answers, solved: Bool[np.ndarray, "steps examples"]) -> int | None:
    """The first puzzle that was not solved in the end."""
    failed = ~solved[-1] & counted_labels(answers.labels, answers.data.ignore_label_id).any(axis=1)
    return int(np.argmax(failed)) if failed.any() else None


def counted_labels(
    labels: Integer[np.ndarray, "examples seq"], ignored: int | None
) -> Bool[np.ndarray, "examples seq"]:
    return np.ones(labels.shape, bool) if ignored is None else labels != ignored


def _answers(folder: RunFolder, config: RunConfig, test: dict[str, float] | None) -> Answers:
    path = folder.predictions("test")
    if test is None or not path.is_file():
        raise UserError("the run has not been evaluated on its whole test set; `trm evaluate` does that")
    try:
        with np.load(path) as arrays:
            predictions, logits = arrays["predictions"], arrays["q_halt_logits"]
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path} cannot be read ({error}); `trm evaluate` writes it again") from error
    if len(data_dirs(config.data_dir)) > 1:
        raise UserError("answers are shown for runs on one data set; `trm evaluate --data-dir` scores each")
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
            f"the predictions are for {predictions.shape[1:]} tokens, the test set in {config.data_dir} has "
            f"{puzzles.labels.shape}; `trm evaluate` scores the run on the set that is there now"
        )
    last = by_act_step(dataclasses.replace(answers, predictions=predictions[-1:], q_halt_logits=logits[-1:]))
    if abs(last.exact_accuracy[0] - test["exact_accuracy"]) > 0.5 / puzzles.num_examples:
        raise UserError(
            f"on the test set in {config.data_dir} the predictions are {last.exact_accuracy[0]:.4f} exact, not "
            f"{test['exact_accuracy']:.4f} as when they were made, so the set is another one; "
            "`trm evaluate` scores the run on the set that is there now"
        )
    return answers


def _names(data_dir: str, data: Metadata) -> Sequence[str]:
    """Of ARC's tasks; puzzles of other kinds have none that says anything."""
    kind = kind_of(data)
    if kind is None or not kind.has_named_puzzles:
        return ()
    try:
        names = read_identifiers(data_dir)
    except UserError:
        return ()
    return names if len(names) >= data.num_puzzle_identifiers else ()


def _curve(path: Path) -> HaltingCurve | None:
    content = _json(path)
    try:
        return None if content is None else from_json(content)
    except ValueError as error:
        raise UserError(f"{path} holds {error}; remove it, `trm evaluate` writes it again") from error


def _json(path: Path) -> Any:
    """None where there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); remove it and run the stage that writes it again") from error
