"""`trm train PRESET`: train a model, or go on where the run stopped."""

import sys

import tyro

from train_jax.config import PRESETS, RunConfig, preset
from train_jax.errors import UserError
from train_jax.loop import train
from train_jax.tracking import duration


def main(config: RunConfig) -> None:
    figures = train(config)
    print(
        f"finished: {config.run_dir}: exact accuracy {figures['exact_accuracy']:.4f} on {figures['count']:.0f} "
        f"held-out puzzles, {figures['train_steps']:.0f} steps in {duration(figures['train_seconds'])}"
    )


def cli(argv: list[str]) -> None:
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    if name is None and not {"-h", "--help"} & set(rest):
        raise UserError(f"trm train needs a preset first; one of {', '.join(PRESETS)}")
    main(
        tyro.cli(
            RunConfig,
            args=rest,
            default=preset(name or next(iter(PRESETS))),
            prog=f"trm train {name or 'PRESET'}",
            description=f"Train a model. Presets: {', '.join(PRESETS)}. Defaults below are those of the preset.",
        )
    )


if __name__ == "__main__":
    cli(sys.argv[1:])
