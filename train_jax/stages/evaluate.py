"""`trm evaluate RUN_DIR`: score a run's newest checkpoint on its test set, with its averaged weights."""

import dataclasses
import sys
from typing import Annotated, Literal

import tyro

import bridge
from train_jax.devices import Devices
from train_jax.errors import UserError
from train_jax.evaluate import evaluate, save_evaluation
from train_jax.puzzles.mixture import load_mixture, load_part
from train_jax.restore import restore
from train_jax.step import make_eval_step


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """Score a run's newest checkpoint: every example once, every sequence to the halt limit, averaged weights."""

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


def main(config: Evaluate) -> None:
    run = restore(config.run_dir)
    if config.weights is not None:
        try:
            run = run.with_weights(bridge.load_weights(config.weights))
        except bridge.BridgeError as error:
            raise UserError(str(error)) from error
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
    devices = Devices()
    found = evaluate(
        devices.evaluate(make_eval_step(run.objective, run.config.arch.halt_max_steps)),
        run.learner,
        puzzles,
        devices,
        batch_size=config.batch_size or run.config.eval_batch_size,
        limit=config.limit,
        progress=_progress,
    )
    if config.weights is None and config.data_dir is None and not config.limit:
        save_evaluation(run.folder, config.split, found)
    print(f"{config.run_dir} at step {run.step}, {config.split} set, averaged weights:")
    for name, value in found.metrics.items():
        print(f"  {name:<16} {value:.0f}" if name == "count" else f"  {name:<16} {value:.4f}")


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def cli(argv: list[str]) -> None:
    main(tyro.cli(Evaluate, args=argv, prog="trm evaluate"))


if __name__ == "__main__":
    cli(sys.argv[1:])
