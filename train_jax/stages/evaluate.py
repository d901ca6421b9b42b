"""`trm evaluate RUN_DIR`: score a run's newest checkpoint on its test set, with its averaged weights."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

import bridge
from train_jax.command_line import parse
from train_jax.core.step import EvalStep, make_eval_step, make_halting_eval_step
from train_jax.errors import UserError
from train_jax.report.terminal import progress
from train_jax.run.folder import write_text
from train_jax.run.restore import Restored, restore
from train_jax.runtime.devices import Devices, join_processes
from train_jax.tasks.puzzles.evaluation import Evaluation, evaluate, save_evaluation
from train_jax.tasks.puzzles.halting import table, threshold_logit
from train_jax.tasks.puzzles.mixture import Mixture, data_dirs, load_mixture, load_part
from train_jax.tasks.puzzles.predictions import Predictions, save_predictions
from train_jax.tasks.puzzles.voting import score_predictions, write_submission


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Score a run's newest checkpoint: every example once, averaged weights, every sequence to the halt limit, with the
    curve of accuracy against mean ACT steps that halting earlier would give."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it."""
    data_dir: str | None = None
    """Data set to score on; the run's own if not given. Of a run on several, one of them."""
    split: Literal["test", "train"] = "test"
    """Which part of it."""
    weights: str | None = None
    """Score these weights instead: .pt or .safetensors with PyTorch names (published checkpoints, `trm export`)."""
    batch_size: int = 0
    """Examples in a batch, all devices together; 0 takes the run's."""
    limit: int = 0
    """Score only so many examples; 0 takes all."""
    halt_early: bool = False
    """Take a sequence's answer at the first ACT step where the model itself says halt, and compute no further than a
    batch on a device needs."""
    halt_threshold: float | None = None
    """How sure of its answer the model has to be for that, a probability; 0.5 if not given, as in training. 1 is never
    reached. Implies --halt-early."""
    predictions: str | None = None
    """Write inputs, answers and halting logits to this .npz file, for `trm score`."""
    submission: str | None = None
    """Write the two grids with the most votes for every ARC test input to this file, as Kaggle takes them."""


def main(config: Evaluate) -> None:
    halts, threshold = _halting(config)
    join_processes()
    devices = Devices()
    run = restore(config.run_dir)
    if config.weights is not None:
        try:
            run = run.with_weights(bridge.load_weights(config.weights))
        except bridge.BridgeError as error:
            raise UserError(str(error)) from error
    puzzles = _puzzles(config, run)
    arc = _arc_directory(config, run)
    with progress("evaluating") as advance:
        found = evaluate(
            devices.evaluate(_step(run, threshold if halts else None)),
            run.learner,
            puzzles,
            devices,
            batch_size=config.batch_size or run.config.eval_batch_size,
            limit=config.limit,
            progress=advance,
        )
    if not devices.writes:
        return
    if arc is not None or config.predictions is not None:
        figures = _vote(config, arc, _predictions(puzzles, found))
        found = dataclasses.replace(found, metrics=found.metrics | figures)
    if config.weights is None and config.data_dir is None and not config.limit:
        if halts:
            figures = found.metrics | {"threshold": threshold, "step": run.step}
            write_text(run.folder.halted_early(config.split), json.dumps(figures, indent=1))
        else:
            save_evaluation(run.folder, config.split, found)
    until = f", halting when surer than {threshold:g}" if halts else ""
    print(f"{config.run_dir} at step {run.step}, {config.split} set, averaged weights{until}:")
    for name, value in found.metrics.items():
        print(f"  {name:<16} {value:.0f}" if name == "count" else f"  {name:<16} {value:.4f}")
    if found.halting_curve is not None and len(found.halting_curve.by_steps) > 1:
        print("\n".join(["", *(f"  {line}" for line in table(found.halting_curve))]))


def _halting(config: Evaluate) -> tuple[bool, float]:
    """Whether sequences halt early, and at which probability. Raises `UserError` for one that is none."""
    threshold = 0.5 if config.halt_threshold is None else config.halt_threshold
    threshold_logit(threshold)
    return config.halt_early or config.halt_threshold is not None, threshold


def _step(run: Restored, threshold: float | None) -> EvalStep:
    limit = run.config.arch.halt_max_steps
    if threshold is None:
        return make_eval_step(run.objective, limit)
    return make_halting_eval_step(run.objective, limit, threshold_logit(threshold))


def _puzzles(config: Evaluate, run: Restored) -> Mixture:
    """What to score on. Raises `UserError` where the model cannot answer it."""
    if config.data_dir is None:
        puzzles = load_mixture(run.config.data_dir, config.split)
    else:
        puzzles = load_part(run.config.data_dir, config.split, config.data_dir)
    found_size = (puzzles.metadata.seq_len, puzzles.metadata.vocab_size)
    if found_size != (run.data.seq_len, run.data.vocab_size):
        raise UserError(
            f"the data has {found_size[0]} tokens of {found_size[1]} kinds, the run was trained on {run.data.seq_len} "
            f"of {run.data.vocab_size}; give a --data-dir of the same kind of puzzle"
        )
    if puzzles.metadata.num_puzzle_identifiers > run.data.num_puzzle_identifiers:
        raise UserError(
            f"the data has {puzzles.metadata.num_puzzle_identifiers} puzzle identifiers, the run was trained on "
            f"{run.data.num_puzzle_identifiers}; give the data set that it was trained on"
        )
    return puzzles


def _arc_directory(config: Evaluate, run: Restored) -> Path | None:
    """The data set that votes are counted for, if any. What cannot be written is said before the work."""
    names = data_dirs(config.data_dir or run.config.data_dir)
    directory = Path(names[0])
    votes = len(names) == 1 and config.split == "test" and (directory / "test_puzzles.json").is_file()
    if config.predictions is not None and len(names) > 1:
        raise UserError(
            f"--predictions {config.predictions} holds answers to one data set; give --data-dir one of {names}"
        )
    if config.submission is not None and not votes:
        raise UserError(f"--submission {config.submission} is for the test split of one ARC data set; leave it out")
    for path in (config.predictions, config.submission):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UserError(f"{Path(path).parent} is not a folder; give a file in one that is there")
    return directory if votes else None


def _predictions(puzzles: Mixture, found: Evaluation) -> Predictions:
    """The last answers, numbered and as long as in their own data set."""
    length = puzzles.parts[0].metadata.seq_len
    return Predictions(
        found.puzzle_identifiers - puzzles.first_identifiers[0],
        found.inputs[:, :length],
        found.predictions[-1][:, :length],
        found.q_halt_logits[-1],
    )


def _vote(config: Evaluate, arc: Path | None, predictions: Predictions) -> dict[str, float]:
    """Keeps the predictions where asked; the ARC figures, if it is an ARC data set."""
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
