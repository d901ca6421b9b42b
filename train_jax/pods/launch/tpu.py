"""A TPU of a launch: creates its node, waits for it, creates it again after a preemption and deletes it; runs
`worker.sh` by ssh on its workers, the hosts of a run."""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.pods.launch import gcloud
from train_jax.pods.launch.gcloud import Gcloud, GcloudError
from train_jax.pods.launch.life import process_variables
from train_jax.pods.launch.record import WORKER_SCRIPT, Record, local_folder, read_record, update

POLL_SECONDS = 15.0
"""Seconds between two checks of a node that is being created."""
READY_SECONDS = 3600.0
"""Seconds that a node may take to become ready after its request was granted; the wait for the grant has no limit."""
_LASTING = {"READY", "STOPPED", "PREEMPTED", "TERMINATED", "SUSPENDED", "FAILED", "HIDDEN"}
"""States that end only if somebody acts; all other states lead to one of these, or to no node."""
_GONE = _LASTING - {"READY"} | {"", "STOPPING", "SUSPENDING", "DELETING"}
_UNPACK = (
    'set -e; cd "$1"; find code -mindepth 1 -maxdepth 1 ! -name .venv ! -name data ! -name runs -exec rm -rf {} +; '
    'tar -xzf code.tar.gz -C code; script=$2; shift 2; exec bash "code/$script" install "$@"'
)
"""Shell command that replaces the code of an earlier launch, but not its environment, data and runs."""
PORT = 8476
"""The port of JAX's coordinator, on the first worker."""
AGAIN_SECONDS = 5.0
"""Seconds before a lost connection is opened again."""
SILENT_SECONDS = 900.0
"""Seconds after which a worker is given up that cannot be reached although its node is ready."""
LOG_ATTEMPTS = 10
"""Number of attempts to read the rest of the log of a run that has ended, if the connection breaks each time."""


