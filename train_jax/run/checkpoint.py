"""The only file that knows Orbax: saving and restoring everything a run needs to go on bit for bit.

With several processes each writes its part of one checkpoint, which is the same as one process would have written: a
run may go on with other processes, as long as they have as many devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train_jax.core.state import Learner, Trainee
from train_jax.errors import UserError
from train_jax.run.folder import RunFolder


class Checkpoints:
    """The checkpoints of one run, the newest two kept. A checkpoint is there whole or not at all."""

    def __init__(self, folder: RunFolder):
        self.folder = folder.checkpoints
        options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True, enable_async_checkpointing=True)
        handlers = {"state": ocp.StandardCheckpointHandler(), "notes": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder.absolute(), options=options, item_handlers=handlers)

    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Trainee, notes: Mapping[str, Any]) -> None:
        """Takes `state` as `Devices.spanning` gives it; writes in the background."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(_by_name(state)), notes=ocp.args.JsonSave(dict(notes)))
        self._manager.save(step, args=args)

    def restore(self, step: int, like: Trainee) -> tuple[Trainee, dict[str, Any]]:
        """`(state, notes)` as saved; `like` has the structure, shapes and dtypes to expect.

        Raises `UserError` for a checkpoint of another model.
        """
        arrays, notes = self._read(step)
        return self._as(like, arrays, step), notes

    def restore_learner(self, step: int, like: Learner) -> Learner:
        """Only the learner, for which the batch size and the devices of the training do not matter."""
        arrays, _ = self._read(step)
        prefix = "learner."
        return self._as(like, {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}, step)

    def _read(self, step: int) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        try:
            # As NumPy, whole on every process: on which devices it was saved does not matter.
            found = self._manager.item_metadata(step)["state"]
            like = {name: np.empty(array.shape, array.dtype) for name, array in found.items()}
            args = ocp.args.Composite(state=ocp.args.StandardRestore(like), notes=ocp.args.JsonRestore())
            restored = self._manager.restore(step, args=args)
        except (ValueError, KeyError, OSError, AttributeError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"the checkpoint {self.folder / str(step)} cannot be read ({reason}); "
                "remove that folder to go on from the one before it"
            ) from error
        return restored["state"], restored["notes"]

    def _as(self, like: Any, arrays: dict[str, np.ndarray], step: int) -> Any:
        expected = _by_name(like)
        problem = _difference(arrays, expected)
        if problem:
            raise UserError(
                f"the checkpoint {self.folder / str(step)} is of another model ({problem}); "
                "use the configuration it was made with, or another --run-dir"
            )
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])

    def wait(self) -> None:
        """Until everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _by_name(state: Any) -> dict[str, Any]:
    """A flat dict, so that a checkpoint does not depend on the classes its state is made of."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is surplus"
        a, b = found[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype}{list(a.shape)}, expected {b.dtype}{list(b.shape)}"
    return ""
