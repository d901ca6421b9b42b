"""The record of a launch, one JSON file for each, so that any terminal can list, follow and end it; and the code that a
launch copies: the files of this checkout that git knows."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.storage.files import write_text
from train_jax.storage.json_files import find_object

WORKER_SCRIPT = "train_jax/pods/launch/worker.sh"


@dataclasses.dataclass(frozen=True)
class Request:
    """Options of a launch on a TPU; what follows `--` is the command of every host."""

    tpu: str = ""
    """Name of the TPU: created if it does not exist, otherwise used."""
    zone: str = ""
    """Zone of the TPU, such as us-central2-b."""
    restarts: Annotated[int, Range(0, 1000)] = 10
    """Largest number of restarts after a preemption or a lost host."""
    max_hours: Annotated[float, Range(0, 1e5)] = 0.0
    """Hours after which the run is stopped, counted from the time its first node was ready; 0 for no limit."""

    type: str = ""
    """Accelerator type to create, such as v4-64."""
    runtime_version: str = ""
    """Software version of a new node; by default the one for JAX on this type."""
    capacity: Literal["on-demand", "spot", "reserved"] = "on-demand"
    """Kind of capacity of a new node."""
    internal_ip: bool = False
    """Give a new node internal addresses only, and connect to these."""
    project: str = ""
    """Project; by default that of gcloud's configuration."""

    extras: tuple[str, ...] = ("tpu", "gcs")
    """Extras of pyproject.toml that every host installs."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for every host, not for secrets; may be repeated."""
    worker_env_file: str = ""
    """File with lines NAME=VALUE for every host, such as WANDB_API_KEY; only its owner may read it (mode 600)."""

    compiled: str = ""
    """Folder of `trm compile-pod --fill-cache`, here or in gs://, as the compilation cache of every host."""

    collect: str = ""
    """Folder of the first host to copy here at the end; by default the run folder of `train`, unless in storage."""
    price_per_hour: Annotated[float, Range(0, 1e6)] = 0.0
    """Price of the whole node per hour, for the cost at the end and in `trm launch list`."""
    delete_when_done: bool = False
    """Delete the node at the end even if it was there before; what the launch created is deleted anyway."""
    keep: bool = False
    """Delete no node at the end."""

    command: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()


@dataclasses.dataclass(frozen=True)
class Record(Request):
    """A launch: its options, and its state. It holds no secrets, only the path of the file with them."""

    token: str = ""
    """Random text in the ids of its starts."""
    code: str = ""
    """Commit of the code, and a mark if files differ from it."""

    phase: str = "new"
    """Phase: new, creating, installing, running, done, failed or stopped."""
    created: bool = False
    """True if this launch created the node."""
    starts: int = 0
    begun: float | None = None
    """Time at which the first node became ready, in seconds of the epoch."""
    ready_since: float | None = None
    """Time at which the present node became ready, in seconds of the epoch."""
    seconds_before: float = 0.0
    """Seconds for which earlier nodes existed."""
    status: int | None = None
    """Exit status of the run."""
    stop_asked: bool = False

    @property
    def id(self) -> str:
        """Returns the id of the latest start."""
        return f"{self.token}-{self.starts}"

    @property
    def deadline(self) -> float | None:
        return self.begun + 3600 * self.max_hours if self.begun is not None and self.max_hours else None

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed", "stopped")

    def node_seconds(self) -> float:
        """Returns the seconds for which nodes existed for this launch."""
        return self.seconds_before + (time.time() - self.ready_since if self.ready_since is not None else 0.0)

    def cost(self) -> str:
        """Returns the hours and, if a price is stated, their cost."""
        hours = self.node_seconds() / 3600
        if not self.price_per_hour:
            return f"{hours:.2f} h"
        return f"{hours:.2f} h, {hours * self.price_per_hour:.2f} at {self.price_per_hour:g} an hour"

    def is_watched(self) -> bool:
        """Returns whether a process watches the run, which holds the lock."""
        try:
            with _locked(self.tpu, ".watch", fcntl.LOCK_EX | fcntl.LOCK_NB):
                return False
        except BlockingIOError:
            return True


