"""What a step reports beside the module's sums: norms by parameter group, when sequences halted, skipped steps.

On the device few arrays, since every one costs time to hand over; on the host names.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from train_jax.core.state import Arrays

Groups = dict[str, tuple[str, ...]]
"""Qualified names of parameters by the name of their group."""

Metrics = dict[str, jax.Array]

_LAST = ("lr", "param_norm", "puzzle_grad_norm", "consecutive_skipped", "loss_scale")
_LAST_BY_GROUP = ("grad_norm", "update_norm")
"""Metrics of which a window shows the last step; all others are sums over examples or counts."""


def parameter_groups(names: Iterable[str]) -> Groups:
    """By the first part of their qualified names that they do not all share: `embed_tokens`, `L_level`, `lm_head`, …"""
    parts = [name.split(".") for name in names]
    shared = sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))
    groups: dict[str, list[str]] = {}
    for path in parts:
        groups.setdefault(path[min(shared, len(path) - 1)], []).append(".".join(path))
    return {group: tuple(members) for group, members in groups.items()}


def norms_by_group(arrays: Arrays, groups: Groups) -> Float[Array, "groups"]:
    """The global norm of each group; not finite if any of its entries is not, or their squares' sum is past float32."""
    squares = [sum(jnp.sum(jnp.square(arrays[name])) for name in names) for names in groups.values()]
    return jnp.sqrt(jnp.array(squares, float))


def halting_histogram(carry: Any, halt_max_steps: int) -> dict[str, Int[Array, "steps"]]:
    """How many sequences halted in this step after 1, 2, … ACT steps; nothing for a carry that does not say."""
    if not (hasattr(carry, "halted") and hasattr(carry, "steps")):
        return {}
    after = jnp.arange(1, halt_max_steps + 1)
    return {"halted_at": jnp.sum(carry.halted[:, None] & (carry.steps[:, None] == after), axis=0, dtype=jnp.int32)}


def means(sums: dict[str, float], examples: float) -> dict[str, float]:
    """Sums and counts to means: losses over all examples of the step, the rest over those that halted in it."""
    count = max(sums["count"], 1)
    averaged = {
        name: (value / examples if examples else math.nan) if name.endswith("loss") else value / count
        for name, value in sums.items()
    }
    return averaged | {"count": sums["count"]}


def window_means(steps: Sequence[dict[str, np.ndarray]], groups: Groups, batch_size: int) -> dict[str, float]:
    """Named figures of the steps fetched: means over those that counted, norms and rates of the last one.

    `halted_at/N` is the share of the halted sequences that halted after N ACT steps; `skipped_steps` a count.
    """
    last = steps[-1]
    sums: dict[str, Any] = {
        name: sum(step[name] for step in steps) for name in last if name not in (*_LAST, *_LAST_BY_GROUP)
    }
    skipped, halted_at = sums.pop("skipped_steps"), sums.pop("halted_at", ())
    sums |= {f"halted_at/{number}": count for number, count in enumerate(halted_at, 1)}
    figures = means({name: float(value) for name, value in sums.items()}, batch_size * (len(steps) - int(skipped)))
    figures |= {name: float(last[name]) for name in _LAST if name in last} | {"skipped_steps": float(skipped)}
    for name in _LAST_BY_GROUP:
        norms = last[name]
        figures |= {name: math.hypot(*norms)}
        figures |= {f"{name}/{group}": float(norm) for group, norm in zip(groups, norms, strict=True)}
    return figures
