"""What is known of a launch, in one JSON file for each, so that any terminal can list, follow and end it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.pod.launch.gcloud import Node, Request
from train_jax.run.files import write_text


@dataclasses.dataclass(frozen=True)
class Record:
    """A launch. No secrets: of the file with them only its path."""

    tpu: str
    zone: str
    project: str
    request: Request
    command: tuple[str, ...]
    env: tuple[str, ...] = ()
    worker_env_file: str = ""
    extras: tuple[str, ...] = ()
    restarts: int = 10
    max_hours: float = 0.0
    price_per_hour: float = 0.0
    delete_when_done: bool = False
    """Also a node that was there before."""
    keep: bool = False
    collect: str = ""
    token: str = ""
    """Random, in the ids of its starts."""
    code: str = ""
    """Commit, and whether files differ from it."""

    phase: str = "new"
    """new, creating, installing, running, done, failed or stopped."""
    created: bool = False
    """Whether this launch created the node."""
    starts: int = 0
    begun: float | None = None
    """When the first node was ready, in seconds of the epoch."""
    ready_since: float | None = None
    """Since when the present node is there."""
    seconds_before: float = 0.0
    """Of the nodes before it."""
    status: int | None = None
    """Exit status of the run."""
    stop_asked: bool = False
    watcher: tuple[str, int] | None = None
    """Machine and process that watches the run."""

    def replaced(self, **changes: Any) -> Record:
        return dataclasses.replace(self, **changes)

    @property
    def node(self) -> Node:
        return Node(self.tpu, self.zone, self.project)

    @property
    def id(self) -> str:
        """Of the latest start."""
        return f"{self.token}-{self.starts}"

    @property
    def deadline(self) -> float | None:
        return self.begun + 3600 * self.max_hours if self.begun is not None and self.max_hours else None

    @property
    def over(self) -> bool:
        return self.phase in ("done", "failed", "stopped")

    def node_hours(self, now: float | None = None) -> float:
        """How long nodes were there for this launch."""
        now = time.time() if now is None else now
        return (self.seconds_before + (now - self.ready_since if self.ready_since is not None else 0.0)) / 3600

    def cost(self) -> str:
        """Hours and, at the stated price, what they cost."""
        hours = self.node_hours()
        if not self.price_per_hour:
            return f"{hours:.2f} h"
        return f"{hours:.2f} h, {hours * self.price_per_hour:.2f} at {self.price_per_hour:g} an hour"

    def is_watched(self) -> bool:
        """Whether a process of this machine watches the run; on another machine it is taken to be alive."""
        if self.watcher is None:
            return False
        return self.watcher[0] != platform.node() or _lock_is_held(_file(self.tpu, ".watch"))


def state_folder() -> Path:
    """Where the files of launches are."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "trm" / "launches"


def local_folder(name: str) -> Path:
    """For the logs of all hosts, and what is sent to them."""
    return state_folder() / name


def _file(name: str, suffix: str) -> Path:
    return state_folder() / f"{name}{suffix}"


def read_record(name: str) -> Record | None:
    """Returns a launch by the name of its TPU; None if there is none. Raises `UserError` for a damaged file."""
    path = _file(name, ".json")
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        fields |= {field: tuple(value) for field, value in fields.items() if isinstance(value, list)}
        fields["request"] = Request(*fields["request"])
        return Record(**fields)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error!r}); remove it, and look for nodes in the console") from error


def records() -> list[Record]:
    """Every launch."""
    names = sorted(path.stem for path in state_folder().glob("*.json"))
    return [record for record in map(read_record, names) if record is not None]


def write_record(record: Record) -> None:
    """Not while another process is changing the record that is there."""
    with _locked(_file(record.tpu, ".lock"), fcntl.LOCK_EX):
        _write(record)


def _write(record: Record) -> None:
    write_text(_file(record.tpu, ".json"), json.dumps(dataclasses.asdict(record), indent=1))


def update(name: str, **changes: Any) -> Record:
    """Changes fields of a launch; several processes may do so."""
    with _locked(_file(name, ".lock"), fcntl.LOCK_EX):
        record = read_record(name)
        if record is None:
            raise UserError(f"no launch {name} is known here; see `trm launch list`")
        record = record.replaced(**changes)
        _write(record)
        return record


@contextlib.contextmanager
def watching(name: str) -> Iterator[None]:
    """The only process that watches a launch. Raises `UserError` if there is another one."""
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            with contextlib.suppress(BlockingIOError):  # `is_watched` of another process holds the lock for a moment
                stack.enter_context(_locked(_file(name, ".watch"), fcntl.LOCK_EX | fcntl.LOCK_NB))
                break
            time.sleep(0.01)
        else:
            raise UserError(f"another process watches {name}; follow it with `trm launch logs {name}`")
        update(name, watcher=(platform.node(), os.getpid()))
        yield
        update(name, watcher=None)


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, how)
        yield


def _lock_is_held(path: Path) -> bool:
    try:
        with _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except BlockingIOError:
        return True
