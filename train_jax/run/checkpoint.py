"""The only file that uses Orbax: saves and restores everything that a run needs to continue bit for bit.

With several processes, each process writes its part of one checkpoint. The checkpoint does not depend on the number of
processes: a run may continue with another number of processes if the total number of devices is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.folder import RunFolder

_STATE, _CARRY = "state.", "carry."


class Checkpoints:
    """The checkpoints of one run; the latest two are kept. Checkpoints are written atomically."""

    def __init__(self, folder: RunFolder):
        self.folder = folder.checkpoints
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "notes": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder.absolute(), options=options, item_handlers=handlers)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, carry: Any, notes: Mapping[str, Any]) -> None:
        """Saves in the background; state and carry are results of `Devices.to_global`."""
        arrays = _by_name(state, _STATE) | _by_name(carry, _CARRY)
        args = ocp.args.Composite(state=ocp.args.StandardSave(arrays), notes=ocp.args.JsonSave(dict(notes)))
        self._manager.save(step, args=args)

    def restore(self, step: int, state: TrainState, carry: Any) -> tuple[TrainState, Any, dict[str, Any]]:
        """Returns `(state, carry, notes)`; the arguments define the expected structure, shapes and dtypes.

        Raises `UserError` for a checkpoint of another model.
        """
        arrays, notes = self._read(step)
        return self._as(state, arrays, _STATE, step), self._as(carry, arrays, _CARRY, step), notes

    def restore_state(self, step: int, state: TrainState) -> TrainState:
        """Returns only the state, which does not depend on the batch size and the number of devices."""
        return self._as(state, self._read(step)[0], _STATE, step)

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        try:
            # As whole NumPy arrays on every process, so that the devices of the saving run do not matter.
            metadata = self._manager.item_metadata(step)["state"]
            if metadata is None:
                raise ValueError("its arrays are missing")
            like = {name: np.empty(array.shape, array.dtype) for name, array in metadata.items()}
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like), notes=ocp.args.JsonRestore())
            restored = self._manager.restore(step, args=args)
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"the checkpoint {self.folder / str(step)} cannot be read ({reason}); "
                "remove that folder to continue from the previous checkpoint"
            ) from error
        return restored["state"], restored["notes"]

    def _as(self, like: Any, arrays: dict[str, np.ndarray], prefix: str, step: int) -> Any:
        saved = {name: array for name, array in arrays.items() if name.startswith(prefix)}
        expected = _by_name(like, prefix)
        problem = _difference(saved, expected)
        if problem:
            raise UserError(
                f"the checkpoint {self.folder / str(step)} is of another model ({problem}); "
                "use the configuration of that model, or another --run-dir"
            )
        return jax.tree.unflatten(jax.tree.structure(like), [saved[name] for name in expected])

    def wait(self) -> None:
        """Blocks until everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def has_checkpoint(folder: RunFolder) -> bool:
    """Returns whether the run has a complete checkpoint. Creates no folder."""
    return folder.checkpoints.is_dir() and bool(ocp.utils.checkpoint_steps(folder.checkpoints.absolute()))


def _by_name(tree: Any, prefix: str) -> dict[str, Any]:
    """Flattens a tree to a dict, so that a checkpoint does not depend on the classes of its state."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _difference(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unexpected"
        a, b = saved[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
    return ""
