"""`trm <stage> …`: finds the stage, hands it the rest of the line, turns a user's mistake into one line and status 2.

Nothing heavy is imported before the stage is known, so that `trm --help` answers at once.
"""

import importlib
import os
import sys

from train_jax.errors import UserError

STAGES = {
    "build-data": "make a data set (sudoku, maze, arc), or inspect one",
    "train": "train a model: trm train PRESET [--field value …]",
    "sweep": "list and show the experiments",
    "evaluate": "score a run on its test set with its EMA weights",
    "score": "count the votes in predictions files for an ARC data set",
    "solve": "show the model think on one puzzle, step by step",
    "export": "write a run's EMA weights under their PyTorch names and check them in plain PyTorch",
    "report": "write a run's HTML report",
    "summary": "print what a run has reached",
}


def usage() -> str:
    lines = ["usage: trm STAGE [arguments]; trm STAGE --help explains one stage", "", "stages:"]
    lines += [f"  {name:<12} {text}" for name, text in STAGES.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name = argv[0]
    try:
        if name not in STAGES:
            raise UserError(f"unknown stage {name!r}; one of {', '.join(STAGES)}")
        stage = importlib.import_module(f"train_jax.stages.{name.replace('-', '_')}")
        stage.cli(argv[1:])
        sys.stdout.flush()
    except UserError as error:
        print(f"trm: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who read the output has had enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("trm: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