def state_folder() -> Path:
    """Returns the folder with the files of launches."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "trm" / "launches"


def local_folder(name: str) -> Path:
    """Returns the folder for the logs of all hosts, and for the files that are sent to them."""
    return state_folder() / name


def read_record(name: str) -> Record | None:
    """Returns a launch by the name of its TPU; None if there is none. Raises `UserError` for a damaged file."""
    path = state_folder() / f"{name}.json"
    remedy = "remove it, and look for nodes in the console"
    fields = find_object(path, {}, remedy=remedy)
    if fields is None:
        return None
    fields |= {field: tuple(value) for field, value in fields.items() if isinstance(value, list)}
    try:
        return Record(**fields)
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error!r}); {remedy}") from error


def known(name: str) -> Record:
    """Returns a launch by the name of its TPU. Raises `UserError` if there is none."""
    record = read_record(name)
    if record is None:
        raise UserError(f"no launch {name} is known on this machine; see `trm launch list`")
    return record


def records() -> list[Record]:
    """Returns every launch."""
    names = sorted(path.stem for path in state_folder().glob("*.json"))
    return [record for record in map(read_record, names) if record is not None]


def write_record(record: Record) -> None:
    """Writes the record of a new launch, but not while another process changes the existing one."""
    with _locked(record.tpu, ".lock", fcntl.LOCK_EX):
        _write(record)


def update(name: str, **changes: Any) -> Record:
    """Changes fields of a launch; several processes may do so."""
    with _locked(name, ".lock", fcntl.LOCK_EX):
        record = dataclasses.replace(known(name), **changes)
        _write(record)
        return record


def _write(record: Record) -> None:
    write_text(state_folder() / f"{record.tpu}.json", json.dumps(dataclasses.asdict(record), indent=1))


@contextlib.contextmanager
def watching(name: str) -> Iterator[None]:
    """Makes this process the only one that watches a launch. Raises `UserError` if there is another one."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):  # `is_watched` of another process holds the lock for a moment
                stack.enter_context(_locked(name, ".watch", fcntl.LOCK_EX | fcntl.LOCK_NB))
                break
            time.sleep(0.01)
        else:
            raise UserError(f"another process watches {name}; follow it with `trm launch logs {name}`")
        yield


@contextlib.contextmanager
def _locked(name: str, suffix: str, how: int) -> Iterator[None]:
    path = state_folder() / f"{name}{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, how)
        yield


# ---- code


class Source(NamedTuple):
    """A state of a checkout."""

    root: Path
    tree: str
    """A commit of all tracked files as they are now."""
    name: str
    """Commit, with `-dirty` if files differ from it."""
    untracked: int
    """Files that git neither knows nor ignores."""

    @staticmethod
    def here() -> Source:
        """Returns the checkout around the working folder. Raises `UserError` if there is none."""
        try:
            root = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
        except UserError:
            raise UserError(
                f"{Path.cwd()} is in no git checkout; start trm launch in one of this project: it copies the code"
            ) from None
        if not (root / WORKER_SCRIPT).is_file() or not (root / "environment.sh").is_file():
            raise UserError(
                f"{root} is no checkout of this project; start trm launch in one, because it copies the code"
            )
        author = ["-c", "user.name=trm", "-c", "user.email=trm@localhost"]
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, *author, "stash", "create")
        untracked = _git(root, "ls-files", "--others", "--exclude-standard").splitlines()
        return Source(root, changed or commit, f"{commit[:12]}{'-dirty' * bool(changed)}", len(untracked))

    def unknown_files(self, paths: Sequence[str]) -> list[Path]:
        """Returns the files, relative to the checkout, that its archive would lack.

        Raises `UserError` for a path that the command of a host would not find.
        """
        found = []
        for path in paths:
            if Path(path).is_absolute() or not Path(path).resolve().is_relative_to(self.root.resolve()):
                raise UserError(f"{path}: hosts have the checkout alone; give a relative path in {self.root}")
            name = Path(path).resolve().relative_to(self.root.resolve())
            if not _git(self.root, "ls-files", "--", str(name)):
                found.append(name)
        return found

    def archive(self, path: Path, compiled: Sequence[Path] = (), added: Sequence[Path] = ()) -> None:
        """Writes the tracked files as a .tar.gz, with these files in the folder `compiled`, which `worker.sh` knows.

        `added`: files that `unknown_files` found, at the same place in the checkout.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        others = [f"--add-file={file.absolute()}" for file in compiled]
        others = ["--prefix=compiled/", *others, "--prefix="] if others else []
        for name in added:
            others += [f"--prefix={name.parent}/".removesuffix("./"), f"--add-file={self.root / name}", "--prefix="]
        _git(self.root, "archive", "--format=tar.gz", f"--output={path.absolute()}", *others, self.tree)


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        raise UserError("git is not installed; trm launch copies the files that git knows") from None
    if done.returncode:
        raise UserError(f"git {arguments[0]} in {folder}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
