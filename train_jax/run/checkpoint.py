"""The only file that uses Orbax: saves and restores everything that a run needs to continue bit for bit.

A checkpoint has four items, so that each reader loads what it needs: `model`, the weights to evaluate and the buffers;
`optimizer`, the rest of the state; `carry`, what the task carries from step to step, by rows of the global batch, so
that another number of devices or processes can continue with it; and `notes`, a JSON object with the checksum of every
array. An array that does not have its checksum is never used.

With several processes each one writes its part of one checkpoint, which is the same as one process would write.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import platform
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from train_jax.core.state import Arrays, TrainState
from train_jax.errors import StorageError, UserError
from train_jax.run.folder import COMPLETE, RunFolder, complete_steps
from train_jax.runtime.coordination import keep_orbax_off_devices
from train_jax.runtime.processes import (
    all_or_none,
    any_process,
    is_main_process,
    of_main_process,
    sum_over_processes,
    wait_for_all,
)
from train_jax.storage.cache import upload_working_files
from train_jax.storage.files import check_readable, make_folder, move_folder, remove_until_gone, sync, sync_tree
from train_jax.storage.lease import check_writer
from train_jax.storage.requests import is_outage, reason, silence_abandoned_writes, silence_raised_errors
from train_jax.storage.storage import absolute, is_remote

SEEN_SECONDS = 90.0
"""Seconds that a host may take to show a folder of another host: with the defaults of NFS, up to a minute."""


def agreed_steps(folder: Path, find: Callable[[], list[int]]) -> list[int]:
    """Returns the steps that the first process finds, newest last, on every process. Collective.

    `find` lists those that this host shows. Waits until they are all there; raises `StorageError` if they are not.
    """
    steps = of_main_process(lambda: {"steps": find()})["steps"]
    deadline = time.monotonic() + SEEN_SECONDS
    with all_or_none():
        while missing := set(steps).difference(find()):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{folder} has no checkpoint of step {max(missing)} on {platform.node()}, but has one on the host "
                    "of process 0; start again when all hosts show the same folder"
                )
            time.sleep(min(1.0, SEEN_SECONDS / 10))
    return steps


_MODULUS = 2**32
_THREADS = 4


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Returns a 32-bit checksum of each array, the same on every process.

    It is the sum of the CRC-32 of each row (entry of the first axis) times an odd number for its position, so that the
    processes that hold different rows of an array add theirs, and a change in one row always changes it. NumPy arrays
    and arrays that a process has whole are taken as they are. Collective if any array spans several processes.
    """
    with ThreadPoolExecutor(_THREADS) as pool:  # the loop waits for this, and zlib releases the interpreter's lock
        sums = dict(zip(arrays, pool.map(_of_array, arrays.values()), strict=True))
    spread = [name for name, array in arrays.items() if _is_spread(array)]
    if spread:
        totals = sum_over_processes("checksums", [sums[name] for name in spread])
        sums |= {name: total % _MODULUS for name, total in zip(spread, totals, strict=True)}
    return sums


def _is_spread(array: Any) -> bool:
    return isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)


def _of_array(array: Any) -> int:
    if _is_spread(array):
        return sum(_of_rows(np.asarray(s.data), s.index[0].start or 0) for s in _distinct(array)) % _MODULUS
    return _of_rows(np.asarray(array), 0)


def _of_rows(array: np.ndarray, first_row: int) -> int:
    if not array.size:
        return 0
    rows = np.ascontiguousarray(array).reshape(len(array) if array.ndim else 1, -1)
    parts = (zlib.crc32(row.data) for row in rows.view(np.uint8))
    return sum((2 * (first_row + i) + 1) * part for i, part in enumerate(parts)) % _MODULUS


