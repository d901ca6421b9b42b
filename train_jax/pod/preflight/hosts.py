"""Checks without devices: the same code, versions, configuration, data and clock in all processes; the run folder and
its disk; who holds the accelerator; what wandb and Google Cloud say."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from train_jax.errors import UserError
from train_jax.pod.launch import gcloud
from train_jax.pod.preflight.rows import Row, row
from train_jax.run.config import RunConfig, to_json
from train_jax.run.files import write_text
from train_jax.run.machine import hash_of_all, source_hashes, versions_of_packages
from train_jax.run.resume import differences_of_fields
from train_jax.run.storage import is_remote, path_of
from train_jax.run.tracking import wandb_mode
from train_jax.runtime.coordination import exchange, place
from train_jax.task import Task
from train_jax.version import DISTRIBUTION, commit, installed_version

CLOCK_WARN_SECONDS, CLOCK_FAIL_SECONDS = 2.0, 30.0
"""`trm status` calls a run silent after a minute, by the clock of the machine that asks."""
_CLOCK_ROUNDS = 5
_FOLDER_SECONDS = 10.0
"""How long a file of another host may take to appear; network file systems cache what was not there."""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_OF_THE_MACHINE = ("ext4", "ext3", "xfs", "btrfs", "overlay")
_MOUNTS = Path("/proc/mounts")
_PROC = Path("/proc")
_LOCKFILE = Path("/tmp/libtpu_lockfile")
_DEVICE = re.compile(r"/dev/(accel\d+|vfio/\d+|nvidia\d+|kfd)")
_LIBRARIES = ("libtpu.so", "/jaxlib/")
"""In the memory map of a process that uses JAX or the TPU."""
_SHOWN = 4
_MAPS_SECONDS = 3.0
"""How long the memory maps of other processes are read."""


# ---- the same in all processes


def check_code(config: RunConfig, hosts: Sequence[str]) -> Row:
    """Collective."""
    try:
        hashes = source_hashes(config)
    except OSError as error:  # the others wait for an answer
        hashes = {"unreadable": str(error)}
    whole = hash_of_all(hashes)
    others = exchange("preflight code", json.dumps([whole, commit(installed_version(DISTRIBUTION))]))
    named = [f"{one} at commit {at}" for one, at in map(json.loads, others)]
    result = _same([json.loads(each)[0] for each in others], named, hosts, f"{len(hashes)} files")
    if not result.failed:
        return result
    files = [json.loads(each) for each in exchange("preflight files", json.dumps(hashes))]
    differing = [name for name in sorted(set().union(*files)) if len({each.get(name) for each in files}) > 1]
    remedy = f"copy the same code to every host; {len(differing)} files differ, such as {differing[0]}"
    return dataclasses.replace(result, remedy=remedy)


def check_versions(hosts: Sequence[str]) -> Row:
    """Collective."""
    versions = {"python": platform.python_version()} | versions_of_packages()
    texts = exchange("preflight versions", ", ".join(f"{name} {version}" for name, version in versions.items()))
    shown = ", ".join(f"{name} {versions[name]}" for name in ("python", "jax", "torch") if name in versions)
    remedy = "install with `pip install -c constraints.txt` on every host"
    return _same(texts, texts, hosts, shown, remedy)


def check_configuration(config: RunConfig, hosts: Sequence[str]) -> Row:
    """Collective."""
    texts = exchange("preflight configuration", to_json(config))
    short = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]
    result = _same(texts, short, hosts, short[0])
    if not result.failed:
        return result
    usual = json.loads(Counter(texts).most_common(1)[0][0])
    fields = {name for text in texts for name, _ in differences_of_fields(usual, json.loads(text))}
    remedy = f"start every process with the same command line; other values of {', '.join(sorted(fields)[:5])}"
    return dataclasses.replace(result, remedy=remedy)


def check_data(task: Task | str, hosts: Sequence[str]) -> Row:
    """Reads a batch and compares the content of the data set. `task`: or why it cannot be opened. Collective."""
    begin = time.perf_counter()
    problem, fingerprint, description = _read(task)
    seconds = time.perf_counter() - begin
    fingerprints = exchange("preflight data", fingerprint)
    if problem:
        return row(problem, fail=True, limit="readable by every process")
    short = [hashlib.sha256(text.encode()).hexdigest()[:12] if text else "not readable" for text in fingerprints]
    shown = f"{description}; read a batch in {seconds:.2f} s"
    return _same(fingerprints, short, hosts, shown, "copy the same data set to every host, or use gs://")


def _read(task: Task | str) -> tuple[str, str, str]:
    """(what is wrong, fingerprint, description); nothing is raised, because the others wait for an answer."""
    if isinstance(task, str):
        return task, "", ""
    try:
        task.batch(0, (0, 1))
        return "", task.fingerprint, task.description
    except Exception as error:
        return f"a batch cannot be read: {' '.join(str(error).split())}", "", ""


def _same(values: Sequence[str], shown: Sequence[str], hosts: Sequence[str], measured: str, remedy: str = "") -> Row:
    """Compares the values of all processes, and names the first one that differs from most."""
    limit = "the same in all processes"
    if len(set(values)) == 1:
        return row(measured, limit=limit if len(values) > 1 else "")
    usual = Counter(values).most_common(1)[0][0]
    odd = next(index for index, value in enumerate(values) if value != usual)
    other = shown[list(values).index(usual)]
    text = f"process {odd} on {hosts[odd]} has {shown[odd]}, others have {other}"
    return row(text, fail=True, limit=limit, remedy=remedy)


def check_clock(hosts: Sequence[str]) -> Row | None:
    """The difference to the median of all clocks. Collective.

    The processes read their clocks when they have all arrived; of several tries the one counts in which they differ
    least, because a process that is late in one is not in all.
    """
    if len(hosts) == 1:
        return None
    readings = []
    for _ in range(_CLOCK_ROUNDS):
        exchange("preflight clock", "")
        readings.append([float(text) for text in exchange("preflight time", repr(time.time()))])
    best = min(readings, key=lambda each: max(each) - min(each))
    middle = statistics.median_low(best)
    odd = max(range(len(best)), key=lambda index: abs(best[index] - middle))
    skew = max(best) - min(best)
    return row(
        f"clocks differ by up to {skew:.2f} s (process {odd} on {hosts[odd]})",
        fail=skew > CLOCK_FAIL_SECONDS,
        warn=skew > CLOCK_WARN_SECONDS,
        limit=f"WARN {CLOCK_WARN_SECONDS:g} s, FAIL {CLOCK_FAIL_SECONDS:g} s",
        remedy=f"start the time service on {hosts[odd]}: sudo systemctl restart chrony",
    )


# ---- the run folder


def check_folder(run_dir: str, platform: str, hosts: Sequence[str]) -> Row:
    """Every process writes a token into the folder, and reads those of all others. Collective.

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
        kind = _file_system(folder)
    except (OSError, UserError) as error:
        problem = str(error)
    wrote = [each for each, text in enumerate(exchange("preflight written", problem)) if not text]
    try:
        unseen = [] if problem else _unseen(folder, name, token, wrote)
        exchange("preflight read", "")
    finally:
        with contextlib.suppress(OSError, UserError):
            (path_of(run_dir) / f"{name}-{index}").unlink(missing_ok=True)
    exchange("preflight removed", "")  # the process that made the folder can only remove it when it is empty
    for each in made:
        with contextlib.suppress(OSError):
            each.rmdir()
    if problem:
        text = f"{run_dir} cannot be written: {problem}"
        return row(text, fail=True, limit="writable by every process", remedy=remedy)
    limit = "written and read by every process"
    if unseen:
        text = f"the file that process {unseen[0]} on {hosts[unseen[0]]} wrote is not in {run_dir} of this host"
        return row(text, fail=True, limit=limit, remedy=remedy)
    lasting = kind not in _IN_MEMORY and not (platform == "tpu" and kind in _OF_THE_MACHINE)
    why = "in memory" if kind in _IN_MEMORY else "on the disk of a TPU machine, which is deleted with it"
    text = f"{run_dir} ({kind}): " + (f"written and read by {count} processes" if count > 1 else "written and read")
    remedy = "use gs://bucket/runs/name, or a disk that stays"
    return row(text if lasting else f"{text}; {why}", warn=not lasting, limit=limit, remedy=remedy)


