"""What the runs of a sweep cost: steps, examples and FLOPs, counted without data, devices or compilation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

from models_torch.flops import train_flops_per_example
from train_jax.errors import UserError
from train_jax.experiments.jobs import Job
from train_jax.experiments.runs import Plan, plan
from train_jax.runtime.batch_size import epochs_to_steps
from train_jax.tasks.puzzles.config import PuzzleConfig
from train_jax.tasks.puzzles.kinds import KINDS
from train_jax.tasks.puzzles.task import Curriculum


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of the training of one run, without evaluations."""

    plan: Plan | None
    """None if the number of steps depends on a data set that is not known."""
    flops: float | None
    """Of matrix products, without recomputation; None for data sets that no experiment knows."""


def cost_of(job: Job) -> Cost:
    """Returns the cost of a run. Raises `UserError` if its model cannot be built."""
    config = job.config
    if not (job.examples_per_epoch or config.steps):
        return Cost(None, None)
    length = plan(config, job.examples_per_epoch)
    if not job.sets:
        return Cost(length, None)
    examples = {arch: steps * config.global_batch_size for arch, steps in _archs(job, length.steps).items()}
    try:
        return Cost(length, sum(train_flops_per_example(config.model, arch) * n for arch, n in examples.items()))
    except ValueError as error:
        raise UserError(f"{job.work.name}: the model cannot be built: {error}") from error


def _archs(job: Job, steps: int) -> Counter[Any]:
    """Returns the steps that are trained with each architecture, with the sizes of the data sets."""
    config, arch = job.config, _sized(job)
    task = config.task_config
    if not isinstance(task, PuzzleConfig) or not task.curriculum_epochs:
        return Counter({arch: steps})
    ends = epochs_to_steps(job.examples_per_epoch, task.curriculum_epochs, config.global_batch_size)
    curriculum = Curriculum(task.curriculum_start, (arch.H_cycles, arch.L_cycles), ends)
    depths = Counter(curriculum.at(step) for step in range(min(ends, steps)))
    depths[curriculum.end] += max(0, steps - ends)
    return Counter(
        {dataclasses.replace(arch, H_cycles=H, L_cycles=L): count for (H, L), count in depths.items() if count}
    )


def _sized(job: Job) -> Any:
    """Returns the architecture for the longest sequence and the largest vocabulary of the data sets."""
    kinds = [kind for each in job.sets for known in KINDS if (kind := known.from_key(each.kind)) is not None]
    sizes = {"seq_len": max(kind.seq_len for kind in kinds), "vocab_size": max(kind.vocab_size for kind in kinds)}
    try:
        return dataclasses.replace(job.config.arch, **sizes)
    except ValueError as error:
        raise UserError(f"{job.work.name}: {error}") from error