def _distinct(array: jax.Array) -> list[Any]:
    """Returns the shards of this process, without those that repeat another one."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]


STATE = "state."
CARRY = "carry."


class DamagedCheckpointError(UserError):
    """A checkpoint that cannot be read, or whose content is not what was saved."""


class StrayCheckpointError(DamagedCheckpointError):
    """A checkpoint of another run, or under the name of another step."""


def unreadable(path: Path, error: Exception) -> UserError:
    """Returns the error for a checkpoint that cannot be read; it is not damaged if a disk or a service fails."""
    if is_outage(error):
        return StorageError(f"the checkpoint {path} cannot be read ({reason(error)}); run the command again")
    return damaged(path, error)


def damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"the checkpoint {path} is damaged ({reason(error)})")


@dataclasses.dataclass(frozen=True)
class Retention:
    """The checkpoints to keep; the others are deleted when a new one is complete."""

    newest: int = 2
    every_steps: int = 0
    """Steps between checkpoints that are kept for good; 0 keeps none."""


@dataclasses.dataclass(frozen=True)
class Best:
    """The checkpoint with the highest value of the figure that the run keeps the best by."""

    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The state that a run continues from."""

    step: int
    state: TrainState
    carry: dict[str, Any]
    """The arrays of the carry by name, in rows of the global batch."""
    notes: dict[str, Any]
    damaged: tuple[str, ...]
    """Reasons why newer checkpoints are not used."""
    path: Path

    def carry_like(self, rows: Any) -> Any:
        """Returns the carry in the structure of `rows`. Raises `UserError` if it has other arrays."""
        expected = by_name(rows, CARRY)
        check_same(self.carry, expected, self.path)
        return like_tree(rows, expected | self.carry, CARRY)


def items_of(state: TrainState, carry: Any) -> dict[str, dict[str, Any]]:
    """Returns the arrays of each item by name."""
    fields = state._asdict()
    model = {name: fields.pop(name) for name in ("ema" if state.ema else "params", "buffers")}
    return {"model": by_name(model, STATE), "optimizer": by_name(fields, STATE), "carry": by_name(carry, CARRY)}


def by_name(tree: Any, prefix: str) -> dict[str, Any]:
    """Flattens a tree to a dict, so that a checkpoint does not depend on the classes of its state."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {prefix + jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def stored(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays without the empty ones, which Orbax does not save."""
    return {name: array for name, array in arrays.items() if np.size(array)}


def like_tree(tree: Any, arrays: Mapping[str, Any], prefix: str) -> Any:
    """Returns the arrays in the structure of the tree."""
    return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in by_name(tree, prefix)])


