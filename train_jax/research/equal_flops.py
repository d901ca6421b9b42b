"""`trm sweep --equal-flops`: the steps of each run follow from its counted FLOPs, so that all runs cost the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from train_jax.errors import UserError
from train_jax.research.jobs import Job, cost_of
from train_jax.research.runs import command_of, experiment_run
from train_jax.research.table import EXPERIMENTS
from train_jax.run.presets import preset

TOLERANCE = 0.005
"""Largest difference of the FLOPs of two runs, relative to those of the first run."""


def with_equal_flops(jobs: Sequence[Job], base: str | None) -> list[Job]:
    """Returns the jobs with the numbers of steps that give them the FLOPs of the first one, to `TOLERANCE`.

    Counted are the matrix products of the train steps, as in a dry run. Raises `UserError` if the FLOPs of a run are
    not known, or if its steps are too few to come so close.
    """
    wanted = _flops(jobs[0])
    return [_with_flops(job, wanted, base) for job in jobs]


def _with_flops(job: Job, wanted: float, base: str | None) -> Job:
    steps = _steps_for(job, wanted)
    found = _with_steps(job, steps)
    cost = _flops(found)
    if abs(cost - wanted) > TOLERANCE * wanted:
        raise UserError(
            f"--equal-flops: {job.name} has {cost / wanted - 1:+.2%} of the FLOPs of the first run with {steps} steps, "
            f"expected at most {TOLERANCE:.1%}; train the first run for more steps"
        )
    if job.experiment in EXPERIMENTS:
        command = command_of(job.experiment, found.config, experiment_run(job.experiment, base), base)
    else:
        command = command_of(job.experiment, found.config, preset(job.experiment))
    return dataclasses.replace(found, command=command)


def _steps_for(job: Job, wanted: float) -> int:
    """Returns the number of steps whose FLOPs are closest; by bisection, because a growing depth costs more later."""
    few = 1
    many = 2
    while _flops(_with_steps(job, many)) < wanted:
        few = many
        many = 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        if _flops(_with_steps(job, middle)) < wanted:
            few = middle
        else:
            many = middle
    return min(few, many, key=lambda steps: abs(_flops(_with_steps(job, steps)) - wanted))


def _with_steps(job: Job, steps: int) -> Job:
    return dataclasses.replace(job, config=dataclasses.replace(job.config, steps=steps), steps=steps)


def _flops(job: Job) -> float:
    _, flops = cost_of(job)
    if flops is None:
        raise UserError(f"--equal-flops: the FLOPs of {job.name} are not known; omit the run or --equal-flops")
    return flops
