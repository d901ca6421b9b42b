"""Which processes of this host hold the accelerator or have JAX loaded, read from /proc."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

from train_jax.pod.preflight.row import Row, row

PROC = Path("/proc")
LOCKFILE = Path("/tmp/libtpu_lockfile")
_DEVICE = re.compile(r"/dev/(accel\d+|vfio/\d+|nvidia\d+|kfd)")
_LIBRARIES = ("libtpu.so", "/jaxlib/")
"""In the memory map of a process that uses JAX or the TPU."""
_SHOWN = 4
_PATIENCE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Holder:
    pid: int
    command: str
    devices: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.command} (pid {self.pid})"


def check_holders(platform: str, own: Collection[int], proc: Path = PROC, lockfile: Path = LOCKFILE) -> Row:
    """Whether another process has the accelerator open; `own`: the processes of this run on this host."""
    if platform not in ("tpu", "gpu"):
        return Row("device held by", "PASS", f"no accelerator is used: the platform is {platform}")
    holders, unreadable = [], 0
    for pid in _processes(proc):
        if pid in own:
            continue
        try:
            devices = _open_devices(proc / str(pid))
        except OSError:
            unreadable += 1
            continue
        if devices:
            holders.append(Holder(pid, _command(proc / str(pid)), devices))
    hidden = f"; {unreadable} processes of other users could not be read" if unreadable else ""
    limit = "no other process" if platform == "tpu" else "WARN: other processes"
    if holders:
        shown = f"{holders[0].devices[0]} is open in {_listed(holders)}"
        remedy = f"end what still runs there, after a look at it: kill {' '.join(str(each.pid) for each in holders)}"
        return row("device held by", shown, fail=platform == "tpu", warn=True, limit=limit, remedy=remedy)
    if platform == "tpu" and lockfile.exists():
        text = f"nobody that can be seen, but {lockfile} is there{hidden}"
        remedy = f"if JAX says that the TPU is in use: sudo lsof {lockfile}, and remove it if nobody has it"
        return row("device held by", text, warn=True, limit=limit, remedy=remedy)
    return row("device held by", f"nobody{hidden}", limit=limit)


def check_other_processes(own: Collection[int], proc: Path = PROC) -> Row:
    """Other Python processes with JAX or libtpu loaded: they take cores and memory, or are left from a run before.

    The memory map of a process cannot be read while that process changes it, which on a busy machine can take minutes;
    so a thread reads them, for a few seconds.
    """
    others: list[Holder] = []
    reader = threading.Thread(target=_find_others, args=(own, proc, others), daemon=True)
    reader.start()
    reader.join(_PATIENCE_SECONDS)
    listed = list(others)
    rest = ", and not all could be asked" if reader.is_alive() else ""
    return row(
        "other processes",
        f"{len(listed)} with JAX or libtpu on this host" + (f": {_listed(listed)}" if listed else "") + rest,
        warn=bool(listed),
        limit="WARN: any",
        remedy="are they left from an earlier run? then end them",
    )


def _find_others(own: Collection[int], proc: Path, others: list[Holder]) -> None:
    for pid in _processes(proc):
        try:
            if pid in own or "python" not in os.readlink(proc / str(pid) / "exe").rpartition("/")[2]:
                continue
            text = (proc / str(pid) / "maps").read_text()
            if any(name in text for name in _LIBRARIES):
                others.append(Holder(pid, _command(proc / str(pid)), ()))
        except (OSError, ValueError):
            continue


def _processes(proc: Path) -> Iterator[int]:
    try:
        names = sorted(name for name in os.listdir(proc) if name.isdecimal())
    except OSError:  # not Linux
        return
    yield from map(int, names)


def _open_devices(process: Path) -> tuple[str, ...]:
    """Device files that a process has open. Raises `OSError` for a process of another user."""
    targets = set()
    for descriptor in os.listdir(process / "fd"):
        try:
            targets.add(os.readlink(process / "fd" / descriptor))
        except OSError:  # closed meanwhile
            continue
    return tuple(sorted(target for target in targets if _DEVICE.fullmatch(target)))


def _command(process: Path) -> str:
    """The name of a process; not its arguments, which may hold secrets."""
    try:
        return (process / "comm").read_text().strip() or "?"
    except OSError:
        return "?"


def _listed(holders: list[Holder]) -> str:
    more = f" and {len(holders) - _SHOWN} more" if len(holders) > _SHOWN else ""
    return ", ".join(map(str, holders[:_SHOWN])) + more