def placeholder(array: Any, sharding: Any) -> Any:
    """Returns the target of Orbax's restore: a NumPy array, whole on every process, or an array over all processes."""
    if sharding is None:
        return np.empty(array.shape, array.dtype)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def difference(saved: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Returns the first array that is missing, unexpected or of another shape or dtype; empty if there is none."""
    for name in sorted(saved.keys() | expected.keys()):
        if name not in saved:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unexpected"
        a = saved[name]
        b = expected[name]
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
    """Returns the checksum of the notes of a checkpoint."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


_ARRAYS = ("model", "optimizer", "carry")
_CHECKSUM = "checksum"
FORMAT = 1
"""Number of the format of a checkpoint, in its notes with its step and the id of its run."""
_warned: set[str] = set()


def check_identity(path: Path, step: int, run_id: str, notes: Mapping[str, Any]) -> None:
    """Raises `StrayCheckpointError` unless the notes are those of this step of this run.

    A checkpoint of an earlier version does not say what it is, which is a warning. An empty `run_id` accepts all runs.
    Raises `UserError` for a format of a newer version.
    """
    if "format" not in notes:
        if is_main_process() and not _warned:
            sys.stderr.write(f"trm: {path} was saved by an earlier version, without its step and the id of its run\n")
            _warned.add(str(path))
        return
    if notes["format"] > FORMAT:
        raise UserError(
            f"the checkpoint {path} has format {notes['format']}, and this version reads up to {FORMAT}; use a newer "
            "version of trm"
        )
    if notes["step"] != step:
        raise StrayCheckpointError(
            f"the checkpoint {path} was saved at step {notes['step']} (rename it to {notes['step']} to use it)"
        )
    if run_id and notes["run"] and notes["run"] != run_id:
        raise StrayCheckpointError(
            f"the checkpoint {path} is of another run ({notes['run']}, and config.json says {run_id}; --init-from "
            "takes weights of another run; if it belongs here, write its id there)"
        )


class _SyncedPath(ocp.path.atomicity.AtomicRenameTemporaryPath):
    """A folder on a disk that gets its name when its content survives a loss of power.

    TensorStore syncs the arrays that it writes; Orbax does not sync its own files, folders and names. What it writes
    after this, a mark and the time of the commit, no reader needs.
    """

    async def finalize(self) -> None:
        await asyncio.to_thread(sync_tree, Path(self.get()))
        await super().finalize()
        await asyncio.to_thread(sync, Path(self.get_final()).parent)


class Checkpoints:
    """The checkpoints of one run. A checkpoint is written completely or not at all.

    `writes`: false for a reader, which changes nothing in the folder.

    A save that fails is reported on stderr, and the next one is not made in the background; if that fails too, it
    raises `StorageError`. Earlier checkpoints stay intact.
    """

    def __init__(self, folder: RunFolder, retention: Retention | None = None, *, writes: bool = True):
        self.folder = folder.checkpoints
        self._run = folder.path
        self._run_id = folder.run_id
        self._retention = retention or Retention()
        self.best = None
        self._saving: int | None = None
        """The step that is being saved."""
        self._started_wrong: Exception | None = None
        self._writes, self._manager = writes, self._open(writes)

    def _open(self, writes: bool) -> ocp.CheckpointManager:
        silence_raised_errors()
        options = ocp.CheckpointManagerOptions(
            create=writes, save_root_metadata=writes, cleanup_tmp_directories=writes,
            enable_async_checkpointing=True, preservation_policy=self if writes else None,
            temporary_path_class=None if is_remote(self.folder) else _SyncedPath,
        )  # fmt: skip
        keep_orbax_off_devices()
        if writes:
            silence_abandoned_writes()
            # `save` gets copies; Orbax would copy them once more while the loop waits
            unguarded = ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)
            ocp.type_handlers.register_type_handler(np.ndarray, unguarded, override=True)
        handlers: dict[str, Any] = {name: ocp.StandardCheckpointHandler() for name in _ARRAYS}
        handlers["notes"] = ocp.JsonCheckpointHandler()
        if writes and not is_remote(self.folder):
            make_folder(self.folder)
        return ocp.CheckpointManager(absolute(self.folder), options=options, item_handlers=handlers)

    # ---- writing

    def save(
        self, step: int, state: TrainState, carry: Any, notes: Mapping[str, Any], value: float | None = None
    ) -> None:
        """Starts to save; the arrays are written in the background. Collective.

        `state`, `carry`: as `Devices.to_global` and `Devices.to_rows` return them; NumPy arrays must not change while
        they are written. `value` is the figure that decides which checkpoint is the best one, higher is better; None
        if it was not evaluated at this step.
        """
        failed = self._finish()  # waits for the previous save, after which nothing else is written in this folder
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
        notes = dict(notes) | {"format": FORMAT, "step": step, "run": self._run_id}
        notes["checksums"] = {name: checksums(arrays) for name, arrays in items.items()}
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
        """Returns which of the checkpoints, oldest first, Orbax keeps; called by Orbax."""
        retention = self._retention
        newest = [info.step for info in checkpoints][-retention.newest :]
        kept = {*newest, self.best.step if self.best is not None else -1}
        every = retention.every_steps
        return [info.step in kept or bool(every and info.step % every == 0) for info in checkpoints]

    def _finish(self) -> str:
        """Waits for the save in the background; returns the reason if it failed. Collective."""
        step = self._saving
        problem = self._started_wrong
        self._saving = None
        self._started_wrong = None
        if step is None:
            return ""
        try:
            if problem is None:
                self._manager.wait_until_finished()
        except Exception as error:  # handled like an error at its start
            problem = error
        if not any_process(problem is not None):
            return ""
        if is_main_process():
            check_writer(self._run)  # the folder may be gone, or that of another run, which nothing may be removed from
        with contextlib.suppress(Exception):  # it raises the same error again
            self._manager.close()
        complete = step in complete_steps(self.folder)
        if is_main_process() and not complete:
            remove_until_gone([self.folder / f"{step}{ocp.utils.TMP_DIR_SUFFIX}", self.folder / str(step)])
        wait_for_all("an incomplete checkpoint removed")
        self._manager = self._open(self._writes)
        if complete:
            return ""  # only an older checkpoint could not be deleted
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
        """Returns the steps of the complete checkpoints, newest last."""
        steps = complete_steps(self.folder)
        if steps != sorted(self._manager.all_steps()):
            self._manager.reload()
        return steps

    def restore_newest(self, state: TrainState, sharding: Any = None) -> Resumed | None:
        """Returns the newest checkpoint that is not damaged, None if there is no checkpoint. Collective.

        `state` gives structure, shapes and dtypes to expect; `sharding` is that of the carry's arrays if there are
        several processes. The folders of newer, damaged checkpoints are put aside. Raises `UserError` for a checkpoint
        of another model, and if every checkpoint is damaged.
        """
        reasons = []
        steps = agreed_steps(self.folder, self.steps)
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
            raise DamagedCheckpointError(f"{reasons[0]}, and no older one is intact; start another --run-dir")
        return None

    def _tried(self, step: int, state: TrainState, sharding: Any, reasons: list[str]) -> tuple[Resumed | None, str]:
        """Returns the checkpoint or, on every process, None with the reason why this one cannot read it. Collective."""
        resumed = None
        why = f"another process cannot read the checkpoint {self.folder / str(step)}"
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

    def restore_step(self, step: int, state: TrainState) -> Resumed:
        """Returns the state at a step, on one host. Raises `UserError` if the checkpoint is damaged or does not fit."""
        return self._restore(step, state, None, ())

    def restore_state(self, step: int, state: TrainState) -> TrainState:
        """Returns the state without the carry."""
        items = items_of(state, ())
        del items["carry"]
        arrays, _ = self._read(step, items)
        return like_tree(state, {name: value for item in arrays.values() for name, value in item.items()}, STATE)

    def restore_model(self, step: int, params: Arrays, buffers: Arrays, *, averaged: bool) -> tuple[Arrays, Arrays]:
        """Returns only the weights to evaluate and the buffers; `averaged` is true if the run keeps an EMA.

        Raises `UserError` for a checkpoint of another model, `DamagedCheckpointError` for one that cannot be read.
        """
        like = {"ema" if averaged else "params": params, "buffers": buffers}
        arrays, _ = self._read(step, {"model": by_name(like, STATE)})
        restored = like_tree(like, arrays["model"], STATE)
        return restored["ema" if averaged else "params"], restored["buffers"]

    def _read(
        self, step: int, expected: Mapping[str, dict[str, Any]], sharding: Any = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Returns the expected arrays of the expected items, and the notes."""
        try:
            notes = self.notes(step)
            like = {}
            metadata = self._manager.item_metadata(step)
            for item in expected:
                place = sharding if item == "carry" else None
                names = notes["checksums"].get(item, {})
                like[item] = {name: placeholder(metadata[item][name], place) for name in names}
        except UserError:
            raise
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
        """Returns the notes of a checkpoint. Raises whatever Orbax and JSON raise for damaged files.

        Raises the errors of `check_identity`.
        """
        notes = self._manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))["notes"]
        if notes.pop(_CHECKSUM, None) != checksum_of_json(notes):
            raise ValueError("its notes are not what was saved")
        check_identity(self.folder / str(step), step, self._run_id, notes)
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
