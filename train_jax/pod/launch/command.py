"""The command that every host of a launch runs, checked before there is a host."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from train_jax.errors import UserError
from train_jax.run.storage import is_remote

EXAMPLE = "trm launch --rehearse 8x4 -- train tiny"


def check_command(command: Sequence[str], stages: Sequence[str], *, shared: bool = False) -> None:
    """Raises `UserError` for a command that could not run on the hosts.

    `shared`: whether there are several machines, so that a run folder must be in storage.
    """
    if not command:
        raise UserError(f"trm launch needs the command of the hosts behind --, such as `{EXAMPLE}`")
    if command[0] == "bash" and len(command) > 1:
        return
    if command[0] not in stages or command[0] == "launch":
        raise UserError(
            f"{command[0]!r} is not a command for hosts; give a stage of trm, such as train, or bash and a script"
        )
    if command[0] == "sweep":
        raise UserError(
            "a sweep trains each run in processes of one host, and would claim another run on every host of a launch; "
            "give `train ID`, or start `trm sweep` on single hosts with one --runs-root"
        )
    if command[0] == "train":
        _check_run(command[1:], shared)


def _check_run(argv: Sequence[str], shared: bool) -> None:
    from train_jax.run_arguments import parse_run  # imports torch and JAX
    from train_jax.runtime.supervisor import restarts_option

    _, rest = restarts_option(argv)
    _, config = parse_run(rest, prog="trm train", description="")
    if shared and not is_remote(config.run_dir):
        raise UserError(not_shared(config.run_dir))


def not_shared(run_folder: str) -> str:
    """The error for a run folder that only one of several hosts would see."""
    return f"run folder {run_folder} is on one host only; give --run-dir gs://bucket/folder, which all hosts share"


def check_assignments(texts: Sequence[str]) -> None:
    """Raises `UserError` for values of `--env` that are not NAME=VALUE, or that look like secrets."""
    for text in texts:
        name = text.partition("=")[0]
        if not is_assignment(text):
            raise UserError(f"--env {name}: expected NAME=VALUE")
        if any(word in name.upper() for word in ("KEY", "TOKEN", "SECRET", "PASSWORD")):
            raise UserError(f"--env {name} would be in command lines and logs; put it into --worker-env-file")


def is_assignment(text: str) -> bool:
    """Whether a text is NAME=VALUE, with a name that a shell accepts."""
    name, equals, _ = text.partition("=")
    return bool(equals) and name.isidentifier() and name.isascii()


def check_environment_file(path: str) -> None:
    """Raises `UserError` for a file with secrets that others can read, or whose lines are not NAME=VALUE."""
    if not path:
        return
    try:
        mode, lines = os.stat(path).st_mode, Path(path).read_text().splitlines()
    except OSError as error:
        raise UserError(f"--worker-env-file {path}: {error.strerror}") from None
    if mode & 0o077:
        raise UserError(f"--worker-env-file {path} can be read by others; run `chmod 600` on it")
    for number, text in enumerate(lines, 1):
        if text and not text.startswith("#") and not is_assignment(text):
            raise UserError(f"--worker-env-file {path}: line {number} is not NAME=VALUE")
