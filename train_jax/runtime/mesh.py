"""Devices as a mesh `data` x `model`, over which parameters are divided by their names: `--shard`.

A step is that of `pmap`, mapped by `vmap` over the replicas instead, under one `jit`: its sums over the devices become
sums over an axis that the mesh divides. Arrays have their global shapes, so evaluations, checkpoints and exports need
nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

import bridge
from train_jax.core.reduction import AXIS, sum_over_devices
from train_jax.core.sharding import Replicated
from train_jax.core.state import Arrays
from train_jax.errors import UserError
from train_jax.runtime.devices import Devices
from train_jax.runtime.placement import Placement
from train_jax.runtime.shard_patterns import AXES, ShardPattern

DATA, MODEL = AXES
_SHOWN = 30
"""Number of parameters in the table of a run."""


class MeshDevices(Devices):
    """The devices of one process; a replica of the model is a row of the mesh. `count` and `local` are replicas."""

    def __init__(self, patterns: Sequence[ShardPattern], model: int, available: Sequence[Any] | None = None):
        """`patterns` by name, the first one that matches decides; `model`: number of devices of a replica."""
        super().__init__(available=available)
        if jax.process_count() > 1:
            raise UserError(
                f"--shard divides a model over the devices of one process, and there are {jax.process_count()}; start "
                "one process, or omit --shard and use --compute.shard-optimizer, which works with several"
            )
        if len(self._all) % model:
            raise UserError(
                f"compute.model_devices {model} does not divide the {len(self._all)} devices; use a divisor of it"
            )
        grid = np.array(self._all).reshape(-1, model)
        self.mesh = Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))
        self.local = list(grid[:, 0])
        self._patterns = patterns

    @property
    def count(self) -> int:
        """The number of replicas of the model."""
        return self.mesh.shape[DATA]

    @property
    def positions(self) -> list[int]:
        return list(range(self.count))

    def placement_by_name(self, params: Arrays) -> StateByName:
        return StateByName(self, params)

    def parallel(self, function: Callable, ins: tuple, outs: Any, donate: tuple[int, ...] = ()) -> Any:
        mapped = jax.vmap(
            function, in_axes=ins, out_axes=outs, axis_name=AXIS, axis_size=self.count, spmd_axis_name=DATA
        )

        def on_the_mesh(*args: Any) -> Any:
            def placed(axis: int | None, part: Any) -> Any:
                return jax.lax.with_sharding_constraint(part, self._shardings(part, divided=axis is not None))

            return jax.tree.map(placed, outs, mapped(*args), is_leaf=lambda axis: axis is None)

        return jax.jit(on_the_mesh, donate_argnums=donate)

    def shapes(self, tree: Any, *, sharded: bool = False) -> Any:
        def shape(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(shape, tree, self._shardings(tree, divided=sharded))

    def replicate(self, tree: Any) -> Any:
        """Places arrays of the state: parameters, and what has their names, by the patterns, and others whole."""
        return jax.device_put(tree, self._shardings(tree, divided=False))

    def shard(self, tree: Any) -> Any:
        return jax.device_put(tree, self._shardings(tree, divided=True))

    def _shardings(self, tree: Any, *, divided: bool) -> Any:
        """Returns the shardings of a state, or of arrays with an axis of replicas, which are `divided` over `data`."""
        if divided:
            return jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec(DATA)), tree)

        def of_state(path: tuple, leaf: Any) -> NamedSharding:
            name = next((str(key.key) for key in reversed(path) if isinstance(key, DictKey)), "")
            spec = self.spec_of(name)
            fits = _divides(spec, np.shape(leaf), self.mesh)  # an optimizer may have other shapes under the same names
            return NamedSharding(self.mesh, spec if fits else PartitionSpec())

        return jax.tree_util.tree_map_with_path(of_state, tree)

    def spec_of(self, name: str, axes: Sequence[str] = AXES) -> PartitionSpec:
        """Returns how the patterns divide a parameter over these axes of the mesh."""
        dimensions = next((found for each in self._patterns if (found := each.of(name)) is not None), ())
        return PartitionSpec(*(tuple(axis for axis in dimension if axis in axes) or None for dimension in dimensions))

    def check(self, params: Arrays) -> None:
        """Raises `UserError` that names all parameters that a pattern does not fit, and patterns without one."""
        by_spec: dict[PartitionSpec, list[str]] = {}
        for name in params:
            by_spec.setdefault(self.spec_of(name), []).append(name)
        exact = {"|".join(map(re.escape, names)): spec for spec, names in by_spec.items()}
        misfits = [_unused(each, params) for each in self._patterns if not self._decides(each, params)]
        try:
            bridge.shardings(params, self.mesh, exact)
        except bridge.BridgeError as error:
            misfits += str(error).splitlines()
        if misfits:
            numbered = " ".join(f"({number}) {misfit}" for number, misfit in enumerate(misfits, 1))
            raise UserError(
                f"--shard does not fit the model; NAMES= before a pattern keeps parameters whole: {numbered}"
            )

    def _decides(self, pattern: ShardPattern, params: Arrays) -> bool:
        earlier = self._patterns[: self._patterns.index(pattern)]
        return any(pattern.of(name) is not None and all(e.of(name) is None for e in earlier) for name in params)


def _unused(pattern: ShardPattern, params: Arrays) -> str:
    examples = ", ".join([*params][:3])
    return (
        f"the pattern {pattern.pattern!r} decides for no parameter: it matches no whole name, such as {examples}, or "
        "earlier patterns match the same ones"
    )


def _divides(spec: PartitionSpec, shape: tuple[int, ...], mesh: Mesh) -> bool:
    sizes = [math.prod(mesh.shape[axis] for axis in _axes(entry)) for entry in spec]
    return len(sizes) <= len(shape) and all(n % size == 0 for n, size in zip(shape, sizes, strict=False))


@dataclasses.dataclass(frozen=True)
class ByName(Replicated):
    """Every device has its part of each parameter, by the name; in a step, the parts over `data` are collected."""

    devices: Any = None  # MeshDevices

    def whole(self, params: Arrays) -> Arrays:
        return self._placed(params, (MODEL,))

    def sum_gradients(self, gradients: Arrays, rest: Any) -> tuple[Arrays, Any]:
        # One vector of all gradients would collect the parts of each of them on every device.
        gradients, rest = sum_over_devices((gradients, rest), "leaves")
        return self._placed(gradients, AXES), rest

    def _placed(self, arrays: Arrays, axes: Sequence[str]) -> Arrays:
        mesh = self.devices.mesh
        shardings = {name: NamedSharding(mesh, self.devices.spec_of(name, axes)) for name in arrays}
        return {name: jax.lax.with_sharding_constraint(array, shardings[name]) for name, array in arrays.items()}


class StateByName(Placement):
    """The state is on the mesh, by names."""

    def __init__(self, devices: MeshDevices, params: Arrays):
        """Raises `UserError` if the patterns do not fit the parameters."""
        devices.check(params)
        super().__init__(devices, ByName(devices=devices))
        self._mesh_devices, self._params = devices, params

    def table(self) -> list[str]:
        """Returns a table of the parameters, whole ones and large ones first."""
        mesh = self._mesh_devices.mesh
        rows = []
        for name, array in self._params.items():
            sharding = NamedSharding(mesh, self._mesh_devices.spec_of(name))
            here = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
            rows.append((sharding.is_fully_replicated, here, name, array, sharding.spec))
        rows.sort(key=lambda row: (not row[0], -row[1]))
        here, total = sum(row[1] for row in rows), sum(array.nbytes for array in self._params.values())
        shown = [(name, str(array.shape), _text(spec), f"{size:,}") for _, size, name, array, spec in rows[:_SHOWN]]
        lines = _aligned([("parameter", "shape", "axes", "bytes on a device"), *shown])
        if len(rows) > _SHOWN:
            lines.append(
                f"{len(rows) - _SHOWN} more parameters, {sum(row[1] for row in rows[_SHOWN:]):,} bytes on a device"
            )
        size = " x ".join(f"{mesh.shape[axis]} {axis}" for axis in AXES)
        return [*lines, f"mesh {size}: a device has {here:,} of the {total:,} bytes of the parameters"]


def _axes(entry: Any) -> tuple[str, ...]:
    """Returns the axes of an entry of a `PartitionSpec`, which has one of them as text and none as None."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _text(spec: PartitionSpec) -> str:
    entries = ["+".join(_axes(entry)) for entry in spec]
    return ",".join(entries) if any(entries) else "whole"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    *texts, last = widths
    return [
        "  ".join([*(each.ljust(n) for each, n in zip(row, texts, strict=False)), row[-1].rjust(last)]) for row in rows
    ]
