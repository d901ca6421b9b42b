"""Where parameters, their averages and the optimizer state are: whole on every device, or a shard on each.

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
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train_jax.core.reduction import AXIS, Reduction, sum_over_devices
from train_jax.core.state import Arrays, TrainState
from train_jax.optim.muon import muon_labels


class Sharding(Protocol):
    """The methods that a training step calls. `Arrays` of parameters are those of the state on this device."""

    def whole(self, params: Arrays) -> Arrays:
        """Returns the parameters in their shapes, by their names."""
        ...

    def sum_gradients(self, gradients: Arrays, rest: Any) -> tuple[Arrays, Any]:
        """Sums over all devices: gradients of whole parameters, returned like those of the state, and another tree."""
        ...

    def squares(self, arrays: Arrays) -> Arrays:
        """Returns the sum of squares of each parameter by its name, equal on all devices."""
        ...

    def norm(self, arrays: Arrays) -> jax.Array:
        """Returns the global norm, equal on all devices."""
        ...

    def muon_labels(self, arrays: Arrays) -> dict[str, str]:
        """Returns the labels of `train_jax.optim.muon.muon_labels`."""
        ...


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every device has all parameters."""

    reduction: Reduction = "flat"
    """How gradients are summed over devices."""

    def whole(self, params: Arrays) -> Arrays:
        return params

    def sum_gradients(self, gradients: Arrays, rest: Any) -> tuple[Arrays, Any]:
        return sum_over_devices((gradients, rest), self.reduction)

    def squares(self, arrays: Arrays) -> Arrays:
        return {name: jnp.sum(jnp.square(array)) for name, array in arrays.items()}

    def norm(self, arrays: Arrays) -> jax.Array:
        return jnp.asarray(optax.tree.norm(arrays))

    def muon_labels(self, arrays: Arrays) -> dict[str, str]:
        return muon_labels(arrays)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """An array that the devices share along its first axis: one parameter, or several matrices of one shape.

    A parameter keeps its shape if the number of devices divides its rows; otherwise it is flattened. Matrices that are
    updated as wholes are stacked, so that a device has some of them. Zeros fill the array up to a multiple of the
    number of devices.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    """The shape of each parameter."""
    stacked: bool
    devices: int

    @property
    def key(self) -> str:
        """The name of the bucket: that of its first parameter."""
        return self.names[0]

    @property
    def flat(self) -> bool:
        return not self.stacked and (not self.shape or self.shape[0] % self.devices > 0)

    @property
    def length(self) -> int:
        """The first axis without padding."""
        return len(self.names) if self.stacked else math.prod(self.shape) if self.flat else self.shape[0]

    @property
    def padded_length(self) -> int:
        return -(-self.length // self.devices) * self.devices

    def join(self, arrays: Arrays) -> Any:
        """Returns the array `[padded_length, …]` of NumPy or JAX arrays by name, in the shapes of the parameters."""
        first = arrays[self.key]
        xp = np if isinstance(first, np.ndarray) else jnp
        array: Any = xp.stack([arrays[name] for name in self.names]) if self.stacked else first
        array = array.reshape(-1) if self.flat else array
        padding = self.padded_length - self.length
        return xp.pad(array, [(0, padding), *[(0, 0)] * (array.ndim - 1)]) if padding else array

    def split(self, array: Any) -> Arrays:
        """Returns the arrays by name of an array `[padded_length, …]`."""
        if self.stacked:
            return {name: array[number] for number, name in enumerate(self.names)}
        return {self.key: array[: self.length].reshape(self.shape)}

    def squares(self, shard: jax.Array) -> jax.Array:
        """Returns the sums of squares of the parameters `[padded_length]`, or `[1]`, of which a device has a part."""
        first = jax.lax.axis_index(AXIS) * len(shard)
        if self.stacked:
            sums = jnp.sum(jnp.square(shard), axis=tuple(range(1, shard.ndim)))
            zeros = jnp.zeros(self.padded_length, sums.dtype)
            return jax.lax.dynamic_update_slice(zeros, sums, (first,))
        if self.padded_length > self.length:  # an update of the padding may be 0 / 0
            shard = jnp.where(first + jnp.arange(len(shard)) < self.length, shard, 0)
        return jnp.sum(jnp.square(shard))[None]


class Sharded:
    """Every device has a shard of each bucket, under the name of the bucket's first parameter."""

    def __init__(self, params: Arrays, trained: Arrays, stacks: Sequence[Sequence[str]], devices: int):
        """`stacks` are the names of matrices of one shape that an update needs whole; they are among `trained`."""
        self._matrices = {name for stack in stacks for name in stack}
        keys = [*stacks, *((name,) for name in params if name not in self._matrices)]
        self.buckets = {
            names[0]: Bucket(tuple(names), params[names[0]].shape, number < len(stacks), devices)
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

    def muon_labels(self, arrays: Arrays) -> dict[str, str]:
        return {name: "muon" if name in self._matrices else "adamw" for name in arrays}

    # ---- the state

    def is_sharded(self, node: Any) -> bool:
        """Returns whether a node of the state is a dict of parameters, of values by their names, or of shards."""
        return isinstance(node, dict) and bool(node) and node.keys() in self._dicts

    def axes(self, state: TrainState) -> TrainState:
        """Returns a prefix of the state: 0 for dicts of shards, which have a device axis, None for all else."""
        return jax.tree.map(lambda node: 0 if self.is_sharded(node) else None, state, is_leaf=self.is_sharded)

    def shard(self, state: TrainState) -> TrainState:
        """Returns a state whose arrays are in the shapes of the parameters as shards `[devices, …]`."""

        def join(node: Any) -> Any:
            if not self.is_sharded(node):
                return node
            return {key: self._join(bucket, node) for key, bucket in self.buckets.items() if key in node}

        return jax.tree.map(join, state, is_leaf=self.is_sharded)

    def _join(self, bucket: Bucket, arrays: Arrays) -> Any:
        if _is_masked(arrays[bucket.key]):
            return arrays[bucket.key]
        array = bucket.join(arrays)
        return array.reshape(self._devices, -1, *array.shape[1:])

    def unshard(self, state: TrainState, split: Callable[[Bucket, Any], Arrays] = Bucket.split) -> TrainState:
        """Returns the state in the shapes of the parameters; arrays of shards are joined, `[padded_length, …]`."""

        def divide(node: Any) -> Any:
            if not self.is_sharded(node):
                return node
            parts = [
                dict.fromkeys(self.buckets[key].names, value) if _is_masked(value) else split(self.buckets[key], value)
                for key, value in node.items()
            ]
            return {name: array for part in parts for name, array in part.items()}

        return cast(TrainState, jax.tree.map(divide, state, is_leaf=self.is_sharded))


def _is_masked(value: Any) -> bool:
    """Returns whether Optax has no value here, because the parameter belongs to another group."""
    return isinstance(value, optax.MaskedNode)
