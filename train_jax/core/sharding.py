"""Placement of parameters, their averages and the optimizer state: whole on every device, or a shard on each.

`Replicated` and `Sharded` have the same methods, which a training step calls inside of the mapped function. With
`Sharded`, gradients are summed by a reduce-scatter and parameters are collected by an all-gather.

References:
  Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
  https://arxiv.org/abs/1910.02054, stage 1, with the parameters sharded too between steps
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train_jax.core.reduction import AXIS, Reduction, sum_over_devices
from train_jax.core.state import Arrays, TrainState

STATE_AXES: Any = TrainState(step=None, params=0, ema=0, opt_state=0, buffers=None, guard=None)  # type: ignore
"""The device axis of each field of a sharded state; `pmap` with several processes needs axes that can be hashed."""


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every device has all parameters."""

    reduction: Reduction = "flat"
    """The way in which gradients are summed over devices."""

    def whole(self, params: Arrays) -> Arrays:
        """Returns the parameters in their shapes, by their names."""
        return params

    def sum_gradients(self, gradients: Arrays, rest: Any) -> tuple[Arrays, Any]:
        """Sums over all devices: gradients of whole parameters, returned like those of the state, and another tree."""
        return sum_over_devices((gradients, rest), self.reduction)

    def squares(self, arrays: Arrays) -> Arrays:
        """Returns the sum of squares of each parameter by its name, equal on all devices."""
        return {name: jnp.sum(jnp.square(array)) for name, array in arrays.items()}

    def norm(self, arrays: Arrays) -> jax.Array:
        """Returns the global norm, equal on all devices."""
        return jnp.asarray(optax.tree.norm(arrays))


