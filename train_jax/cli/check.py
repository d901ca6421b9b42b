"""`trm check`: what a run needs and computes, before it is trained."""

from __future__ import annotations

from collections.abc import Callable

from train_jax.errors import UserError
from train_jax.plugin import find, load_object
from train_jax.report.commands import commands_of
from train_jax.run.arguments import option_value, with_depth
from train_jax.run.presets import preset

_HELP = """usage: trm check [hosts|step|kernels|all] NAME [--field value …]

Check a run before it is trained. NAME is a preset, an experiment or a script such as mine.py; every field of
`trm train NAME` can follow. Status 1 if a check fails.

  hosts      hosts, devices, code, data and run folder, as `trm preflight`
  step       the model beside PyTorch, and its training step; for a script, its first steps beside PyTorch's own loop
  kernels    every kernel beside the plain path, with times
  all        these, training runs and a saved program, as `trm prove`

Without one of the words, it is `step`. `trm check step mine.py --help`, `trm preflight --help` and `trm prove --help`
list the options."""


def _step(argv: list[str]) -> None:
    argv = with_depth(argv)
    if not argv or argv[0].startswith("-"):
        raise UserError("trm check step needs a preset, an experiment or a script such as mine.py")
    task = option_value(argv, "--task") or preset(argv[0]).task
    own = commands_of(task).step_check
    if own:
        load_object(own, "step check")(argv)
    else:
        _run("prove", [*argv, "--only", "step"])


def _run(stage: str, argv: list[str]) -> None:
    load_object(find("stages", stage).target, "stage")(argv)


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "hosts": lambda argv: _run("preflight", argv),
    "step": _step,
    "kernels": lambda argv: _run("prove", [*argv, "--only", "kernels"]),
    "all": lambda argv: _run("prove", argv),
}


def cli(argv: list[str]) -> None:
    if not argv:
        raise UserError(f"trm check needs a preset, an experiment or a script; {_HELP.splitlines()[0]}")
    if argv[0] in ("-h", "--help"):
        print(_HELP)
        raise SystemExit(0)
    word, rest = (argv[0], argv[1:]) if argv[0] in CHECKS else ("step", argv)
    CHECKS[word](rest)
