"""The settings of a `torch.optim` optimizer at every step, found by stepping a copy of its scheduler on the host.

A setting that changes becomes a float64 array `[steps]`; the others stay numbers.
For 1e6 steps of one parameter group, on two cores: 12 s, and 6 s for each further group; for each number that changes
until the end, 8 MB on the host and 4 MB in a float32 program; 0.1 ms of a step.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike

from train_jax.errors import UserError
from train_jax.script.rules import Number

LONGEST = 10_000_000
"""Steps for which settings are tabulated: more would take minutes, and 40 MB in the program for each setting."""
_Key = tuple[int, str, int | None]
"""A number in the groups: index of the group, name of the setting, and index in a tuple such as `betas`."""


def settings_by_step(
    optimizer: torch.optim.Optimizer, schedule: Any, total_steps: int, names: Sequence[str], *, where: str
) -> list[dict[str, Any]]:
    """Returns for each parameter group the settings in `names`: numbers, arrays `[total_steps]`, and tuples of them.

    The first row has the settings as they are: a scheduler's constructor has made its first step. Neither `optimizer`
    nor `schedule` changes. Raises `UserError` for `ReduceLROnPlateau`, for what cannot be copied or stepped without
    arguments, and for settings that are no finite numbers.
    """
    constant = dict(_read(optimizer, names, 1, where))
    changing: dict[_Key, np.ndarray] = {}
    if schedule is not None:
        optimizer, schedule = _copied(optimizer, schedule, total_steps, where)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer step was made between two of the schedule
            for step in range(1, total_steps):
                _step(schedule, step, total_steps, where)
                for key, value in _read(optimizer, names, step + 1, where):
                    if key not in changing:
                        if value == constant[key]:
                            continue
                        changing[key] = np.full(total_steps, constant[key])
                    changing[key][step] = value
    settings: list[dict[str, Any]] = [{} for _ in optimizer.param_groups]
    for key, value in (constant | changing).items():
        group, name, position = key
        if position is None:
            settings[group][name] = value
        else:
            settings[group][name] = (*settings[group].get(name, ()), value)
    return settings


def at_step(values: Number, count: ArrayLike, dtype: Any) -> Any:
    """Returns the value of a coefficient after `count` steps; the last one stays."""
    if not isinstance(values, np.ndarray):
        return values
    table = jnp.asarray(values.astype(dtype))
    return table[jnp.minimum(count, len(values) - 1)]


def shortened(values: ArrayLike) -> Number:
    """Returns values by step without the repetitions of the last one, and a number if there is only one."""
    array = np.atleast_1d(np.asarray(values, np.float64))
    different = np.flatnonzero(array != array[-1])
    if not len(different):
        return float(array[-1])
    return array[: different[-1] + 2]


def check_schedule(optimizer: torch.optim.Optimizer, schedule: Any, where: str) -> None:
    """Raises `UserError` for what is no scheduler, for one of another optimizer, and for `ReduceLROnPlateau`."""
    if not callable(getattr(schedule, "step", None)):
        raise UserError(
            f"{where}: the schedule is a {type(schedule).__name__} without a method `step`; return a scheduler of "
            "torch.optim.lr_scheduler"
        )
    for each in _parts(schedule):
        if isinstance(each, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UserError(
                f"{where}: ReduceLROnPlateau reads a metric during the run, and schedules are evaluated before it; use "
                "one that depends on the step alone, such as CosineAnnealingLR"
            )
        if getattr(each, "optimizer", optimizer) is not optimizer:
            raise UserError(
                f"{where}: the {type(each).__name__} belongs to another optimizer; make it with the one that is passed "
                "to `schedule`"
            )


def _parts(schedule: Any) -> Iterator[Any]:
    yield schedule
    for part in getattr(schedule, "_schedulers", ()):
        yield from _parts(part)


def _copied(optimizer: torch.optim.Optimizer, schedule: Any, total_steps: int, where: str) -> tuple[Any, Any]:
    """Returns copies of both, with the same parameters and without the optimizer's state."""
    if total_steps > LONGEST:
        raise UserError(
            f"{where}: the schedule would be evaluated for {total_steps} steps; use at most {LONGEST}, or no schedule"
        )
    check_schedule(optimizer, schedule, where)
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo[id(optimizer.state)] = {}
    try:
        return copy.deepcopy((optimizer, schedule), memo)
    except Exception as error:
        raise UserError(
            f"{where}: the {type(schedule).__name__} cannot be copied ({_brief(error)}); keep numbers and "
            "functions in it"
        ) from None


def _step(schedule: Any, step: int, total_steps: int, where: str) -> None:
    try:
        schedule.step()
    except Exception as error:
        raise UserError(
            f"{where}: the {type(schedule).__name__} fails after {step} of {total_steps} steps ({_brief(error)}); make "
            "it for as many steps as the run has"
        ) from None


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _read(
    optimizer: torch.optim.Optimizer, names: Sequence[str], step: int, where: str
) -> Iterator[tuple[_Key, float]]:
    """Yields every number of the groups. Raises `UserError` for one that is not finite."""
    for index, group in enumerate(optimizer.param_groups):
        for name in names:
            value = group[name]
            for position, each in enumerate(value) if isinstance(value, tuple | list) else ((None, value),):
                number = _number(each)
                if not math.isfinite(number):
                    raise UserError(
                        f"{where}: the setting {name} of parameter group {index} is {each!r} at step {step}; use "
                        "finite numbers"
                    )
                yield (index, name, position), number


def _number(value: Any) -> float:
    """Returns a number or a tensor with one element as a float; NaN for what is neither."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