@dataclasses.dataclass(frozen=True)
class Bucket:
    """An array that the devices share along its first axis: one parameter, or a matrix for each device.

    A parameter keeps its shape if the number of devices divides its rows; otherwise it is flattened. Matrices of one
    shape that an update needs whole are concatenated, one for each device. Zeros fill the array up.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    """The shape of each parameter."""
    matrices: bool
    devices: int

    @property
    def key(self) -> str:
        """The name of the bucket: that of its first parameter."""
        return self.names[0]

    @property
    def flat(self) -> bool:
        return not self.matrices and (not self.shape or self.shape[0] % self.devices > 0)

    def join(self, arrays: Arrays) -> Any:
        """Returns `[devices * rows of a shard, …]` of NumPy or JAX arrays by name, in the shapes of the parameters."""
        first = arrays[self.key]
        xp = np if isinstance(first, np.ndarray) else jnp
        array: Any = xp.concatenate([arrays[name] for name in self.names]) if self.matrices else first
        array = array.reshape(-1) if self.flat else array
        rows = len(first) if self.matrices else -(-len(array) // self.devices)
        padding = self.devices * rows - len(array)
        return xp.pad(array, [(0, padding), *[(0, 0)] * (array.ndim - 1)]) if padding else array

    def split(self, array: Any) -> Arrays:
        """Splits an array `[devices * rows of a shard, …]` into the arrays of the parameters by name."""
        if self.matrices:
            each = array.reshape(self.devices, -1, *array.shape[1:])
            return {name: each[number] for number, name in enumerate(self.names)}
        return {self.key: array[: math.prod(self.shape)].reshape(self.shape) if self.flat else array}

    def squares(self, shard: jax.Array) -> jax.Array:
        """Returns the part of a device in the sums of squares of the parameters, `[devices]` for matrices, or `[1]`."""
        device = jax.lax.axis_index(AXIS)
        if self.flat:  # an update of the padding may be 0 / 0
            shard = jnp.where(device * len(shard) + jnp.arange(len(shard)) < math.prod(self.shape), shard, 0)
        total = jnp.sum(jnp.square(shard))
        return jnp.where(jnp.arange(self.devices) == device, total, 0) if self.matrices else total[None]


class Sharded:
    """Every device has a shard of each bucket, under the name of the bucket's first parameter.

    So the name of a shard has the parameter group of all its parameters, and of the shards that a `muon` optimizer
    updates, those of hidden matrices are the ones with two axes, as `muon_labels` expects.
    """

    def __init__(self, params: Arrays, trained: Arrays, alike: Sequence[Sequence[str]], devices: int):
        """`alike` has lists of trained matrices of one shape that an update needs whole."""
        matrices = [tuple(names[n : n + devices]) for names in alike for n in range(0, len(names), devices)]
        others = params.keys() - {name for names in matrices for name in names}
        keys = [*matrices, *((name,) for name in params if name in others)]
        self.buckets = {
            names[0]: Bucket(names, params[names[0]].shape, number < len(matrices), devices)
            for number, names in enumerate(keys)
        }
        self._devices = devices
        self._dicts = [
            {name for name in arrays if name in names}
            for arrays in (params, trained)
            for names in (arrays, self.buckets)
        ]

    # ---- in a step

    def whole(self, params: Arrays) -> Arrays:
        gathered = {key: jax.lax.all_gather(shard, AXIS, tiled=True) for key, shard in params.items()}
        return {name: array for key in params for name, array in self.buckets[key].split(gathered[key]).items()}

    def sum_gradients(self, gradients: Arrays, rest: Any) -> tuple[Arrays, Any]:
        joined = {key: bucket.join(gradients) for key, bucket in self.buckets.items() if key in gradients}
        return jax.tree.map(lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True), joined), sum_over_devices(rest)

    def squares(self, arrays: Arrays) -> Arrays:
        sums = {key: self.buckets[key].squares(shard) for key, shard in arrays.items()}
        sums = sum_over_devices(sums) if sums else sums
        return {name: sums[key][number] for key in arrays for number, name in enumerate(self.buckets[key].names)}

    def norm(self, arrays: Arrays) -> jax.Array:
        return jnp.sqrt(jnp.sum(jnp.array(list(self.squares(arrays).values()), float)))

    # ---- the state

    def is_sharded(self, node: Any) -> bool:
        """Returns whether a node of the state is a dict of parameters, of values by their names, or of shards."""
        return isinstance(node, dict) and bool(node) and node.keys() in self._dicts

    def shard(self, state: TrainState) -> TrainState:
        """Returns a state whose arrays are in the shapes of the parameters with the device axes of `STATE_AXES`."""

        def join(node: Any) -> Any:
            if not self.is_sharded(node):
                return jnp.broadcast_to(node, (self._devices, *jnp.shape(node)))
            return {key: self._join(bucket, node) for key, bucket in self.buckets.items() if key in node}

        part = (state.params, state.ema, state.opt_state)
        params, ema, opt_state = jax.tree.map(join, part, is_leaf=self.is_sharded)
        return state._replace(params=params, ema=ema, opt_state=opt_state)

    def _join(self, bucket: Bucket, arrays: Arrays) -> Any:
        if _is_masked(arrays[bucket.key]):
            return arrays[bucket.key]
        array = bucket.join(arrays)
        return array.reshape(self._devices, -1, *array.shape[1:])

    def unshard(self, state: TrainState, split: Callable[[Bucket, Any], Arrays] = Bucket.split) -> TrainState:
        """Returns the state in the shapes of the parameters; shards are joined, `[devices * rows of a shard, …]`."""

        def divide(node: Any) -> Any:
            if not self.is_sharded(node):
                return node
            parts = [
                dict.fromkeys(self.buckets[key].names, value) if _is_masked(value) else split(self.buckets[key], value)
                for key, value in node.items()
            ]
            return {name: array for part in parts for name, array in part.items()}

        return cast(TrainState, jax.tree.map(divide, state, is_leaf=self.is_sharded))


Sharding = Replicated | Sharded


def _is_masked(value: Any) -> bool:
    """Returns whether Optax has no value here, because the parameter belongs to another group."""
    return isinstance(value, optax.MaskedNode)