def _make(folder: Path) -> list[Path]:
    """Makes the folder; returns what was not there, innermost first."""
    if is_remote(folder):
        return []
    missing = [each for each in (folder.absolute(), *folder.absolute().parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _unseen(folder: Path, name: str, token: str, processes: Sequence[int]) -> list[int]:
    """Returns the processes whose token does not appear here."""
    deadline, unseen = time.monotonic() + _FOLDER_SECONDS, list(processes)
    while True:
        unseen = [each for each in unseen if not _is_there(folder / f"{name}-{each}", token)]
        if not unseen or time.monotonic() > deadline:
            return unseen
        time.sleep(0.2)


def _is_there(path: Path, token: str) -> bool:
    with contextlib.suppress(OSError):
        if not is_remote(path):
            os.listdir(path.parent)  # makes NFS look again
        return path.read_text() == token
    return False


def _file_system(folder: Path) -> str:
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
        return row("storage has no limit")
    free = shutil.disk_usage(_existing(folder)).free
    needed = checkpoint_bytes * (kept + 1)
    text = f"{free / 1e9:.1f} GB free; {kept + 1} checkpoints take {needed / 1e6:.1f} MB"
    limit = "WARN below twice that, FAIL below that"
    remedy = "free some space, or use another --run-dir; a lower --keep-checkpoints"
    return row(text, fail=free < needed, warn=free < 2 * needed, limit=limit, remedy=remedy)


def _existing(folder: Path) -> Path:
    return next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())


# ---- other processes of this host


def check_holders(platform: str, own: Collection[int], proc: Path = _PROC, lockfile: Path = _LOCKFILE) -> Row:
    """Checks that no other process has the accelerator open; `own`: the processes of this run on this host."""
    if platform not in ("tpu", "gpu"):
        return row(f"no accelerator is used: the platform is {platform}")
    holders, device, unreadable = [], "", 0
    for pid in _other_processes(proc, own):
        try:
            devices = _open_devices(proc / str(pid))
        except OSError:
            unreadable += 1
            continue
        if devices:
            holders.append(pid)
            device = device or min(devices)
    hidden = f"; {unreadable} processes of other users could not be read" if unreadable else ""
    limit = "no other process" if platform == "tpu" else "WARN: other processes"
    if holders:
        text = f"{device} is open in {_listed(proc, holders)}"
        remedy = f"end what still runs there, after a look at it: kill {' '.join(map(str, holders))}"
        return row(text, fail=platform == "tpu", warn=True, limit=limit, remedy=remedy)
    if platform == "tpu" and lockfile.exists():
        text = f"nobody that can be seen, but {lockfile} is there{hidden}"
        remedy = f"if JAX says that the TPU is in use: sudo lsof {lockfile}, and remove it if nobody has it"
        return row(text, warn=True, limit=limit, remedy=remedy)
    return row(f"nobody{hidden}", limit=limit)


def check_other_processes(own: Collection[int], proc: Path = _PROC) -> Row:
    """Warns of other Python processes with JAX or libtpu loaded: they take cores and memory, or are left from a run.

    The memory map of a process cannot be read while that process changes it, which on a busy machine can take minutes;
    so a thread reads them, for a few seconds.
    """
    read: list[int] = []
    reader = threading.Thread(target=_find_others, args=(own, proc, read), daemon=True)
    reader.start()
    reader.join(_MAPS_SECONDS)
    others = list(read)
    rest = ", and not all could be asked" if reader.is_alive() else ""
    return row(
        f"{len(others)} with JAX or libtpu on this host" + (f": {_listed(proc, others)}" if others else "") + rest,
        warn=bool(others),
        limit="WARN: any",
        remedy="are they left from an earlier run? then end them",
    )


def _find_others(own: Collection[int], proc: Path, others: list[int]) -> None:
    for pid in _other_processes(proc, own):
        with contextlib.suppress(OSError, ValueError):
            if "python" in os.readlink(proc / str(pid) / "exe").rpartition("/")[2]:
                text = (proc / str(pid) / "maps").read_text()
                if any(name in text for name in _LIBRARIES):
                    others.append(pid)


def _other_processes(proc: Path, own: Collection[int]) -> Iterator[int]:
    with contextlib.suppress(OSError):  # not Linux
        pids = sorted(name for name in os.listdir(proc) if name.isdecimal())
        yield from (int(pid) for pid in pids if int(pid) not in own)


def _open_devices(process: Path) -> set[str]:
    """Returns the device files that a process has open. Raises `OSError` for a process of another user."""
    targets = set()
    for descriptor in os.listdir(process / "fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            targets.add(os.readlink(process / "fd" / descriptor))
    return {target for target in targets if _DEVICE.fullmatch(target)}


def _listed(proc: Path, pids: Sequence[int]) -> str:
    """Returns the names of processes; not their arguments, which may hold secrets."""
    names = []
    for pid in pids[:_SHOWN]:
        with contextlib.suppress(OSError):
            names.append(f"{(proc / str(pid) / 'comm').read_text().strip()} (pid {pid})")
    return ", ".join(names) + (f" and {len(pids) - _SHOWN} more" if len(pids) > _SHOWN else "")


# ---- services


def check_wandb(config: RunConfig) -> Row:
    """Whether metrics go online. Neither the key nor a part of it is shown."""
    mode, key = wandb_mode(config)
    if mode == "online":
        text = f"online, with the key of {key}" if key else "online, without a key"
        remedy = "set WANDB_API_KEY, run `wandb login`, or use --wandb offline"
        return row(text, warn=not key, limit="WARN: online without a key", remedy=remedy)
    why = {"offline": ": metrics stay in the run folder", "not installed": ": metrics are in metrics.jsonl"}
    return row(f"{mode}{why.get(mode, '')}")


def check_tpu(tpu: str, zone: str) -> Row:
    """Asks gcloud for the state and health of the TPU."""
    limit = "READY and HEALTHY"
    try:
        described = json.loads(gcloud.Gcloud().run(gcloud.describe(gcloud.Node(tpu, zone))))
    except UserError as error:
        remedy = "are name, zone and project right? is gcloud installed and logged in (`gcloud auth login`)?"
        return row(f"gcloud: {error}", fail=True, limit=limit, remedy=remedy)
    state, health = described.get("state", "?"), described.get("health", "not told")
    return row(
        f"{tpu} ({described.get('acceleratorType', '?')}): {state}, {health}",
        fail=state != "READY" or health in ("UNHEALTHY_TENSORFLOW", "UNHEALTHY_MAINTENANCE", "TIMEOUT", "UNHEALTHY"),
        warn=health != "HEALTHY",
        limit=limit,
        remedy="wait for READY; delete and create it again if it stays unhealthy",
    )
