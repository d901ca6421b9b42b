"""What the runs of a sweep cost: steps, examples and FLOPs, counted without data, devices or compilation."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from models_torch.flops import train_flops_per_example
from train_jax.errors import UserError
from train_jax.experiments.jobs import Job
from train_jax.experiments.runs import Plan, plan
from train_jax.runtime.batch_size import epochs_to_steps
from train_jax.tasks.puzzles.kinds import kind_from_key
from train_jax.tasks.puzzles.task import Curriculum, PuzzleConfig


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
    curriculum = None
    if isinstance(config.task_config, PuzzleConfig) and config.task_config.curriculum_epochs:
        task = config.task_config
        curriculum = task.curriculum_start, task.curriculum_epochs, job.examples_per_epoch
    try:
        flops = train_flops(config.model, _sized(job), length.steps, config.global_batch_size, curriculum)
        return Cost(length, flops)
    except ValueError as error:
        raise UserError(f"{job.work.name}: the model cannot be built: {error}") from error


def train_flops(
    model: str, arch: Any, steps: int, batch_size: int, curriculum: tuple[Sequence[int], float, float] | None = None
) -> float:
    """Returns the FLOPs of matrix products of a training, without recomputation.

    `curriculum`: the H-cycles and L-cycles that it starts with, its epochs, and the examples of an epoch. Raises
    `ValueError` for a model whose FLOPs are not known.
    """
    archs = Counter({arch: steps}) if curriculum is None else _archs(arch, steps, batch_size, *curriculum)
    return sum(train_flops_per_example(model, each) * count * batch_size for each, count in archs.items())


def _archs(
    arch: Any, steps: int, batch_size: int, start: Sequence[int], epochs: float, examples_per_epoch: float
) -> Counter[Any]:
    """Returns the steps that are trained with each recursion depth."""
    ends = epochs_to_steps(examples_per_epoch, epochs, batch_size)
    schedule = Curriculum((start[0], start[1]), (arch.H_cycles, arch.L_cycles), ends)
    depths = Counter(schedule.at(step) for step in range(min(ends, steps)))
    depths[schedule.end] += max(0, steps - ends)
    return Counter(
        {dataclasses.replace(arch, H_cycles=H, L_cycles=L): count for (H, L), count in depths.items() if count}
    )


def _sized(job: Job) -> Any:
    """Returns the architecture for the longest sequence and the largest vocabulary of the data sets."""
    kinds = [kind for each in job.sets if (kind := kind_from_key(each.kind)) is not None]
    sizes = {"seq_len": max(kind.seq_len for kind in kinds), "vocab_size": max(kind.vocab_size for kind in kinds)}
    try:
        return dataclasses.replace(job.config.arch, **sizes)
    except ValueError as error:
        raise UserError(f"{job.work.name}: {error}") from error
