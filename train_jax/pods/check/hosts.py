"""Checks without devices: the same code, versions, configuration, data and clock in all processes; the run folder and
its disk; the processes that hold the accelerator; wandb."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import re
import secrets
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from train_jax.errors import UserError
from train_jax.pods.check.context import Context
from train_jax.pods.check.rows import Row, absent, row
from train_jax.run.machine import source_hashes, versions_of_packages
from train_jax.run.resume import differences_of_fields
from train_jax.run.tracking import wandb_mode
from train_jax.runtime.coordination import exchange, place
from train_jax.storage.files import write_text
from train_jax.storage.storage import is_remote, path_of
from train_jax.version import DISTRIBUTION, commit, installed_version

CLOCK_WARN_SECONDS = 2.0
CLOCK_FAIL_SECONDS = 5.0
"""Differences between clocks, by which heartbeats are ordered; a time service keeps them within milliseconds."""
_CLOCK_ROUNDS = 5
_FOLDER_SECONDS = 10.0
"""Seconds that a file of another host may take to appear: network file systems cache the absence of a file."""
_PROC = Path("/proc")
_LOCKFILE = Path("/tmp/libtpu_lockfile")
_DEVICE = re.compile(r"/dev/(accel\d+|vfio/\d+|nvidia\d+|kfd)")


# ---- the same in all processes


def _check_same(read: Callable[[], tuple[dict[str, Any], str]], context: Context, remedy: str) -> Row:
    """Compares values by their names between all processes, and names the first process that differs from the majority.

    `read` returns the values of this process and the text of the row about them; its error is raised after all
    processes have reported their values. Collective.
    """
    values: dict[str, Any] | None = None
    text = ""
    problem = None
    try:
        values, text = read()
    except Exception as error:
        problem = error
    everyone = exchange("preflight values", json.dumps(values, sort_keys=True))
    if problem is not None:
        raise problem
    limit = "the same in all processes" if len(everyone) > 1 else ""
    if len(set(everyone)) == 1:
        return row(text, limit=limit)
    usual = Counter(everyone).most_common(1)[0][0]
    odd = next(index for index, each in enumerate(everyone) if each != usual)
    before, other = (json.loads(each) or {} for each in (usual, everyone[odd]))
    names = [name for name, _ in differences_of_fields(before, other)]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    text = f"process {odd} on {context.hosts[odd]} differs from most in {', '.join(names[:3])}{more}"
    return row(text, fail=True, limit=limit, remedy=remedy)


def check_code(context: Context) -> Row:
    """Checks that all processes have the same code. Collective."""

    def read() -> tuple[dict[str, Any], str]:
        hashes = source_hashes(context.config)
        return hashes, f"{len(hashes)} files at commit {commit(installed_version(DISTRIBUTION))}"

    return _check_same(read, context, "copy the same code to every host")


def check_versions(context: Context) -> Row:
    """Checks that all processes have the same versions. Collective."""
    versions = {"python": platform.python_version()} | versions_of_packages()
    text = ", ".join(f"{name} {versions[name]}" for name in ("python", "jax", "torch") if name in versions)
    return _check_same(lambda: (versions, text), context, "install with `pip install -c constraints.txt` on every host")


def check_configuration(context: Context) -> Row:
    """Checks that all processes have the same configuration. Collective."""
    fields = dataclasses.asdict(context.config)
    text = f"{len(jax.tree.leaves(fields))} fields"
    return _check_same(lambda: (fields, text), context, "start every process with the same command line")


def check_data(context: Context) -> Row:
    """Opens the data set, reads a batch, and compares the content. Collective."""

    def read() -> tuple[dict[str, Any], str]:
        task = context.task
        begin = time.perf_counter()
        try:
            task.batch(0, (0, 1))
            seconds = time.perf_counter() - begin
            return {"content": task.fingerprint}, f"{task.description}; read a batch in {seconds:.2f} s"
        except Exception as error:
            raise UserError(f"a batch cannot be read: {error}") from error

    return _check_same(read, context, "copy the same data set to every host, or use gs://")


def check_clock(context: Context) -> Row:
    """Checks the difference of each clock from the median of all clocks. Collective.

    The processes read their clocks when they have all arrived; of several tries the one counts in which they differ
    least, because a process that is late in one is not in all.
    """
    if len(context.hosts) == 1:
        return absent("clock", "one process has nothing to compare")
    readings = []
    for _ in range(_CLOCK_ROUNDS):
        exchange("preflight clock", "")
        readings.append([float(text) for text in exchange("preflight time", repr(time.time()))])
    best = min(readings, key=lambda each: max(each) - min(each))
    middle = statistics.median_low(best)
    skew = max(best) - min(best)
    odd = max(range(len(best)), key=lambda index: abs(best[index] - middle))
    return row(
        f"clocks differ by up to {skew:.2f} s (process {odd} on {context.hosts[odd]})",
        fail=skew > CLOCK_FAIL_SECONDS,
        warn=skew > CLOCK_WARN_SECONDS,
        limit=f"WARN {CLOCK_WARN_SECONDS:g} s, FAIL {CLOCK_FAIL_SECONDS:g} s",
        remedy=f"start the time service on {context.hosts[odd]}: sudo systemctl restart chrony",
    )


# ---- the run folder


def check_folder(context: Context) -> Row:
    """Checks that every process can read what all processes write to the folder of the run. Collective.

    A run folder that does not exist is not created: the tokens are in the nearest existing folder above it.
    """
    token = exchange("preflight folder", secrets.token_hex(8))[0]
    run_dir = context.config.run_dir
    folder = _existing(path_of(run_dir))
    problem = ""
    files = [folder / f".preflight-{token}-{process}" for process in range(len(context.hosts))]
    own = files[place()[0]]
    try:
        write_text(own, token)
    except (OSError, UserError) as error:
        problem = str(error)
    problems = exchange("preflight written", problem)
    try:
        unseen = [
            index for index, file in enumerate(files) if not (problems[index] or problem or _appears(file, token))
        ]
        exchange("preflight read", "")
    finally:
        with contextlib.suppress(OSError, UserError):
            own.unlink(missing_ok=True)
    limit = "written and read by every process"
    remedy = "give a --run-dir that all hosts share and can write, such as gs://bucket/runs/name"
    if problem:
        return row(f"{run_dir} cannot be written: {problem}", fail=True, limit=limit, remedy=remedy)
    if unseen:
        text = f"the file that process {unseen[0]} on {context.hosts[unseen[0]]} wrote is not in {folder} of this host"
        return row(text, fail=True, limit=limit, remedy=remedy)
    several = f" by {len(files)} processes" if len(files) > 1 else ""
    local = context.choice.platform == "tpu" and not is_remote(folder)
    why = "; a disk of a TPU machine is deleted with it" if local else ""
    remedy = "use gs://bucket/runs/name, or a disk that stays"
    return row(f"{run_dir}: written and read{several}{why}", warn=local, limit=limit, remedy=remedy)


def _appears(path: Path, token: str) -> bool:
    """Returns whether a file with this text can be read within `_FOLDER_SECONDS`."""
    deadline = time.monotonic() + _FOLDER_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if not is_remote(path):
                os.listdir(path.parent)  # makes NFS look again
            if path.read_text() == token:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def check_disk(context: Context) -> Row:
    """Checks that there is room for the checkpoints that are kept, and for one that is being written."""
    folder = path_of(context.config.run_dir)
    count = context.config.keep_checkpoints + 1
    if is_remote(folder):
        return row("storage has no limit")
    shapes = jax.eval_shape(context.run.initial_state)
    needed = count * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    free = shutil.disk_usage(_existing(folder)).free
    text = f"{free / 1e9:.1f} GB free; {count} checkpoints take {needed / 1e6:.1f} MB"
    limit = "WARN below twice that, FAIL below that"
    remedy = "free some space, or use another --run-dir; a lower --keep-checkpoints"
    return row(text, fail=free < needed, warn=free < 2 * needed, limit=limit, remedy=remedy)


def _existing(folder: Path) -> Path:
    """Returns the folder, or the nearest existing one above it; in storage every folder exists."""
    if is_remote(folder):
        return folder
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


# ---- the accelerator, wandb


def check_holders(context: Context) -> Row:
    """Checks that no process but those of this run has the accelerator open. Collective."""
    pids = exchange("preflight pids", str(os.getpid()))
    own = {pid for pid, host in zip(pids, context.hosts, strict=True) if host == context.hosts[place()[0]]}
    kind = context.choice.platform
    if kind not in ("tpu", "gpu"):
        return row(f"no accelerator is used: the platform is {kind}")
    holders = {}
    unreadable = 0
    for process in sorted(_PROC.glob("[0-9]*")):
        try:
            devices = _open_devices(process) if process.name not in own else []
        except PermissionError:
            unreadable += 1
            continue
        if devices:  # its name, not its arguments, which may hold secrets
            holders[process.name] = f"{devices[0]} is open in {(process / 'comm').read_text().strip()}"
    limit = "no other process" if kind == "tpu" else "WARN: other processes"
    if holders:
        remedy = f"end what still runs there, after a look at it: kill {' '.join(holders)}"
        text = ", ".join(f"{text} (pid {pid})" for pid, text in holders.items())
        return row(text, fail=kind == "tpu", warn=True, limit=limit, remedy=remedy)
    hidden = f"; {unreadable} processes of other users could not be read" if unreadable else ""
    if kind == "tpu" and _LOCKFILE.exists():
        text = f"no visible process, but {_LOCKFILE} is there{hidden}"
        remedy = f"if JAX says that the TPU is in use: sudo lsof {_LOCKFILE}, and remove it if nobody has it"
        return row(text, warn=True, limit=limit, remedy=remedy)
    return row(f"nobody{hidden}", limit=limit)


def _open_devices(process: Path) -> list[str]:
    """Returns the device files that a process has open. Raises `PermissionError` for a process of another user."""
    targets = set()
    try:
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                targets.add(os.readlink(descriptor))
    except (FileNotFoundError, ProcessLookupError):  # the process has ended
        return []
    return sorted(filter(_DEVICE.fullmatch, targets))


def check_wandb(context: Context) -> Row | None:
    """Checks that there is a key if metrics go online, in the process that sends them. The key is not shown."""
    if place()[0]:
        return None
    mode, key = wandb_mode(context.config)
    if mode == "online":
        text = f"online, with the key of {key}" if key else "online, without a key"
        remedy = "set WANDB_API_KEY, run `wandb login`, or use --wandb offline"
        return row(text, warn=not key, limit="WARN: online without a key", remedy=remedy)
    why = {"offline": ": metrics stay in the run folder", "not installed": ": metrics are in metrics.jsonl"}
    return row(f"{mode}{why.get(mode, '')}")
