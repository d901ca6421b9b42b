"""The only file that knows `pmap`: which devices there are, how a step runs on all of them, how arrays get there.

State that is the same on every device has no device axis (`in_axes=None`); what is split has a leading one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train_jax.errors import UserError
from train_jax.puzzles.batches import check_divides
from train_jax.step import AXIS, EvalStep, TrainStep


class Devices:
    """The devices of this process, in order."""

    def __init__(self, count: int = 0):
        """`count`: how many to use; 0 takes all."""
        available = jax.local_devices()
        if count > len(available):
            raise UserError(f"{count} devices asked for, {len(available)} are there; use at most {len(available)}")
        self.local = available[: count or None]
        self._mesh = Mesh(np.array(self.local), (AXIS,))

    @property
    def count(self) -> int:
        return len(self.local) * jax.process_count()

    @property
    def kind(self) -> str:
        return f"{self.count} x {self.local[0].device_kind}"

    def local_batch_size(self, global_batch_size: int) -> int:
        """Examples on one device. Raises `UserError` when the batch does not divide."""
        check_divides(global_batch_size, self.count, "devices")
        return global_batch_size // self.count

    def train(self, step: TrainStep) -> Any:
        """`(learner, carry, batch, key) -> (learner, carry, metrics)` on all devices; the old state is given up."""
        return jax.pmap(
            step,
            axis_name=AXIS,
            devices=self.local,
            in_axes=(None, 0, 0, None),
            out_axes=(None, 0, None),
            donate_argnums=(0, 1),
        )

    def evaluate(self, step: EvalStep) -> Any:
        """`(learner, batch) -> (metrics, outputs)`; outputs keep their device axis."""
        return jax.pmap(step, axis_name=AXIS, devices=self.local, in_axes=(None, 0), out_axes=(None, 0))

    def for_each(self, function: Callable[..., Any]) -> Any:
        """`function(params, buffers, batch)` on each device's share of the batch; the result keeps the device axis."""
        return jax.pmap(function, axis_name=AXIS, devices=self.local, in_axes=(None, None, 0))

    def replicate(self, tree: Any) -> Any:
        """The same arrays on every device, placed as the steps return them, so that no step compiles twice."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def spread(self, tree: Any) -> Any:
        """Arrays with a leading device axis, each part on its device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec(AXIS)))

    def split(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This process's examples with a leading axis for its devices."""
        return jax.tree.map(lambda x: x.reshape(len(self.local), -1, *x.shape[1:]), batch)

    def shard(self) -> tuple[int, int]:
        """(which process this is, how many there are): whose examples to read."""
        return jax.process_index(), jax.process_count()
