"""`trm STAGE …`: imports the stage and passes it the remaining arguments. A `UserError` is one line and exit status 2.

Only the stage imports torch and JAX, so that `trm --help` and `trm --version` are fast.
"""

import errno
import importlib
import os
import sys

from train_jax.errors import PreemptedError, StorageError, UserError
from train_jax.version import version_text

GROUPS = {
    "data": {
        "build-data": "build a data set (sudoku, maze, arc), or inspect one",
    },
    "training": {
        "train": "train a model, or continue a run: trm train PRESET [--field value …]",
        "summary": "print the accuracy, training time and files of a run",
        "sweep": "list and show the experiments",
    },
    "evaluation": {
        "evaluate": "score a run on its test set with its EMA weights",
        "score": "count the votes in files of predictions for an ARC data set",
        "solve": "show a run's answer to one puzzle after every ACT step",
    },
    "results": {
        "export": "write a run's EMA weights under PyTorch names and check them in PyTorch",
        "report": "write a run's HTML report",
    },
}
"""The stages by group, in the order of `trm --help`."""

FULL_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

STAGES = {name: text for group in GROUPS.values() for name, text in group.items()}


def usage() -> str:
    width = max(map(len, STAGES))
    lines = [
        "usage: trm STAGE [arguments]",
        "       trm STAGE --help    arguments of one stage",
        "       trm --version       version, commit, and versions of torch, torchax and jax",
    ]
    for group, stages in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<{width}}  {text}" for name, text in stages.items())]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs one command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        status = _run(argv)
        sys.stdout.flush()
    except UserError as error:
        print(f"trm: {error}", file=sys.stderr)
        return error.STATUS
    except PreemptedError as error:
        print(f"trm: {error}", file=sys.stderr)
        return error.STATUS
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        print(
            f"trm: {error.filename or 'a file'} cannot be written ({error.strerror}); free some space", file=sys.stderr
        )
        return StorageError.STATUS
    except KeyboardInterrupt:
        print("trm: interrupted", file=sys.stderr)
        return 130
    return status


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name = argv[0]
    if name in ("-V", "--version"):
        print(version_text())
        return 0
    if name not in STAGES:
        raise UserError(f"unknown stage {name!r}; use one of {', '.join(STAGES)}")
    stage = importlib.import_module(f"train_jax.stages.{name.replace('-', '_')}")
    stage.cli(argv[1:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