class Tpu:
    """The node of a record, which it updates, and its workers as the hosts of a run."""

    def __init__(self, commands: Gcloud, record: Record, say: Callable[[str], None]):
        self.gcloud = commands
        self.record = record
        self.say = say
        self.count = 0
        """Number of workers; known when the node exists."""
        self._adopts = record.phase == "running"

    @property
    def deadline(self) -> float | None:
        return self.record.deadline

    def change(self, **changes: Any) -> None:
        """Changes fields of the record, on disk unless this is a dry run."""
        if self.gcloud.dry:
            self.record = dataclasses.replace(self.record, **changes)
        else:
            self.record = update(self.record.tpu, **changes)

    # ---- the node

    def state(self) -> str:
        """Returns READY, another state of Google Cloud, or nothing for a node that does not exist."""
        return self.gcloud.json(gcloud.describe(self.record, gcloud.NODE)).get("state", "")

    def _request_state(self) -> str:
        """Returns the state of the request for the node; ACTIVE when it was granted."""
        return self.gcloud.json(gcloud.describe(self.record, gcloud.QUEUED)).get("state", {}).get("state", "")

    def is_gone(self) -> bool:
        """Returns whether the machines of the run no longer exist."""
        return self.state() in _GONE

    def addresses(self) -> list[str]:
        """Returns the internal addresses of the workers, in their order."""
        described = self.gcloud.json(gcloud.describe(self.record, gcloud.NODE))
        return [endpoint["ipAddress"] for endpoint in described.get("networkEndpoints", [])]

    def make_ready(self) -> bool:
        """Creates the node unless it exists; returns whether it is another machine than before.

        After a node of this launch was ready, another one is requested as often as it is preempted before it is.
        Raises `UserError` for a node that is not there and must not be created.
        """
        fresh = self.record.ready_since is None
        if self.state() != "READY":
            fresh = True
            requested = False
            again = self.record.begun is not None
            self._account()
            while (state := self._settled(requested)) != "READY":
                if requested and (not again or state == "FAILED"):
                    raise GcloudError(f"{self.record.tpu} is {state}, expected READY")
                self._create(state)
                requested = True
        if fresh:
            now = time.time()
            self.change(ready_since=now, begun=self.record.begun or now)
        return fresh

    def _create(self, state: str) -> None:
        """Requests the node, and replaces a node that is not usable, and its request."""
        record = self.record
        if state and not record.created:
            raise UserError(f"{record.tpu} is {state} and was not created by a launch; delete it, or use another name")
        if not record.type:
            raise UserError(f"{record.tpu} does not exist in {record.zone}; give --type, such as v4-64, to create it")
        if record.created:
            self.say(f"{record.tpu} is {state or 'not there'}: deleting it")
            self.delete()
        self.change(phase="creating", created=True)
        self.say(f"creating {record.tpu}, {record.type}, {record.capacity}")
        while True:
            try:
                self.gcloud.run(gcloud.create(self.record))
                return
            except GcloudError as error:  # a quota that the node before still takes, or a lost connection
                if record.begun is None:
                    raise
                self.say(f"no node yet: {error}")
            self.check_wanted()
            time.sleep(POLL_SECONDS)

    def _settled(self, requested: bool) -> str:
        """Waits while the node changes its state; returns a lasting one. `requested`: the node will exist soon."""
        said = ""
        until = 0.0
        while True:
            request = self._request_state() if requested else "ACTIVE"
            if request in ("FAILED", "SUSPENDED"):
                return request
            state = self.state() if request == "ACTIVE" else request
            if request == "ACTIVE":
                until = until or time.time() + READY_SECONDS
                if state in _LASTING or not (state or requested):
                    return state
                if time.time() > until:
                    raise GcloudError(f"{self.record.tpu} is {state or 'not there'}, expected READY")
            self.check_wanted()
            if state != said:
                self.say(f"{self.record.tpu} is {state or 'not there yet'}")
            said = state
            time.sleep(POLL_SECONDS)

    def check_wanted(self) -> None:
        """Raises `GcloudError` if the run was told to end before it could be started."""
        if self.stops():
            raise GcloudError(f"the launch {self.record.tpu} was stopped before the run was started")
        if self.is_late():
            raise GcloudError(f"--max-hours of {self.record.tpu} passed before the run was started again")

    def stops(self) -> bool:
        """Returns whether somebody asked the run to stop."""
        if not self.gcloud.dry:
            self.record = read_record(self.record.tpu) or self.record
        return self.record.stop_asked

    def is_late(self) -> bool:
        """Returns whether the deadline has passed."""
        return self.deadline is not None and time.time() > self.deadline

    def delete(self) -> None:
        """Deletes the node and its request; does nothing if they do not exist."""
        try:
            self.gcloud.run(gcloud.delete(self.record))
        except GcloudError as error:
            if "NOT_FOUND" not in str(error):
                raise
        self._account()

    def _account(self) -> None:
        """Adds the time of a node that is gone."""
        self.change(ready_since=None, seconds_before=self.record.node_seconds())

    # ---- the run

    def start(self) -> None:
        """Starts the run on every worker. The first call only follows a run that exists already."""
        if not self._adopts:
            self.check_wanted()
        fresh = self.make_ready()
        addresses = self.addresses()
        self.count = len(addresses)
        adopts = self._adopts and not fresh
        self._adopts = False
        if adopts:
            return
        if self.count > 1 and self.record.collect:
            raise not_shared(self.record.collect)
        try:
            if fresh:
                self._install()
            self.check_wanted()
            self._send_secrets()
            self._begin(addresses)
        except GcloudError as error:
            if not self.is_gone():
                raise
            self.say(f"{self.record.tpu} went away: {error}")  # `follow` says the same of every host

    def _begin(self, addresses: Sequence[str]) -> None:
        self.change(starts=self.record.starts + 1, phase="running")
        record = self.record
        seconds = max(1, round(record.deadline - time.time())) if record.deadline is not None else 0
        address = f"{addresses[0]}:{PORT}"

        def begin(worker: int) -> None:
            variables = [f"{name}={value}" for name, value in process_variables(address, self.count, worker).items()]
            command = list(record.command) if record.command[0] == "bash" else ["trm", *record.command]
            self.script(worker, "start", record.id, str(seconds), *variables, *record.env, "--", *command)

        self._on_all(begin)
        self.say(f"started on {self.count} hosts as {record.id}")

    def follow(self, host: int, line: Callable[[str], None]) -> int | None:
        record = self.record
        silent_since = time.time()
        attempts = 0
        while True:
            code = self._receive(host, record.id, line)
            try:
                state = self.script(host, "status", record.id).split()
                silent_since = time.time()
                if state[0] in ("none", "lost"):
                    return None
                if state[0] == "ended":
                    attempts += 1
                    if code == 0 or attempts == LOG_ATTEMPTS:
                        return int(state[1])
            except GcloudError:
                if self._is_lost(silent_since):
                    return None
            time.sleep(AGAIN_SECONDS)

    def _receive(self, host: int, id: str, line: Callable[[str], None]) -> int:
        """Follows a log from the end of its copy on this machine; returns the exit status of the connection.

        gcloud repeats an ssh command whose connection breaks, from its beginning. Each time the output begins with a
        mark, so that the repetition is seen and ended: the next call continues in the right place.
        """
        log = local_folder(self.record.tpu) / id / f"host-{host:02}.log"
        if self.gcloud.dry:
            log = Path(os.devnull)
        log.parent.mkdir(parents=True, exist_ok=True)
        mark, marks = secrets.token_hex(8), 0
        with log.open("ab", buffering=0) as copy:

            def receive(raw: bytes) -> bool:
                nonlocal marks
                if raw.endswith(f"{mark}\n".encode()):  # after half a line if the connection broke within it
                    marks += 1
                    return marks == 1
                copy.write(raw)
                line(raw.decode(errors="backslashreplace").rstrip("\r\n"))
                return True

            return self.gcloud.stream(self._script(host, "follow", id, str(copy.tell()), mark), receive)

    def _is_lost(self, silent_since: float) -> bool:
        try:
            return self.is_gone() or time.time() - silent_since > SILENT_SECONDS
        except GcloudError:  # this machine has no network
            return False

    def stop(self) -> None:
        self.count = len(self.addresses())
        self._on_all(lambda worker: self.script(worker, "stop", self.record.id))

    # ---- files

    def _install(self) -> None:
        record = self.record
        folder = self._folder
        archive = str(local_folder(record.tpu) / "code.tar.gz")
        self.change(phase="installing")
        self.say(f"copying and installing on {self.count} hosts")
        make = ["mkdir", "-p", "-m", "700", folder, f"{folder}/code"]  # the mode is that of the last part of each
        self._command(0, make)  # alone, because the first connection makes the keys for all

        def copy(worker: int) -> None:
            if worker:
                self._command(worker, make)
            self.gcloud.run(gcloud.scp(record, worker, archive, f"{record.tpu}:{folder}/code.tar.gz"))
            self._command(worker, ["bash", "-c", _UNPACK, "unpack", folder, WORKER_SCRIPT, *record.extras])

        self._on_all(copy)

    def _send_secrets(self) -> None:
        """Sends the file with secrets, at no time readable for others; the run removes it after reading it."""
        path = self.record.worker_env_file
        name = f"{self._folder}/environment"

        def send(worker: int) -> None:
            self._command(worker, ["install", "-m", "600", "/dev/null", name])
            self.gcloud.run(gcloud.scp(self.record, worker, path, f"{self.record.tpu}:{name}"))

        if path:
            self._on_all(send)

    def collect(self, run_folder: str, target: Path) -> None:
        """Copies a folder of the first worker, as a .tar file, so that its name is never part of a remote path."""
        self.script(0, "pack", run_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        source = f"{self.record.tpu}:{self._folder}/results.tar"
        self.gcloud.run(gcloud.scp(self.record, 0, source, str(target)))

    # ---- commands

    @property
    def _folder(self) -> str:
        """The folder of the launch, in the home folder of every worker."""
        return f"trm-launches/{self.record.tpu}"

    def script(self, worker: int, *words: str) -> str:
        """Runs `worker.sh` and returns its output."""
        return self.gcloud.run(self._script(worker, *words))

    def _script(self, worker: int, *words: str) -> list[str]:
        return gcloud.ssh(self.record, worker, ["bash", f"{self._folder}/code/{WORKER_SCRIPT}", *words])

    def _command(self, worker: int, words: Sequence[str]) -> None:
        self.gcloud.run(gcloud.ssh(self.record, worker, words))

    def _on_all(self, act: Callable[[int], Any]) -> list[Any]:
        """Calls `act` for every worker at once or, in a dry run, one after the other. Raises the first error."""
        if self.gcloud.dry:
            return [act(worker) for worker in range(self.count)]
        with ThreadPoolExecutor(max_workers=max(self.count, 1)) as pool:
            return list(pool.map(act, range(self.count)))


def not_shared(run_folder: str) -> UserError:
    """Returns the error for a run folder that only one of several hosts can see."""
    return UserError(
        f"run folder {run_folder} is on one host only; give --run-dir gs://bucket/folder, which all hosts share"
    )
