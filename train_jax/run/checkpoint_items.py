"""What a checkpoint contains: its items as arrays by name, and the values that describe checkpoints."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train_jax.core.state import TrainState
from train_jax.errors import StorageError, UserError
from train_jax.run.requests import is_outage, reason

STATE, CARRY = "state.", "carry."


class DamagedCheckpointError(UserError):
    """A checkpoint that cannot be read, or whose content is not what was saved."""


def unreadable(path: Path, error: Exception) -> UserError:
    """A checkpoint is not damaged because a disk or a service fails to read it."""
    if is_outage(error):
        return StorageError(f"the checkpoint {path} cannot be read ({reason(error)}); run the command again")
    return damaged(path, error)


def damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"the checkpoint {path} is damaged ({reason(error)})")


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept; the others are deleted when a new one is complete."""

    newest: int = 2
    every_steps: int = 0
    """Those at multiples of this; 0 for none."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The checkpoint with the highest value of the figure that the run keeps the best by."""

    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a run continues from."""

    step: int
    state: TrainState
    carry: dict[str, Any]
    """Its arrays by name, by rows of the global batch."""
    notes: dict[str, Any]
    damaged: tuple[str, ...]
    """Why newer checkpoints are not used."""
    path: Path

    def carry_like(self, rows: Any) -> Any:
        """The carry in the structure of `rows`. Raises `UserError` if it has other arrays."""
        expected = by_name(rows, CARRY)
        check_same(self.carry, expected, self.path)
        return like_tree(rows, expected | self.carry, CARRY)


def items_of(state: TrainState, carry: Any) -> dict[str, dict[str, Any]]:
    """The arrays of each item by name."""
    fields = state._asdict()
    model = {name: fields.pop(name) for name in ("ema" if state.ema else "params", "buffers")}
    return {"model": by_name(model, STATE), "optimizer": by_name(fields, STATE), "carry": by_name(carry, CARRY)}


def by_name(tree: Any, prefix: str) -> dict[str, Any]:
    """Flattens a tree to a dict, so that a checkpoint does not depend on the classes of its state."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def stored(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Without the empty arrays, which Orbax does not save."""
    return {name: array for name, array in arrays.items() if np.size(array)}


def like_tree(tree: Any, arrays: Mapping[str, Any], prefix: str) -> Any:
    """The arrays in the structure of the tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in by_name(tree, prefix)])


def placeholder(array: Any, sharding: Any) -> Any:
    """What Orbax restores into: NumPy, whole on every process, or an array over all processes."""
    if sharding is None:
        return np.empty(array.shape, array.dtype)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def difference(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """The first array that is missing, unexpected or of another shape or dtype; empty if there is none."""
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unexpected"
        a, b = saved[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
    return ""


def check_same(saved: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Raises `UserError` if the arrays of a checkpoint are not those of the model."""
    problem = difference(saved, stored(expected))
    if problem:
        raise UserError(
            f"the checkpoint {path} is of another model ({problem}); use the configuration it was made with, or "
            "another --run-dir"
        )


def checksum_of_json(value: Mapping[str, Any]) -> int:
    """Of the notes of a checkpoint."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
