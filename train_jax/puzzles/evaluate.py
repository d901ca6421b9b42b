"""`trm evaluate` for runs of puzzles: options, accuracy, early halting, trajectories, and votes for ARC."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, ClassVar

import jax
import numpy as np
import tyro

from models_torch.ranges import Range
from train_jax.command_line import HelpPage
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.puzzles.batches import Mixture, load_mixture, load_part
from train_jax.puzzles.evaluation import PuzzleEvaluation
from train_jax.puzzles.kinds import describe
from train_jax.puzzles.metadata import Metadata, dataset_folder
from train_jax.puzzles.metrics import table
from train_jax.puzzles.scan import Chooser, TrajectoryOptions, stack_runs
from train_jax.puzzles.solving import puzzle_task
from train_jax.puzzles.stepping import example_of
from train_jax.puzzles.trajectories import (
    TrajectoryEvaluation,
    TrajectoryEvaluator,
    results_of,
    settings,
    with_agreement,
    with_interval,
)
from train_jax.puzzles.trajectories import table as trajectory_table
from train_jax.puzzles.view_example import save_example
from train_jax.puzzles.voting import Predictions, save_predictions, score_predictions, write_submission
from train_jax.report.commands import Console
from train_jax.report.evaluate import EvaluateOptions, lines_of, refuse_other_options, with_chosen_weights
from train_jax.run.mixing import data_dirs
from train_jax.run.restore import Restored, restore
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import is_main_process
from train_jax.storage.files import check_output, write_text
from train_jax.storage.storage import path_of


@dataclasses.dataclass(frozen=True)
class PuzzleEvaluateOptions(EvaluateOptions):
    """Options for puzzles. With --trajectories, --noise or --depth, every example has several noisy trajectories, and
    the curve of accuracy against their ACT steps is shown."""

    halt_early: bool = False
    """Use the answer of the first ACT step at which the model halts; a device stops when its whole batch has
    halted. With trajectories, the next one of a puzzle is computed only if the model has not halted (implies
    --refill)."""
    halt_threshold: Annotated[float, Range(0, 1)] | None = None
    """Halting probability above which a sequence halts; by default 0.5, as in training. 1 is never exceeded. Implies
    --halt-early."""
    refill: bool = False
    """Let a row that has halted early take the next puzzle: the same answers in less time."""
    more_runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Further runs of the same model, such as other seeds: the trajectories of a puzzle take their weights in turn."""
    views: Annotated[int, Range(1, 4096)] = 1
    """Number of views of each Sudoku or maze: the puzzle and symmetric images of it, whose answers are brought back.
    The trajectories take them in turn."""
    agree: bool = False
    """The answer is the first one that two trajectories share (implies --halt-early: a trajectory ends where the model
    halts)."""
    trajectories: Annotated[int, Range(1, 4096)] | None = None
    """Number of trajectories per puzzle, each with its own noise; an answer is chosen among them. By default one for
    each view, or for each run if they are more."""
    noise: Annotated[float, Range(0, 1000)] = 0.0
    """Standard deviation of normal noise that is added to the latents after each ACT step."""
    depth: Annotated[int, Range(1, 4096)] | None = None
    """ACT steps of each trajectory; by default the halt limit of the run."""
    choose: Chooser = "halting"
    """Rule that chooses the answer among trajectories: the highest halting logit of any ACT step, the vote of the
    trajectories, or the vote weighted by halting probability."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Random seed of the noise and of the views."""
    results: str | None = None
    """Write the results with trajectories to this JSON file too."""
    predictions: str | None = None
    """Write inputs, answers and halting logits to this .npz file, for `trm score`."""
    submission: str | None = None
    """Write the two grids with the most votes for every ARC test input to this file, in Kaggle's format."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {
        "halting": HelpPage("early halting", ("halt_early", "halt_threshold", "refill")),
        "trajectories": HelpPage(
            "several trajectories for each example: views, noise, runs",
            ("trajectories", "views", "agree", "noise", "depth", "choose", "seed", "results"),
        ),
    }

    @property
    def halting(self) -> tuple[bool, float]:
        """Returns whether sequences halt early, and the threshold."""
        threshold = 0.5 if self.halt_threshold is None else self.halt_threshold
        return self.halt_early or self.halt_threshold is not None or self.agree, threshold

    @property
    def num_runs(self) -> int:
        return 1 + len(self.more_runs)

    @property
    def num_trajectories(self) -> int:
        return max(self.views, self.num_runs) if self.trajectories is None else self.trajectories

    @property
    def has_trajectories(self) -> bool:
        """True if the evaluation differs from the ordinary one: one trajectory, without noise, to the halt limit."""
        return self.num_trajectories > 1 or self.noise > 0 or self.depth is not None

    @property
    def belongs_to_run(self) -> bool:
        return super().belongs_to_run and not self.more_runs

    def refuse_conflicts(self) -> None:
        super().refuse_conflicts()
        halts, _ = self.halting
        for name, count in (("--views", self.views), ("runs", self.num_runs)):
            if count > self.num_trajectories:
                raise UserError(
                    f"--trajectories {self.trajectories} are fewer than the {count} {name.removeprefix('--')}; use "
                    f"--trajectories {count} or more, or omit it"
                )
        if self.agree and self.num_trajectories < 2:
            raise UserError("--agree needs several trajectories; add --views, --trajectories or further runs")
        if self.more_runs and self.weights is not None:
            raise UserError(f"--weights {self.weights} replaces the weights of one run; give one run")
        if self.refill and not halts:
            raise UserError("--refill replaces sequences that halt early; add --halt-early or --halt-threshold")
        if not self.has_trajectories:
            if self.results is not None:
                raise UserError(f"--results {self.results} is for --trajectories, --views, --noise or --depth; omit it")
        elif halts and self.choose != "halting":
            raise UserError(f"--choose {self.choose} needs all trajectories; omit it or --halt-early")
        elif halts and self.results is not None:
            raise UserError(f"--results {self.results} is for trajectories without --halt-early; omit one of them")

    def _trajectory_options(self, halt_max_steps: int) -> TrajectoryOptions:
        return TrajectoryOptions(
            self.num_trajectories,
            self.noise,
            halt_max_steps if self.depth is None else self.depth,
            self.choose,
            self.seed,
            views=self.views,
            runs=self.num_runs,
            agree=self.agree,
        )

    def evaluate(self, run: Restored, devices: Devices, console: Console) -> None:
        """Evaluates and prints. Raises `UserError` for options or data that do not fit the run."""
        halts, threshold = self.halting
        task = puzzle_task(run)
        refuse_other_options(self, PuzzleEvaluateOptions, run)
        run = with_chosen_weights(self, run)
        puzzles = _puzzles(self, run)
        arc = _arc_directory(self, run)
        options = self._trajectory_options(task.halt_max_steps)
        state = stack_runs([run.state, *(_state_of(other, self, run) for other in self.more_runs)])
        batch_size = self.batch_size or run.config.eval_batch_size
        result = None
        with console.progress("evaluating") as advance:
            if self.has_trajectories and not halts:
                evaluator = TrajectoryEvaluator(
                    run.objective, puzzles, devices, options, batch_size=batch_size, progress=advance
                )
                result = evaluator(state, limit=self.limit)
                evaluation = result.evaluation
            else:
                evaluator = task.evaluator(
                    run.objective,
                    devices,
                    puzzles,
                    batch_size=batch_size,
                    halt_threshold=threshold if halts else None,
                    refill=self.refill,
                    trajectories=options if self.has_trajectories else None,
                    progress=advance,
                )
                evaluation = evaluator(state, limit=self.limit)
        if not is_main_process():
            return
        if result is None and self.has_trajectories and evaluation.metrics["count"]:
            metrics = with_agreement(with_interval(evaluation.metrics))
            evaluation = dataclasses.replace(evaluation, metrics=metrics)
        evaluation = _with_votes(self, arc, puzzles, evaluation)
        result = None if result is None else dataclasses.replace(result, evaluation=evaluation)
        _save(self, options, run, puzzles, evaluation, result)
        how = f", {settings(dataclasses.asdict(options))}" if self.has_trajectories else ""
        how += f", halting at a probability above {threshold:g}" if halts else ""
        console.say(lines_of(self, run, _shown(evaluation), how + " with refill" * self.refill))
        for line in _details(evaluation, result):
            console.say(f"  {line}".rstrip())


def _save(
    config: PuzzleEvaluateOptions,
    options: TrajectoryOptions,
    run: Restored,
    puzzles: Mixture,
    evaluation: PuzzleEvaluation,
    result: TrajectoryEvaluation | None,
) -> None:
    """Writes the results to the run, if they are its own, and to `--results`."""
    halts, threshold = config.halting
    if result is not None:
        results = json.dumps(results_of(result, run.step), indent=1)
        if config.belongs_to_run and evaluation.metrics["count"]:
            write_text(run.folder.trajectories(config.split), results)
        if config.results is not None:
            write_text(path_of(config.results), results)
    elif config.belongs_to_run and halts:
        figures = evaluation.metrics | {"threshold": threshold, "step": run.step}
        if config.has_trajectories:
            names = ("trajectories", "noise", "depth", "views")
            figures |= {name: getattr(options, name) for name in names} | {"agree": int(options.agree)}
        write_text(run.folder.halted_early(config.split), json.dumps(figures, indent=1))
        on_this_host = jax.process_count() == 1  # several processes would have to compute it together
        if config.views > 1 and evaluation.solves is not None and len(puzzles.parts) == 1 and on_this_host:
            hardest = int(np.argmax(evaluation.solves))
            save_example(run.folder.view_example(config.split), example_of(run, puzzles, hardest, options))
    elif config.belongs_to_run:
        evaluation.save(run.folder, config.split)


def _details(evaluation: PuzzleEvaluation, result: TrajectoryEvaluation | None) -> list[str]:
    """Returns the lines below the metrics: the curve of trajectories, or that of early halting."""
    if not evaluation.metrics["count"]:
        return ["no solution of these puzzles is public, so there is no accuracy"]
    if result is not None:
        return ["", *trajectory_table(result)]
    curve = evaluation.halting_curve
    return ["", *table(curve)] if curve is not None and len(curve.by_steps) > 1 else []


def _state_of(path: str, config: PuzzleEvaluateOptions, first: Restored) -> TrainState:
    """Returns the state of a further run. Raises `UserError` unless it has the same model as the first one."""
    run = restore(path, step=config.step)
    if run.config.task != first.config.task or run.config.arch != first.config.arch:
        raise UserError(
            f"{path} has another architecture than {first.folder.path}, and several runs are evaluated as one model; "
            "give runs that differ in their seeds"
        )
    check_same_puzzles(puzzle_task(run).metadata, puzzle_task(first).metadata)
    return run.state


def _puzzles(config: PuzzleEvaluateOptions, run: Restored) -> Mixture:
    """Returns the puzzles to evaluate on. Raises `UserError` if the model cannot answer them."""
    if config.data_dir is None:
        puzzles = load_mixture(run.config.data_dir, config.split)
    else:
        puzzles = load_part(run.config.data_dir, config.split, config.data_dir)
    check_same_puzzles(puzzles.metadata, puzzle_task(run).metadata)
    return puzzles


def check_same_puzzles(given: Metadata, trained: Metadata) -> None:
    """Raises `UserError` unless a model trained on `trained` can answer puzzles of `given`.

    The sizes alone are not enough: 4x4 mazes have those of 4x4 Sudokus, and a mixture (`MIXED`) has those of no kind.
    """
    same_sizes = (given.seq_len, given.vocab_size) == (trained.seq_len, trained.vocab_size)
    if not same_sizes or (given.kind and trained.kind and given.kind != trained.kind):
        raise UserError(
            f"the data contains {describe(given)}, expected {describe(trained)} as in training; give a --data-dir of "
            "the same kind of puzzle"
        )
    if given.num_puzzle_identifiers > trained.num_puzzle_identifiers:
        raise UserError(
            f"the data has {given.num_puzzle_identifiers} puzzle identifiers, expected "
            f"{trained.num_puzzle_identifiers} as in training; give the data set of the training"
        )


def _arc_directory(config: PuzzleEvaluateOptions, run: Restored) -> Path | None:
    """Returns the ARC data set of the votes, if any. Raises `UserError` for files that cannot be written."""
    names = data_dirs(config.data_dir or run.config.data_dir)
    directory = dataset_folder(names[0])
    votes = len(names) == 1 and config.split == "test" and (directory / "test_puzzles.json").is_file()
    if config.predictions is not None and len(names) > 1:
        raise UserError(f"--predictions {config.predictions} is for one data set; set --data-dir to one of {names}")
    if config.submission is not None and not votes:
        raise UserError(f"--submission {config.submission} is for the test split of one ARC data set; omit it")
    for path in (config.predictions, config.submission, config.results):
        if path is not None:
            check_output(path)
    return directory if votes else None


def _predictions(puzzles: Mixture, evaluation: PuzzleEvaluation) -> Predictions:
    """Returns the last answers with the identifiers and the sequence length of their data set."""
    length = puzzles.parts[0].metadata.seq_len
    return Predictions(
        evaluation.puzzle_identifiers - puzzles.first_identifiers[0],
        evaluation.inputs[:, :length],
        evaluation.predictions[-1][:, :length],
        evaluation.q_halt_logits[-1],
    )


def _shown(evaluation: PuzzleEvaluation) -> dict[str, float]:
    """Returns the metrics; without a public solution only `count`."""
    metrics = evaluation.metrics
    return metrics if metrics["count"] else {"count": metrics["count"]}


def _with_votes(
    config: PuzzleEvaluateOptions, arc: Path | None, puzzles: Mixture, evaluation: PuzzleEvaluation
) -> PuzzleEvaluation:
    """Writes the requested files; adds the ARC metrics for an ARC data set."""
    if arc is None and config.predictions is None:
        return evaluation
    predictions = _predictions(puzzles, evaluation)
    if config.predictions is not None:
        save_predictions(config.predictions, predictions)
    if arc is None:
        return evaluation
    scores = score_predictions(arc, [predictions])
    if config.submission is not None:
        write_submission(config.submission, scores)
    return dataclasses.replace(evaluation, metrics=evaluation.metrics | scores.figures)
