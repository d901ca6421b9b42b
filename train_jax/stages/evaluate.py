"""`trm evaluate RUN_DIR`: evaluates a checkpoint of a run on its test set, with its averaged weights."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

import bridge
from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.help_pages import HelpPage
from train_jax.report.terminal import progress
from train_jax.run.choice import NEWEST
from train_jax.run.files import local_copy, write_text
from train_jax.run.restore import Restored, restore
from train_jax.run.storage import is_folder, path_of
from train_jax.runtime.backend import Platform
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import is_main_process, join_processes
from train_jax.tasks.puzzles.choosing import Chooser
from train_jax.tasks.puzzles.evaluation import Evaluation
from train_jax.tasks.puzzles.halting import table
from train_jax.tasks.puzzles.kinds import describe
from train_jax.tasks.puzzles.location import dataset_folder
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.mixture import Mixture, data_dirs, load_mixture, load_part
from train_jax.tasks.puzzles.predictions import Predictions, save_predictions
from train_jax.tasks.puzzles.solving import puzzle_task
from train_jax.tasks.puzzles.trajectory_evaluation import TrajectoryOptions
from train_jax.tasks.puzzles.trajectory_results import results_of, settings
from train_jax.tasks.puzzles.trajectory_results import save as save_trajectories
from train_jax.tasks.puzzles.trajectory_results import table as trajectory_table
from train_jax.tasks.puzzles.voting import score_predictions, write_submission


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Evaluate a checkpoint of a run with its averaged weights: every example once, every sequence to the halt
    limit, and the curve of accuracy against mean ACT steps for early halting. With --trajectories, --noise or --depth,
    several noisy trajectories for each example, and the curve of accuracy against their ACT steps."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step. The results of a chosen one are in
    RUN/at-step-N."""
    data_dir: str | None = None
    """Data set to evaluate on, by default that of the run; for a run on several data sets, one of them."""
    split: Literal["test", "train"] = "test"
    """Split of the data set."""
    weights: str | None = None
    """Evaluate these weights instead: .pt or .safetensors with PyTorch names (published checkpoints, `trm export`)."""
    batch_size: Annotated[int, Range(0, 2**24)] = 0
    """Examples per batch, on all devices together; 0 uses that of the run."""
    limit: Annotated[int, Range(0, 10**12)] = 0
    """Evaluate only the first examples; 0 uses all."""
    halt_early: bool = False
    """Use the answer of the first ACT step at which the model halts; a device stops when its whole batch has
    halted."""
    halt_threshold: Annotated[float, Range(0, 1)] | None = None
    """Halting probability above which a sequence halts; by default 0.5, as in training. 1 is never exceeded. Implies
    --halt-early."""
    refill: bool = False
    """With early halting, a row that has halted takes the next puzzle: the same answers in less time."""
    trajectories: Annotated[int, Range(1, 4096)] = 1
    """Trajectories per puzzle, each with its own noise; an answer is chosen among them."""
    noise: Annotated[float, Range(0, 1000)] = 0.0
    """Standard deviation of normal noise that is added to the latents after each ACT step."""
    depth: Annotated[int, Range(1, 4096)] | None = None
    """ACT steps of each trajectory; by default the halt limit of the run."""
    choose: Chooser = "halting"
    """How to choose the answer among trajectories: the highest halting logit of any ACT step, the vote of the
    trajectories, or the vote weighted by halting probability."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Random seed of the noise."""
    results: str | None = None
    """Write the results with trajectories to this JSON file too."""
    predictions: str | None = None
    """Write inputs, answers and halting logits to this .npz file, for `trm score`."""
    submission: str | None = None
    """Write the two grids with the most votes for every ARC test input to this file, in Kaggle's format."""
    platform: Platform = "auto"
    """Where to compute; on a TPU pod, every host runs this command."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {
        "halting": HelpPage("early halting", ("halt_early", "halt_threshold", "refill")),
        "trajectories": HelpPage(
            "several noisy trajectories for each example",
            ("trajectories", "noise", "depth", "choose", "seed", "results"),
        ),
    }


def main(config: Evaluate) -> None:
    if config.weights is not None and config.step != NEWEST:
        raise UserError(f"--weights and --step {config.step} both select weights; give only one of them")
    _check_trajectories(config)
    with join_processes(config.platform):
        _evaluate(config)


def _evaluate(config: Evaluate) -> None:
    halts, threshold = _halting(config)
    devices = Devices()
    run = restore(config.run_dir, step=config.step)
    task = puzzle_task(run)
    if config.weights is not None:
        try:
            with local_copy(path_of(config.weights)) as weights:
                run = run.with_weights(bridge.load_weights(weights))
        except bridge.BridgeError as error:
            raise UserError(str(error)) from error
    puzzles = _puzzles(config, run)
    arc = _arc_directory(config, run)
    if _has_trajectories(config):
        _evaluate_trajectories(config, run, puzzles, arc, devices)
        return
    with progress("evaluating") as advance:
        evaluator = task.evaluator(
            run.objective,
            devices,
            puzzles,
            batch_size=config.batch_size,
            halt_threshold=threshold if halts else None,
            refill=config.refill,
            progress=advance,
        )
        evaluation = evaluator(run.state, limit=config.limit)
    if not is_main_process():
        return
    evaluation = _with_votes(config, arc, puzzles, evaluation)
    if _belongs_to_run(config):
        if halts:
            figures = evaluation.metrics | {"threshold": threshold, "step": run.step}
            write_text(run.folder.halted_early(config.split), json.dumps(figures, indent=1))
        else:
            evaluation.save(run.folder, config.split)
    until = f", halting at a probability above {threshold:g}" if halts else ""
    _print_metrics(config, run, evaluation, until + " with refill" * config.refill)
    if evaluation.halting_curve is not None and len(evaluation.halting_curve.by_steps) > 1:
        print("\n".join(["", *(f"  {line}" for line in table(evaluation.halting_curve))]))


def _evaluate_trajectories(
    config: Evaluate, run: Restored, puzzles: Mixture, arc: Path | None, devices: Devices
) -> None:
    task = puzzle_task(run)
    depth = task.halt_max_steps if config.depth is None else config.depth
    options = TrajectoryOptions(config.trajectories, config.noise, depth, config.choose, config.seed)
    with progress("evaluating") as advance:
        evaluator = task.trajectory_evaluator(
            run.objective, devices, puzzles, options, batch_size=config.batch_size, progress=advance
        )
        result = evaluator(run.state, limit=config.limit)
    if not is_main_process():
        return
    evaluation = _with_votes(config, arc, puzzles, result.evaluation)
    result = dataclasses.replace(result, evaluation=evaluation)
    if _belongs_to_run(config):
        save_trajectories(result, run.folder, config.split, run.step)
    if config.results is not None:
        write_text(path_of(config.results), json.dumps(results_of(result, run.step), indent=1))
    _print_metrics(config, run, evaluation, f", {settings(dataclasses.asdict(options))}")
    print("\n".join(["", *(f"  {line}" for line in trajectory_table(result))]))


def _print_metrics(config: Evaluate, run: Restored, evaluation: Evaluation, how: str) -> None:
    print(f"{config.run_dir} at step {run.step}, {config.split} set, averaged weights{how}:")
    for name, value in evaluation.metrics.items():
        print(f"  {name:<16} {value:.0f}" if name == "count" else f"  {name:<16} {value:.4f}")


def _belongs_to_run(config: Evaluate) -> bool:
    """Whether the results are those of the run on its whole split, which its folder keeps."""
    return config.weights is None and config.data_dir is None and not config.limit


def _has_trajectories(config: Evaluate) -> bool:
    """Whether the evaluation differs from the ordinary one: one trajectory, without noise, to the halt limit."""
    return config.trajectories > 1 or config.noise > 0 or config.depth is not None


def _check_trajectories(config: Evaluate) -> None:
    halts, _ = _halting(config)
    if config.refill and not halts:
        raise UserError("--refill replaces sequences that halt early; add --halt-early or --halt-threshold")
    if not _has_trajectories(config):
        if config.results is not None:
            raise UserError(f"--results {config.results} is for --trajectories, --noise or --depth; omit it")
    elif halts:
        raise UserError("--halt-early does not go with --trajectories, --noise and --depth; omit one of them")


def _halting(config: Evaluate) -> tuple[bool, float]:
    """Returns whether sequences halt early, and the threshold."""
    threshold = 0.5 if config.halt_threshold is None else config.halt_threshold
    return config.halt_early or config.halt_threshold is not None, threshold


def _puzzles(config: Evaluate, run: Restored) -> Mixture:
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


def _arc_directory(config: Evaluate, run: Restored) -> Path | None:
    """Returns the ARC data set of the votes, if any. Raises `UserError` for files that cannot be written."""
    names = data_dirs(config.data_dir or run.config.data_dir)
    directory = dataset_folder(names[0])
    votes = len(names) == 1 and config.split == "test" and (directory / "test_puzzles.json").is_file()
    if config.predictions is not None and len(names) > 1:
        raise UserError(f"--predictions {config.predictions} is for one data set; set --data-dir to one of {names}")
    if config.submission is not None and not votes:
        raise UserError(f"--submission {config.submission} is for the test split of one ARC data set; omit it")
    for path in (config.predictions, config.submission, config.results):
        if path is not None and not is_folder(Path(path).parent):
            raise UserError(f"{Path(path).parent} is not a folder; give a file in an existing folder")
    return directory if votes else None


def _predictions(puzzles: Mixture, evaluation: Evaluation) -> Predictions:
    """Returns the last answers with the identifiers and the sequence length of their data set."""
    length = puzzles.parts[0].metadata.seq_len
    return Predictions(
        evaluation.puzzle_identifiers - puzzles.first_identifiers[0],
        evaluation.inputs[:, :length],
        evaluation.predictions[-1][:, :length],
        evaluation.q_halt_logits[-1],
    )


def _with_votes(config: Evaluate, arc: Path | None, puzzles: Mixture, evaluation: Evaluation) -> Evaluation:
    """Writes the requested files; adds the ARC metrics for an ARC data set."""
    if arc is None and config.predictions is None:
        return evaluation
    figures = _vote(config, arc, _predictions(puzzles, evaluation))
    return dataclasses.replace(evaluation, metrics=evaluation.metrics | figures)


def _vote(config: Evaluate, arc: Path | None, predictions: Predictions) -> dict[str, float]:
    """Writes the requested files; returns the ARC metrics for an ARC data set."""
    if config.predictions is not None:
        save_predictions(config.predictions, predictions)
    if arc is None:
        return {}
    scores = score_predictions(arc, [predictions])
    if config.submission is not None:
        write_submission(config.submission, scores)
    return scores.figures


def cli(argv: list[str]) -> None:
    main(parse(Evaluate, argv, prog="trm evaluate"))


if __name__ == "__main__":
    cli(sys.argv[1:])
