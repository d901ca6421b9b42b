"""Moves the state of a run between the host and its devices, where it is replicated or sharded."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np

from train_jax.core.sharding import STATE_AXES, Bucket, Sharded, Sharding
from train_jax.core.state import Arrays, TrainState
from train_jax.runtime.devices import Devices


class Placement:
    """The placement of the state between two steps: every device has the whole state."""

    axes: Any = None
    """The device axis of each array of the state, 0 or None, as a prefix of the state."""

    def __init__(self, devices: Devices, sharding: Sharding):
        """`sharding` is the sharding of the training step."""
        self._devices = devices
        self.sharding = sharding

    def table(self) -> list[str]:
        """Returns lines for the log of a run that say which device has what; none if every device has everything."""
        return []

    def shapes(self, state: TrainState) -> TrainState:
        """Returns the shapes that the training step takes, for those of a whole state."""
        return state

    def place(self, state: TrainState) -> TrainState:
        """Places a whole state on the devices."""
        return self._devices.replicate(state)

    def whole(self, state: TrainState) -> TrainState:
        """Returns the state with whole parameters and averages on every device. Collective."""
        return state

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """Returns a copy in the shapes of the parameters, for `Checkpoints.save`. Collective."""
        return self._devices.to_global(state)


class ShardedState(Placement):
    """Every device has a shard of parameters, averages and optimizer state, and the whole rest of the state."""

    axes = STATE_AXES

    sharding: Sharded

    def __init__(self, devices: Devices, sharding: Sharded):
        super().__init__(devices, sharding)
        self._gather = devices.parallel_gather(self._whole)

    def _whole(self, params: Arrays, ema: Arrays) -> tuple[Arrays, Arrays]:
        return self.sharding.whole(params), self.sharding.whole(ema)

    def shapes(self, state: TrainState) -> TrainState:
        return jax.eval_shape(self.sharding.shard, state)

    def place(self, state: TrainState) -> TrainState:
        def placed(axis: int | None, part: Any) -> Any:
            if axis is None:
                return self._devices.replicate(part)
            return self._devices.shard(jax.tree.map(lambda x: np.asarray(x)[self._devices.positions], part))

        sharded = self.sharding.shard(jax.tree.map(np.asarray, state))
        return jax.tree.map(placed, self.axes, sharded, is_leaf=lambda axis: axis is None)

    def whole(self, state: TrainState) -> TrainState:
        """Returns the whole state without the optimizer state."""
        jax.block_until_ready(state)  # virtual devices cannot run another collective beside the step
        params, ema = jax.block_until_ready(self._gather(state.params, state.ema))
        return state._replace(params=params, ema=ema, opt_state=())

    def to_checkpoint(self, state: TrainState) -> TrainState:
        def joined(axis: int | None, part: Any) -> Any:
            if axis is None:
                return self._devices.to_global(part)
            return jax.tree.map(rows_or_copy, part, is_leaf=self.sharding.is_sharded)

        def rows_or_copy(node: Any) -> Any:
            if self.sharding.is_sharded(node):
                return self._devices.to_rows(node)
            return self._devices.to_global(self._devices.replicate(np.asarray(node.addressable_shards[0].data)[0]))

        def split(bucket: Bucket, rows: Any) -> Arrays:
            return bucket.split(rows) if isinstance(rows, np.ndarray) else self._devices.by_rows(bucket.split, rows)

        jax.block_until_ready(state)
        rows = jax.tree.map(joined, self.axes, state, is_leaf=lambda axis: axis is None)
        return self.sharding.unshard(cast(TrainState, rows), split)
