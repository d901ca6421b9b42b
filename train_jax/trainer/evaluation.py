"""The evaluation of a task whose figures are sums over the examples of a split."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train_jax.core.objective import Batch, Call, Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import process_shard
from train_jax.task import Evaluation, Evaluator

Values = Callable[[Call, Batch], Mapping[str, jax.Array]]
"""Returns values of each example, arrays of shape (batch,), by name. Traced."""
Figures = Callable[[dict[str, float]], dict[str, float]]
"""Returns the metrics for the sums of these values over all examples; `count` is the number of examples."""


def means(sums: dict[str, float]) -> dict[str, float]:
    """Returns the mean of each value over the examples, and `count`."""
    count = sums["count"]
    return {name: total / count for name, total in sums.items() if name != "count"} | {"count": count}


def evaluate_on(
    examples: Mapping[str, np.ndarray],
    values: Values,
    objective: Objective,
    devices: Devices,
    *,
    batch_size: int,
    figures: Figures = means,
) -> Evaluator:
    """Returns an evaluator of the averaged weights, for `Task.evaluator`.

    `examples`: all arrays of a split, with the examples along the first axis, the same on every process. `values`:
    calls the module in evaluation mode on a batch of some of them. `batch_size`: examples at a time, on all devices.
    Raises `UserError` for a batch that does not divide over the devices, and for a split without examples.
    """
    total = len(next(iter(examples.values())))
    if not total:
        raise UserError("there are no examples to evaluate on; give a test split that is not empty")
    rows = devices.local_batch_size(batch_size) * len(devices.local)

    def step(state: TrainState, batch: Any) -> Any:
        valid = batch.pop("valid")
        call = objective.call(state.eval_params, state.buffers, train=False)
        named = {"count": jnp.ones_like(valid), **values(call, batch)}
        sums = {name: jnp.where(valid > 0, value, 0).sum() for name, value in named.items()}
        return jax.lax.psum(sums, AXIS), {}

    parallel_step = devices.parallel_eval_step(step)

    def evaluate(state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
        placed = devices.replicate(state)
        sums: dict[str, float] = {}
        for batch in _batches(examples, min(limit or total, total), rows):
            computed, _ = parallel_step(placed, devices.shard(devices.split_batch(batch)))
            for name, value in devices.to_host(computed).items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return Evaluation(figures(sums))

    return evaluate


def _batches(examples: Mapping[str, np.ndarray], total: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields this process's batches of `rows` examples, as many as those of every other process.

    `valid` is 0 for rows that only fill the last batch.
    """
    index, count = process_shard()
    for start in range(0, -(-total // count), rows):
        numbers = count * np.arange(start, start + rows) + index
        batch = {name: array[np.minimum(numbers, total - 1)] for name, array in examples.items()}
        yield batch | {"valid": (numbers < total).astype(np.float32)}
