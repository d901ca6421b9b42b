"""The only file that uses Orbax: saves and restores everything that a run needs to continue bit for bit.

A checkpoint has four items, so that each reader loads what it needs: `model`, the weights to evaluate and the buffers;
`optimizer`, the rest of the state; `carry`, what the task carries from step to step, by rows of the global batch, so
that another number of devices or processes can continue with it; and `notes`, a JSON object with the checksum of every
array. An array that does not have its checksum is never used.

With several processes each one writes its part of one checkpoint, which is the same as one process would write.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from train_jax.core.state import Arrays, TrainState
from train_jax.errors import StorageError
from train_jax.run.agreed_steps import agreed_steps
from train_jax.run.cache import upload_working_files
from train_jax.run.checkpoint_items import (
    STATE,
    Best,
    DamagedCheckpointError,
    Resumed,
    Retention,
    by_name,
    check_same,
    checksum_of_json,
    damaged,
    items_of,
    like_tree,
    placeholder,
    stored,
    unreadable,
)
from train_jax.run.checksums import checksums
from train_jax.run.files import check_readable, move_folder, remove_until_gone
from train_jax.run.folder import COMPLETE, RunFolder, complete_steps
from train_jax.run.lease import check_writer
from train_jax.run.requests import reason, silence_abandoned_writes, silence_raised_errors
from train_jax.run.storage import absolute
from train_jax.runtime.coordination import keep_orbax_off_devices
from train_jax.runtime.processes import any_process, is_main_process, wait_for_all

_ARRAYS = ("model", "optimizer", "carry")
_CHECKSUM = "checksum"


class Checkpoints:
    """The checkpoints of one run. A checkpoint is written completely or not at all.

    `writes`: false for a reader, which changes nothing in the folder.

    A save that fails is told on stderr, and the next one is not made in the background; if that fails too, it raises
    `StorageError`. The checkpoints before are intact.
    """

    def __init__(self, folder: RunFolder, retention: Retention | None = None, *, writes: bool = True):
        self.folder = folder.checkpoints
        self._run, self._retention, self.best = folder.path, retention or Retention(), None
        self._saving: int | None = None
        """The step that is being saved."""
        self._started_wrong: Exception | None = None
        self._writes, self._manager = writes, self._open(writes)

    def _open(self, writes: bool) -> ocp.CheckpointManager:
        silence_raised_errors()
        options = ocp.CheckpointManagerOptions(
            create=writes, save_root_metadata=writes, cleanup_tmp_directories=writes,
            enable_async_checkpointing=True, preservation_policy=self if writes else None,
        )  # fmt: skip
        keep_orbax_off_devices()
        if writes:  # `save` gets copies; Orbax would copy them once more while the loop waits
            unguarded = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
            ocp.type_handlers.register_type_handler(np.ndarray, unguarded, override=True)
        handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in _ARRAYS}
        handlers["notes"] = ocp.JsonCheckpointHandler()
        return ocp.CheckpointManager(absolute(self.folder), options=options, item_handlers=handlers)

    # ---- writing

    def save(
        self, step: int, state: TrainState, carry: Any, notes: Mapping[str, Any], value: float | None = None
    ) -> None:
        """Starts to save; the arrays are written in the background. Collective.

        `state`, `carry`: as `Devices.to_global` and `Devices.to_rows` return them; NumPy arrays must not change while
        they are written. `value`: of the figure that decides which checkpoint is the best one, higher is better; None
        if it was not evaluated at this step.
        """
        failed = self._finish()  # the one before; then nothing else is written in this folder
        if failed:
            sys.stderr.write(f"trm: {failed}; saving step {step} instead\n")
        if step in self._manager.all_steps():
            return
        if is_main_process():
            check_writer(self._run)
        upload_working_files(self._run)
        if value is not None and (self.best is None or value > self.best.value):
            self.best = Best(step, value)
        items = {name: stored(arrays) for name, arrays in items_of(state, carry).items()}
        notes = dict(notes) | {"checksums": {name: checksums(arrays) for name, arrays in items.items()}}
        if self.best is not None:
            notes["best"] = dataclasses.asdict(self.best)
        notes[_CHECKSUM] = checksum_of_json(notes)
        args = {name: ocp.args.StandardSave(arrays) for name, arrays in items.items() if arrays}
        self._saving = step
        try:
            self._manager.save(step, args=ocp.args.Composite(notes=ocp.args.JsonSave(notes), **args))
        except Exception as error:  # whatever Orbax and TensorStore raise for a disk or a service
            self._started_wrong = error
        if failed:
            self.wait()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax asks which of its checkpoints, oldest first, to keep."""
        retention = self._retention
        newest = [info.step for info in checkpoints][-retention.newest :]
        kept = {*newest, self.best.step if self.best is not None else -1}
        every = retention.every_steps
        return [info.step in kept or bool(every and info.step % every == 0) for info in checkpoints]

    def _finish(self) -> str:
        """Waits for the save in the background; returns why it failed. Collective."""
        step, problem, self._saving, self._started_wrong = self._saving, self._started_wrong, None, None
        if step is None:
            return ""
        try:
            if problem is None:
                self._manager.wait_until_finished()
        except Exception as error:  # as above
            problem = error
        if not any_process(problem is not None):
            return ""
        silence_abandoned_writes()
        with contextlib.suppress(Exception):  # it raises the same again
            self._manager.close()
        complete = step in complete_steps(self.folder)
        if is_main_process() and not complete:
            remove_until_gone([self.folder / f"{step}{ocp.utils.TMP_DIR_SUFFIX}", self.folder / str(step)])
        wait_for_all("an incomplete checkpoint removed")
        self._manager = self._open(self._writes)
        if complete:
            return ""  # only an older one could not be deleted
        return f"the checkpoint {self.folder / str(step)} could not be saved ({reason(problem)})"

    def wait(self) -> None:
        """Blocks until everything saved so far is on disk. Raises `StorageError` if the last save failed."""
        failed = self._finish()
        if failed:
            newest = max(self.steps(), default=0)
            good = f"step {newest} is intact, and the same command continues from it" if newest else "none is there yet"
            raise StorageError(f"{failed}; {good}, once the disk or the storage is in order")

    def close(self) -> None:
        failing = sys.exc_info()[0] is not None  # the other processes may be elsewhere, and the first error counts
        if not failing:
            self.wait()
        with contextlib.suppress(Exception) if failing else contextlib.nullcontext():
            self._manager.close()

    # ---- reading

    def steps(self) -> list[int]:
        """Of the complete checkpoints, newest last."""
        steps = complete_steps(self.folder)
        if steps != sorted(self._manager.all_steps()):
            self._manager.reload()
        return steps

    def restore_newest(self, state: TrainState, sharding: Any = None) -> Resumed | None:
        """The newest checkpoint that is not damaged, None if there is no checkpoint. Collective.

        `state` gives structure, shapes and dtypes to expect; `sharding`: of the carry's arrays if there are several
        processes. The folders of newer, damaged checkpoints are put aside. Raises `UserError` for a checkpoint
        of another model, and if every checkpoint is damaged.
        """
        reasons, steps = [], agreed_steps(self.folder, self.steps)
        for step in reversed(steps):
            resumed, why = self._tried(step, state, sharding, reasons)
            if resumed is None:  # Orbax does not tell a file that it cannot read from one that is not there
                check_readable(self.folder / str(step))
                resumed, why = self._tried(step, state, sharding, reasons)
            if resumed is None:
                reasons.append(why)
                continue
            self._put_aside([newer for newer in steps if newer > step])
            return resumed
        if reasons:
            raise DamagedCheckpointError(f"{reasons[0]}, and so are the older ones; start another --run-dir")
        return None

    def _tried(self, step: int, state: TrainState, sharding: Any, reasons: list[str]) -> tuple[Resumed | None, str]:
        """The checkpoint, or None on every process and why this one cannot read it. Collective."""
        resumed, why = None, f"another process cannot read the checkpoint {self.folder / str(step)}"
        try:
            resumed = self._restore(step, state, sharding, tuple(reasons))
        except DamagedCheckpointError as error:
            why = str(error)
        return (None, why) if any_process(resumed is None) else (resumed, "")

    def _restore(self, step: int, state: TrainState, sharding: Any, damaged: tuple[str, ...]) -> Resumed:
        arrays, notes = self._read(step, items_of(state, ()), sharding)
        carry = arrays.pop("carry")
        values = {name: value for item in arrays.values() for name, value in item.items()}
        if "best" in notes:
            self.best = Best(**notes["best"])
        return Resumed(step, like_tree(state, values, STATE), carry, notes, damaged, self.folder / str(step))

    def restore_state(self, step: int, state: TrainState) -> TrainState:
        """The state without the carry."""
        items = items_of(state, ())
        del items["carry"]
        arrays, _ = self._read(step, items)
        return like_tree(state, {name: value for item in arrays.values() for name, value in item.items()}, STATE)

    def restore_model(self, step: int, params: Arrays, buffers: Arrays, *, averaged: bool) -> tuple[Arrays, Arrays]:
        """The weights to evaluate and the buffers, and nothing else; `averaged`: whether the run keeps an EMA.

        Raises `UserError` for a checkpoint of another model, `DamagedCheckpointError` for one that cannot be read.
        """
        like = {"ema" if averaged else "params": params, "buffers": buffers}
        arrays, _ = self._read(step, {"model": by_name(like, STATE)})
        restored = like_tree(like, arrays["model"], STATE)
        return restored["ema" if averaged else "params"], restored["buffers"]

    def _read(
        self, step: int, expected: Mapping[str, dict[str, Any]], sharding: Any = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """The expected arrays of the expected items, and the notes."""
        try:
            notes, like = self.notes(step), {}
            metadata = self._manager.item_metadata(step)
            for item in expected:
                place = sharding if item == "carry" else None
                names = notes["checksums"].get(item, {})
                like[item] = {name: placeholder(metadata[item][name], place) for name in names}
        except Exception as error:  # whatever Orbax and JSON raise for files that are not theirs
            raise unreadable(self.folder / str(step), error) from error
        for item, arrays in expected.items():
            if item != "carry":  # `Resumed.carry_like` checks it
                check_same(like[item], arrays, self.folder / str(step))
        arrays = self._arrays(step, like, notes)
        return {item: dict(expected[item]) | values for item, values in arrays.items()}, notes

    def _arrays(self, step: int, like: dict[str, dict[str, Any]], notes: dict[str, Any]) -> dict[str, dict[str, Any]]:
        try:
            args = {item: ocp.args.StandardRestore(arrays) for item, arrays in like.items() if arrays}
            restored = self._manager.restore(step, args=ocp.args.Composite(**args)) if args else {}
            arrays = {item: dict(restored[item]) if like[item] else {} for item in like}
        except Exception as error:
            raise unreadable(self.folder / str(step), error) from error
        for item, values in arrays.items():
            saved = notes["checksums"].get(item, {})
            for name, value in checksums(values).items():
                if saved[name] != value:
                    raise damaged(self.folder / str(step), ValueError(f"{name} is not what was saved"))
        return arrays

    def notes(self, step: int) -> dict[str, Any]:
        """The notes of a checkpoint. Raises whatever Orbax and JSON raise for damaged files."""
        notes = self._manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))["notes"]
        if notes.pop(_CHECKSUM, None) != checksum_of_json(notes):
            raise ValueError("its notes are not what was saved")
        return notes

    def _put_aside(self, steps: Sequence[int]) -> None:
        """Renames the folders of damaged checkpoints, so that the run can save at these steps again."""
        if not steps:
            return
        if is_main_process():
            for step in steps:
                move_folder(self.folder / str(step), self.folder.with_name("damaged") / str(step), marker=COMPLETE)
        wait_for_all("damaged checkpoints put aside")
        self._manager.reload()
