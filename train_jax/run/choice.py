"""Which checkpoints of a run are meant: the newest, the best, one by its step, or several to average."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from train_jax.errors import UserError
from train_jax.run.checkpoint import Best, Checkpoints

NEWEST = "newest"


def choose(checkpoints: Checkpoints, wanted: str) -> int:
    """The step of a checkpoint: `newest`, `best` (by the figure that the run keeps the best by), or a number.

    Raises `UserError` if there is no such checkpoint.
    """
    steps, folder = checkpoints.steps(), checkpoints.folder
    if wanted == NEWEST and steps:
        return steps[-1]
    if wanted == "best":
        best = _best(checkpoints)
        if best is None:
            raise UserError(
                f"{folder} has no best checkpoint; train with --keep-best exact_accuracy, or use one of "
                f"{', '.join(map(str, steps))}"
            )
        wanted = str(best.step)
    if not wanted.isdecimal() or int(wanted) not in steps:
        shown = ", ".join(map(str, [*steps, NEWEST, "best"]))
        raise UserError(f"{folder} has no checkpoint of step {wanted}; use one of {shown}")
    return int(wanted)


def chosen_steps(checkpoints: Checkpoints, step: str, average: Sequence[int], average_last: int) -> list[int]:
    """The steps of the chosen checkpoints, newest last: one by `choose`, or those that `restore` averages.

    Raises `UserError` if there are no such checkpoints, and for several ways of choosing at once.
    """
    if not (average or average_last):
        return [choose(checkpoints, step)]
    if step != NEWEST or (average and average_last):
        raise UserError("several options choose checkpoints; give only one of --step, --average and --average-last")
    steps = checkpoints.steps()
    if average_last > len(steps):
        raise UserError(
            f"average_last is {average_last}, and {checkpoints.folder} has {len(steps)} checkpoints; use at most "
            f"{len(steps)}, or train with a larger --keep-checkpoints"
        )
    return steps[-average_last:] if average_last else sorted({choose(checkpoints, str(step)) for step in average})


def results_of(steps: Sequence[int]) -> str:
    """The name of the folder with the results of these checkpoints."""
    if len(steps) == 1:
        return f"at-step-{steps[0]}"
    return f"average-of-{'-'.join(map(str, steps))}" if len(steps) <= 8 else f"average-of-{len(steps)}-to-{steps[-1]}"


def _best(checkpoints: Checkpoints) -> Best | None:
    """As the newest checkpoint with intact notes knows it."""
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(Exception):  # whatever Orbax and JSON raise for damaged files
            notes = checkpoints.notes(step)
            return Best(**notes["best"]) if "best" in notes else None
    return None
