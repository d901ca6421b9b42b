"""Shardings of parameters over a mesh of devices, by patterns of their names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey

from bridge.errors import BridgeError


def shardings(tree: Any, mesh: Mesh | AbstractMesh, patterns: Mapping[str, PartitionSpec]) -> Any:
    """Returns a `NamedSharding` for each array of `tree`, for `jax.device_put` and the arguments of `jax.jit`.

    The first pattern, a regular expression, that matches the whole name of an array decides; an array without a match
    is replicated. `tree`: `fn.params`, or anything with dicts under the same names in it, such as the state of an Optax
    optimizer; shapes alone (`jax.eval_shape`) suffice.

    Raises `BridgeError` that names each pattern that decides for no array, each axis that the mesh lacks, and each
    dimension that the devices of its axes do not divide.
    """
    unused = dict.fromkeys(patterns)
    misfits: dict[str, None] = {}

    def sharding_of(path: tuple, leaf: Any) -> NamedSharding:
        name = next((str(key.key) for key in reversed(path) if isinstance(key, DictKey)), "")
        pattern = next((p for p in patterns if name and re.fullmatch(p, name)), None)
        if pattern is None:
            return NamedSharding(mesh, PartitionSpec())
        unused.pop(pattern, None)
        found = dict.fromkeys(_misfits(name, tuple(leaf.shape), mesh, patterns[pattern]))
        misfits.update(found)
        return NamedSharding(mesh, PartitionSpec() if found else patterns[pattern])

    found = jax.tree_util.tree_map_with_path(sharding_of, tree)
    why = "it matches no whole name, or earlier patterns match the same ones; remove it, or move it up"
    misfits |= {f"the pattern {pattern!r} decides for no array: {why}": None for pattern in unused}
    if misfits:
        raise BridgeError("\n".join(misfits))
    return found


def _misfits(name: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Iterator[str]:
    """Yields the reasons why an array cannot have a sharding."""
    if len(spec) > len(shape):
        yield f"{name} has {len(shape)} dimensions, and {spec} is for {len(spec)}; use a pattern of its own"
        return
    for dimension, axes in enumerate(spec):
        names = (axes,) if isinstance(axes, str) else tuple(axes or ())
        unknown = [axis for axis in names if axis not in mesh.shape]
        if unknown:
            yield f"{name} is sharded over {unknown[0]!r}; the mesh has {', '.join(mesh.shape)}"
            continue
        devices = math.prod(mesh.shape[axis] for axis in names)
        if shape[dimension] % devices:
            yield (
                f"dimension {dimension} of {name} {shape} does not divide over {devices} devices of "
                f"{' and '.join(names)}; shard another one, or give the name PartitionSpec() before this pattern"
            )
