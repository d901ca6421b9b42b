"""Metrics of a step in addition to those of the task (norms by parameter group, skipped steps), and sums over a window.

The device returns few arrays, because each array has a cost per dispatch; the host converts them to named metrics.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from train_jax.core.state import Arrays

Groups = dict[str, tuple[str, ...]]
"""Maps the name of a group to the qualified names of its parameters."""

Metrics = dict[str, jax.Array]

_LAST = ("param_norm", "sparse_grad_norm", "consecutive_skipped", "loss_scale")
_LAST_BY_GROUP = ("grad_norm", "update_norm")
_RATES = "lr"
"""Metrics of which a window logs the last step; all others are sums over examples or counts."""


def parameter_groups(names: Iterable[str]) -> Groups:
    """Groups parameters by the first part of their names that is not common to all: `embed_tokens`, `lm_head`, …"""
    parts = [name.split(".") for name in names]
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))
    groups: dict[str, list[str]] = {}
    for path in parts:
        groups.setdefault(path[min(shared, len(path) - 1)], []).append(".".join(path))
    return {group: tuple(members) for group, members in groups.items()}


def norms_by_group(squares: Arrays, groups: Groups) -> Float[Array, "groups"]:
    """Returns the norm of each group from the sums of squares of its parameters; not finite if one of them is not."""
    return jnp.sqrt(jnp.array([sum(squares[name] for name in names) for names in groups.values()], float))


def window_sums(steps: Sequence[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Sums the metrics of the task and counts of skipped steps over the steps of a window."""
    names = [name for name in steps[-1] if name not in (*_LAST, *_LAST_BY_GROUP, _RATES)]
    return {name: sum(step[name] for step in steps) for name in names}


def optimizer_figures(last: dict[str, np.ndarray], groups: Groups, rates: Iterable[str]) -> dict[str, float]:
    """Returns learning rates and norms (total and by parameter group) of the last step of a window.

    `rates` are the names of `train_jax.core.optim.chain.logged_learning_rates`.
    """
    figures = {f"{_RATES}/{name}".rstrip("/"): float(rate) for name, rate in zip(rates, last[_RATES], strict=True)}
    figures |= {name: float(last[name]) for name in _LAST if name in last}
    for name in _LAST_BY_GROUP:
        norms = last[name]
        figures |= {name: math.hypot(*norms)}
        figures |= {f"{name}/{group}": float(norm) for group, norm in zip(groups, norms, strict=True)}
    return figures
