"""The only file that uses `pmap` and `shard_map`: runs steps on the devices and places arrays on them.

Replicated arrays have no device axis (`in_axes=None`); sharded arrays have a leading device axis. With several
processes, each process runs this code for its own devices, and a step spans the devices of all processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train_jax.core.reduction import AXIS
from train_jax.core.step import TrainStep
from train_jax.errors import UserError
from train_jax.runtime.backend import local_devices
from train_jax.runtime.batch_size import check_divides
from train_jax.runtime.compilation import check_program, compile_lowered, load_program

Runner = Literal["pmap", "shard_map"]


def on_one_device(function: Callable[..., Any], device: Any) -> Callable[..., Any]:
    """Returns a function, compiled for one device, whose collectives over `AXIS` have only this device."""
    mesh = Mesh(np.array([device]), (AXIS,))
    whole = PartitionSpec()
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False))


class Devices:
    """The devices of this process, in order.

    `parallel_*` turns a function of one device into one over all devices, `compile` compiles it ahead of time;
    `replicate`, `shard`, `split_batch` and `to_host` place arrays, `to_global`, `to_rows` and `from_rows` those of a
    checkpoint.
    """

    def __init__(self, count: int = 0, runner: Runner = "pmap", available: Sequence[Any] | None = None):
        """`count` is the number of devices of this process to use, 0 for all; `runner` maps steps over them.

        `available` are those of a topology, to compile for; by default the devices of this process.
        """
        available = local_devices() if available is None else available
        if count > len(available):
            raise UserError(f"{count} devices requested, {len(available)} available; use at most {len(available)}")
        if jax.process_count() > 1 and count not in (0, len(available)):
            raise UserError(
                f"{count} devices requested; with several processes, use all {len(available)} devices of each process"
            )
        self.local = list(available[: count or None])
        self._runner = runner
        self._all = jax.devices() if jax.process_count() > 1 else self.local
        self._by_rows: dict[Any, Any] = {}
        # Arrays of `pmap` are local to a process; arrays of `shard_map` span all processes.
        self._mesh = Mesh(np.array(self.local if runner == "pmap" else self._all), (AXIS,))

    @property
    def count(self) -> int:
        """The number of devices of all processes."""
        return len(self._all)

    @property
    def platform(self) -> str:
        """Platform of the devices, such as `cpu` or `tpu`."""
        return self.local[0].platform

    @property
    def kind(self) -> str:
        """Number and kind of the devices, such as `8 x TPU v4`."""
        return f"{len(self._all)} x {self.local[0].device_kind}"

    @property
    def per_replica(self) -> int:
        """The number of devices that have one replica of the model."""
        return len(self._all) // self.count

    @property
    def positions(self) -> list[int]:
        """The places of the devices of this process among all devices."""
        return [self._all.index(device) for device in self.local]

    def local_batch_size(self, global_batch_size: int) -> int:
        """Returns the examples per device. Raises `UserError` if the batch does not divide over the devices."""
        check_divides(global_batch_size, self.count, "devices")
        return global_batch_size // self.count

    # ---- functions over all devices

    def parallel_train_step(self, step: TrainStep, state_axes: Any = None) -> Any:
        """Maps `(state, carry, batch, key) -> (state, carry, metrics)` over all devices; donates state and carry.

        `key` is the result of `random_key`. `state_axes`: the device axis of the state's arrays, 0 or None, as a prefix
        of the state; by default all of it is replicated.
        """

        def with_key(state: Any, carry: Any, batch: Any, key_data: jax.Array) -> Any:
            return step(state, carry, batch, jax.random.wrap_key_data(key_data))

        return self.parallel(with_key, (state_axes, 0, 0, None), (state_axes, 0, None), donate=(0, 1))

    def parallel_eval_step(self, step: Callable[..., Any]) -> Any:
        """Maps `(state, batch) -> (metrics, outputs)`: metrics are replicated, outputs have a device axis."""
        return self.parallel(step, (None, 0), (None, 0))

    def parallel_map(self, function: Callable[..., Any], *, donate: bool = False) -> Any:
        """Maps `function(params, buffers, batch)` over the shards of the batch; the result has a device axis.

        With `donate`, the result may take the memory of the batch, which cannot be used again.
        """
        return self.parallel(function, (None, None, 0), 0, donate=(2,) if donate else ())

    def parallel_gather(self, function: Callable[[Any, Any], Any]) -> Any:
        """Maps `function(a, b)` over the shards of both; the result is replicated."""
        return self.parallel(function, (0, 0), None)

    def parallel(self, function: Callable, ins: tuple, outs: Any, donate: tuple[int, ...] = ()) -> Any:
        """Maps a function over all devices; `ins` and `outs` have a device axis, 0, or are replicated, None.

        They are prefixes of the arguments and of the result. `donate` are the arguments whose memory may be used again.
        """
        if self._runner == "pmap":
            return jax.pmap(
                function, axis_name=AXIS, devices=self._all, in_axes=ins, out_axes=outs, donate_argnums=donate
            )

        def on_one_device(*args: Any) -> Any:
            return _where_sharded(_add_axis, outs, function(*_where_sharded(_drop_axis, ins, args)))

        specs = jax.tree.map(_spec, (ins, outs), is_leaf=_is_none)
        sharded = jax.shard_map(on_one_device, mesh=self._mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
        return jax.jit(sharded, donate_argnums=donate)

    @property
    def compiles_for_arrays(self) -> bool:
        """True if `compile` needs the arguments of the first call, instead of their shapes."""
        return self._runner == "pmap" and jax.process_count() > 1

    def compile(self, program: Any, args: Any, saved: Path | None = None) -> tuple[Any, str]:
        """Compiles a function of `parallel_*` for arguments of these shapes, or loads it from the file `saved`.

        Returns also where the compiled program came from, in words.
        """
        lowered = program.lower(*args)
        if saved:
            return load_program(saved, lowered, self._all), f"from {saved}"
        compiled, source = compile_lowered(lowered, self._all)
        # For several processes only the function itself converts arguments of `pmap`; it reuses the compiled program.
        return program if self.compiles_for_arrays else compiled, source

    def check_saved(self, path: Path) -> None:
        """Raises `UserError` unless the file has a program for these devices, and for these versions of JAX."""
        check_program(path, None, self._all)

    def shapes(self, tree: Any, *, sharded: bool = False) -> Any:
        """Returns the shapes of arrays as `replicate` places them, or as `shard` does."""
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS) if sharded else PartitionSpec())
        given = None if self._runner == "pmap" else sharding  # `pmap` takes arrays from anywhere
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=given), tree)

    def limit_dispatch(self, pending: Sequence[Any]) -> None:
        """Blocks until only a few of the steps with these results, oldest first, are still running.

        More asynchronous steps gain nothing. Virtual devices share one thread pool: a second step could take the
        threads that a collective of the first step waits for.
        """
        ahead = 0 if self.platform == "cpu" else 2
        if len(pending) > ahead:
            jax.block_until_ready(pending[-1 - ahead])

    # ---- placement of arrays

    def placement_by_name(self, params: Any) -> Any:
        """Returns the `Placement` of parameters that are divided by their names; None, because these are whole."""

    def replicate(self, tree: Any) -> Any:
        """Replicates arrays with the sharding that steps return, so that no step is compiled twice."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def random_key(self, seed: int) -> jax.Array:
        """Returns replicated key data; not a typed key, because `pmap` with several processes would fetch it."""
        return self.replicate(jax.random.key_data(jax.random.key(seed)))

    def split_batch(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Reshapes the examples of this process, on the host, to a leading axis for its devices."""
        return jax.tree.map(lambda x: x.reshape(len(self.local), -1, *x.shape[1:]), batch)

    def shard(self, tree: Any) -> Any:
        """Places arrays with a leading device axis on the devices of this process."""
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        if self._mesh.size == len(self.local):
            return jax.device_put(tree, sharding)

        def place(x: Any) -> jax.Array:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return x  # already placed: the result of a step
            return jax.make_array_from_process_local_data(sharding, np.asarray(x))

        return jax.tree.map(place, tree)

    def to_host(self, tree: Any) -> Any:
        """Returns NumPy arrays: replicated arrays, and this process's shards of sharded arrays."""

        def local(x: Any) -> np.ndarray:
            if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
                return np.asarray(x)
            shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start)
            return np.concatenate([np.asarray(shard.data) for shard in shards])

        return jax.tree.map(local, jax.device_get(tree) if jax.process_count() == 1 else tree)

    def to_global(self, tree: Any) -> Any:
        """Converts arrays that are the same on every device to arrays over all processes, for a checkpoint.

        With one process they are copies on the host, because the next step may reuse their memory while it is written.
        """
        if jax.process_count() == 1:
            return jax.tree.map(np.array, tree)
        sharding = NamedSharding(Mesh(np.array(self._all), (AXIS,)), PartitionSpec())

        def globally(x: jax.Array) -> jax.Array:
            if not x.is_fully_addressable:
                return x
            return jax.make_array_from_single_device_arrays(
                x.shape, sharding, [shard.data for shard in x.addressable_shards]
            )

        return jax.tree.map(globally, tree)

    @property
    def row_sharding(self) -> NamedSharding | None:
        """Returns the sharding of the arrays of `to_rows`; None with one process, where they are on the host."""
        return None if jax.process_count() == 1 else NamedSharding(Mesh(np.array(self._all), (AXIS,)), _spec(0))

    def to_rows(self, tree: Any) -> Any:
        """Converts arrays `[devices, rows of a device, …]` to `[rows of the global batch, …]`, for a checkpoint.

        With one process they are copies on the host, as in `to_global`.
        """
        sharding = self.row_sharding

        def globally(x: jax.Array) -> Any:
            if sharding is None:  # the arrays of several devices are joined, which copies them
                rows = np.array(x) if self.count == 1 else np.asarray(x)
                return rows.reshape(-1, *x.shape[2:])
            parts = [shard.data.reshape(-1, *shard.data.shape[2:]) for shard in x.addressable_shards]
            rows = sum(len(part) for part in parts) // len(parts) * self.count
            return jax.make_array_from_single_device_arrays((rows, *parts[0].shape[1:]), sharding, parts)

        return jax.tree.map(globally, tree)

    def by_rows(self, function: Callable[[Any], Any], rows: Any) -> Any:
        """Applies a function to an array of `to_rows` that spans several processes. Collective.

        Its results are distributed over the devices by rows if these can be divided, otherwise replicated.
        """

        def sharding(x: Any) -> NamedSharding:
            divides = x.ndim and x.shape[0] % self.count == 0
            return NamedSharding(rows.sharding.mesh, _spec(0 if divides else None))

        known = (function, rows.shape, rows.dtype)
        if known not in self._by_rows:
            shardings = jax.tree.map(sharding, jax.eval_shape(function, rows))
            self._by_rows[known] = jax.jit(function, out_shardings=shardings)
        return jax.block_until_ready(self._by_rows[known](rows))

    def from_rows(self, tree: Any, like: Any) -> Any:
        """Returns this process's part of a result of `to_rows`, perhaps from other devices, in the shapes of `like`."""

        def local(rows: Any, expected: Any) -> np.ndarray:
            return self.to_host(rows).reshape(len(self.local), *expected.shape[1:])  # `like` may span all processes

        return jax.tree.map(local, tree, like)


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(AXIS)


def _is_none(axis: Any) -> bool:
    return axis is None


def _where_sharded(change: Callable[[Any], Any], axes: Any, tree: Any) -> Any:
    """Changes the parts of a tree whose axis is 0; `axes` is a prefix of it."""
    return jax.tree.map(lambda axis, part: part if axis is None else change(part), axes, tree, is_leaf=_is_none)


def _drop_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _add_axis(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


def devices_of(compute: Any, available: Sequence[Any] | None = None) -> Devices:
    """Returns the devices for the fields `compute` of a run; `available` are those of a topology."""
    if not compute.shard:
        return Devices(runner=compute.runner, available=available)
    # Imported here: most runs have whole parameters on each device.
    from train_jax.runtime.mesh import MeshDevices
    from train_jax.runtime.shard_patterns import read_patterns

    return MeshDevices(read_patterns(compute.shard), compute.model_devices, available)
