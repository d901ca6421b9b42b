"""Whether the run folder can be written, is on a disk that lasts, and is the same folder for all hosts; its space."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from train_jax.errors import UserError
from train_jax.pod.preflight.row import Row, row
from train_jax.run.config import RunConfig
from train_jax.run.files import write_text
from train_jax.run.storage import is_remote, path_of
from train_jax.runtime.coordination import exchange, place

_PATIENCE_SECONDS = 10.0
"""How long a file of another host may take to appear; network file systems cache what was not there."""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_OF_THE_MACHINE = ("ext4", "ext3", "xfs", "btrfs", "overlay")
_MOUNTS = Path("/proc/mounts")


def check_folder(run_dir: str, platform: str, hosts: Sequence[str]) -> Row:
    """Every process writes a token into the folder, flushes it to the disk, and reads those of all others. Collective.

    What was made is removed again, the folder too if it was not there.
    """
    index, count = place()
    token = exchange("preflight folder", secrets.token_hex(8))[0]
    remedy = "give a --run-dir that all hosts share and can write, such as gs://bucket/runs/name"
    made: list[Path] = []
    problem, name, kind = "", f".preflight-{token}", ""
    try:
        folder = path_of(run_dir)
        made = _make(folder)
        write_text(folder / f"{name}-{index}", token)
        _flush(folder / f"{name}-{index}")
        kind = file_system(folder)
    except (OSError, UserError) as error:
        problem = str(error)
    written = [text == "" for text in exchange("preflight written", problem)]
    try:
        unseen = [] if problem else _unseen(folder, name, token, [each for each in range(count) if written[each]])
        exchange("preflight read", "")
    finally:
        with contextlib.suppress(OSError, UserError):
            (path_of(run_dir) / f"{name}-{index}").unlink(missing_ok=True)
    exchange("preflight removed", "")  # the process that made the folder can only remove it when it is empty
    for each in made:
        with contextlib.suppress(OSError):
            each.rmdir()
    if problem:
        return Row("run folder", "FAIL", f"{run_dir} cannot be written: {problem}", "writable by every process", remedy)
    limit = "written and read by every process"
    if unseen:
        text = f"the file that process {unseen[0]} on {hosts[unseen[0]]} wrote is not in {run_dir} of this host"
        return Row("run folder", "FAIL", text, limit, remedy)
    lasting = kind not in _IN_MEMORY and not (platform == "tpu" and kind in _OF_THE_MACHINE)
    why = "in memory" if kind in _IN_MEMORY else "on the disk of a TPU machine, which is deleted with it"
    text = f"{run_dir} ({kind}): " + (f"written and read by {count} processes" if count > 1 else "written and read")
    remedy = "use gs://bucket/runs/name, or a disk that stays"
    return row("run folder", text if lasting else f"{text}; {why}", warn=not lasting, limit=limit, remedy=remedy)


def _make(folder: Path) -> list[Path]:
    """Makes the folder; returns what was not there, innermost first."""
    if is_remote(folder):
        return []
    missing = [each for each in (folder.absolute(), *folder.absolute().parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _flush(path: Path) -> None:
    if is_remote(path):
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _unseen(folder: Path, name: str, token: str, processes: Sequence[int]) -> list[int]:
    """Processes whose token does not appear here."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    unseen = list(processes)
    while True:
        unseen = [each for each in unseen if not _is_there(folder / f"{name}-{each}", token)]
        if not unseen or time.monotonic() > deadline:
            return unseen
        time.sleep(0.2)


def _is_there(path: Path, token: str) -> bool:
    with contextlib.suppress(OSError):
        os.listdir(path.parent) if not is_remote(path) else None  # makes NFS look again
        return path.read_text() == token
    return False


def file_system(folder: Path) -> str:
    """The kind of file system of a folder, such as ext4, nfs4 or tmpfs."""
    if is_remote(folder):
        return "Google Cloud Storage"
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text().splitlines()]
    except OSError:
        return "unknown file system"
    path = str(_existing(folder))
    fitting = [(point, kind) for point, kind in mounts if f"{path}/".startswith(point.rstrip("/") + "/")]
    return max(fitting, key=lambda pair: len(pair[0]), default=("", "unknown file system"))[1]


def check_disk(config: RunConfig, checkpoint_bytes: int) -> Row:
    """Whether the checkpoints that are kept, and one that is being written, have room."""
    folder, kept = path_of(config.run_dir), config.keep_checkpoints
    if is_remote(folder):
        return Row("disk", "PASS", "storage has no limit")
    free = shutil.disk_usage(_existing(folder)).free
    needed = checkpoint_bytes * (kept + 1)
    text = f"{free / 1e9:.1f} GB free; {kept + 1} checkpoints take {needed / 1e6:.1f} MB"
    limit = "WARN below twice that, FAIL below that"
    remedy = "free some space, or use another --run-dir; a lower --keep-checkpoints"
    return row("disk", text, fail=free < needed, warn=free < 2 * needed, limit=limit, remedy=remedy)


def _existing(folder: Path) -> Path:
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
