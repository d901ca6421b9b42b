"""The `gcloud` command lines of a launch, and their execution: lists of arguments, never through a local shell."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from train_jax.errors import UserError
from train_jax.pods.launch.accelerators import runtime_of, worker_count
from train_jax.pods.launch.record import Record

_NAMES = {
    "tpu": (
        r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?",
        "a name that begins with a letter, of lower-case letters, digits and hyphens, such as mine-1",
    ),
    "zone": (r"[a-z]+(-[a-z]+)*[0-9]*-[a-z][0-9]?", "a zone such as us-central2-b"),
    "project": (r"([a-z][-a-z0-9]{4,28}[a-z0-9]|[a-z0-9.-]+:[a-z][-a-z0-9]{4,28})?", "the id of a project"),
    "type": (r"([a-z0-9]{2,20}-[0-9]{1,5})?", "an accelerator type such as v4-64"),
    "runtime_version": (r"([a-z0-9][-a-z0-9.]{0,99})?", "a TPU software version such as tpu-ubuntu2204-base"),
}
"""The pattern of each kind of name, and what is expected."""


NODE = "tpu-vm"
QUEUED = "queued-resources"
"""Groups of `gcloud compute tpus`: nodes, and the requests for them."""


class GcloudError(UserError):
    """gcloud failed, or is not installed."""

    STATUS: ClassVar[int] = 1


def check_names(**names: str) -> None:
    """Raises `UserError` for a name that Google Cloud would refuse, which includes flags and characters of a shell."""
    for field, value in names.items():
        pattern, expected = _NAMES[field]
        if not re.fullmatch(pattern, value):
            raise UserError(f"--{field.replace('_', '-')} {value!r}: expected {expected}")


# ---- command lines


def _tpu(record: Record, group: str, verb: str, *words: str) -> list[str]:
    place = [f"--zone={record.zone}", *([f"--project={record.project}"] if record.project else [])]
    return ["gcloud", "compute", "tpus", group, verb, *words, *place]


def create(record: Record) -> list[str]:
    """Requests the node as a queued resource, which waits while there is no capacity."""
    words = [record.tpu, f"--node-id={record.tpu}", f"--accelerator-type={record.type}", "--quiet"]
    words += [f"--runtime-version={record.runtime_version or runtime_of(record.type)}"]
    words += [f"--{record.capacity}"] if record.capacity != "on-demand" else []
    words += ["--internal-ips"] if record.internal_ip else []
    return _tpu(record, QUEUED, "create", *words)


def describe(record: Record, group: str) -> list[str]:
    return _tpu(record, group, "describe", record.tpu, "--format=json")


def delete(record: Record) -> list[str]:
    """Deletes the request of a launch with its node; without a request, only the node."""
    if record.created:
        return _tpu(record, QUEUED, "delete", record.tpu, "--force", "--quiet")
    return _tpu(record, NODE, "delete", record.tpu, "--quiet")


def ssh(record: Record, worker: int, command: Sequence[str]) -> list[str]:
    """Runs a command on one worker: one connection each, because `--worker=all` shows no output before the end."""
    alive = ["--ssh-flag=-oServerAliveInterval=15", "--ssh-flag=-oServerAliveCountMax=4"]
    return _tpu(record, NODE, "ssh", record.tpu, *_worker(record, worker), *alive, f"--command={shlex.join(command)}")


def scp(record: Record, worker: int, source: str, target: str) -> list[str]:
    """Copies a file; `NAME:PATH` is one of the worker, below its home folder: a name of `check_names` and slashes."""
    return _tpu(record, NODE, "scp", source, target, *_worker(record, worker))


def _worker(record: Record, worker: int) -> list[str]:
    return [f"--worker={worker}", *(["--internal-ip"] if record.internal_ip else []), "--quiet"]


# ---- execution


class Gcloud:
    """Executes command lines."""

    dry = False

    def run(self, argv: Sequence[str]) -> str:
        """Returns standard output. Raises `GcloudError` with the last line of what gcloud says."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        except FileNotFoundError:
            raise GcloudError("gcloud is not installed; see https://cloud.google.com/sdk/docs/install") from None
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
            raise GcloudError(f"{said[-1]} ({shlex.join(argv)[:300]})")
        return done.stdout

    def json(self, argv: Sequence[str]) -> dict[str, Any]:
        """Returns what a command with `--format=json` prints; an empty dict for a resource that does not exist."""
        try:
            return json.loads(self.run(argv))
        except GcloudError as error:
            if "NOT_FOUND" in str(error):
                return {}
            raise

    def stream(self, argv: Sequence[str], line: Callable[[bytes], bool]) -> int:
        """Calls `line` with every complete line of standard output, until it returns false; returns the exit status."""
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert process.stdout is not None
        for raw in process.stdout:
            if raw.endswith(b"\n") and not line(raw):
                process.terminate()
                break
        process.stdout.close()
        return process.wait()


class DryRun(Gcloud):
    """Shows command lines and executes none, as if the node did not exist and were ready after its creation.

    All workers get the same commands, so those of the first one stand for all.
    """

    dry = True

    def __init__(self, show: Callable[[str], None], type: str):
        """`type` is the accelerator type of the node; without one, the node exists and has one worker."""
        self._print = show
        self._workers = worker_count(type)
        self._created = not type
        if self._workers > 1:
            show(f"# commands on worker 0 are shown; those on workers 1 to {self._workers - 1} are the same")

    def _show(self, argv: Sequence[str]) -> None:
        workers = [word for word in argv if word.startswith("--worker=")]
        if workers in ([], ["--worker=0"]):
            self._print(shlex.join(argv))

    def run(self, argv: Sequence[str]) -> str:
        self._show(argv)
        self._created = self._created or argv[4] == "create"
        return "ended 0" if argv[4] == "ssh" else ""

    def json(self, argv: Sequence[str]) -> dict[str, Any]:
        self._show(argv)
        if not self._created:
            return {}
        endpoints = [{"ipAddress": f"ADDRESS_OF_WORKER_{worker}"} for worker in range(self._workers)]
        state: Any = {"state": "ACTIVE"} if argv[3] == QUEUED else "READY"
        return {"state": state, "networkEndpoints": endpoints}

    def stream(self, argv: Sequence[str], line: Callable[[bytes], bool]) -> int:
        self._show(argv)
        return 0
