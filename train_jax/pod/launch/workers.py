"""The workers of a TPU node as the hosts of a run: `worker.sh` on each of them, by ssh."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.pod.launch import gcloud
from train_jax.pod.launch.command import not_shared
from train_jax.pod.launch.gcloud import Gcloud, GcloudError
from train_jax.pod.launch.node import TpuNode
from train_jax.pod.launch.record import local_folder
from train_jax.pod.launch.rehearsal import process_variables
from train_jax.pod.launch.source import WORKER_SCRIPT
from train_jax.pod.launch.view import log_file

_UNPACK = (
    'set -e; cd "$1"; find code -mindepth 1 -maxdepth 1 ! -name .venv ! -name data ! -name runs -exec rm -rf {} +; '
    'tar -xzf code.tar.gz -C code; script=$2; shift 2; exec bash "code/$script" install "$@"'
)
"""Replaces the code of an earlier launch, without its environment, data and runs."""
PORT = 8476
"""Of JAX's coordinator, on the first worker."""
AGAIN_SECONDS = 5.0
"""Before a lost connection is made again."""
SILENT_SECONDS = 900.0
"""A worker that cannot be reached for so long, although its node is ready, is given up."""
LOG_ATTEMPTS = 10
"""How often the rest of the log of a run that has ended is asked for if the connection breaks each time."""


class Workers:
    """The hosts of a launch; `count` is known when the node is."""

    def __init__(self, commands: Gcloud, node: TpuNode, say: Callable[[str], None], *, keeps_logs: bool = True):
        """`keeps_logs`: in the local folder of the launch, so that a log that was followed before is continued."""
        self.node, self.count = node, 0
        self._gcloud, self._say, self._keeps_logs = commands, say, keeps_logs
        self._bytes: dict[tuple[str, int], int] = {}
        self._adopt = node.record.phase == "running"

    @property
    def dry(self) -> bool:
        """Whether nothing is executed."""
        return self._gcloud.dry

    # ---- the run

    def start(self) -> None:
        """The first call leaves a run alone that is there already; it is only to be followed."""
        fresh = self.node.make_ready()
        addresses = self.node.addresses()
        self.count, adopts, self._adopt = len(addresses), self._adopt and not fresh, False
        if adopts:
            return
        if self.count > 1 and self.node.record.collect:
            raise UserError(not_shared(self.node.record.collect))
        try:
            if fresh:
                self._install()
            self.node.check_not_stopped()
            self._send_secrets()
            self._begin(addresses)
        except GcloudError as error:
            if not self.node.is_gone():
                raise
            self._say(f"{self.node.record.tpu} went away: {error}")  # `follow` says the same of every host

    def _begin(self, addresses: Sequence[str]) -> None:
        record = self.node.record
        self.node.change(starts=record.starts + 1, phase="running")
        record = self.node.record
        seconds = max(1, round(record.deadline - time.time())) if record.deadline is not None else 0
        address = f"{addresses[0]}:{PORT}"

        def begin(worker: int) -> None:
            variables = [f"{name}={value}" for name, value in process_variables(address, self.count, worker).items()]
            command = list(record.command) if record.command[0] == "bash" else ["trm", *record.command]
            self.script(worker, "start", record.id, str(seconds), *variables, *record.env, "--", *command)

        self._on_all(begin)
        self._say(f"started on {self.count} hosts as {record.id}")

    def follow(self, host: int, line: Callable[[str], None]) -> int | None:
        record, silent_since, attempts = self.node.record, time.time(), 0
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
            if not self._gcloud.dry:
                time.sleep(AGAIN_SECONDS)

    def _receive(self, host: int, id: str, line: Callable[[str], None]) -> int:
        """Follows a log, behind what was received of it; returns the exit status of the connection.

        gcloud repeats an ssh command whose connection breaks, from its beginning. Each time the output begins with a
        mark, so that the repetition is seen and ended: the next call continues in the right place.
        """
        log = log_file(local_folder(self.node.record.tpu) / id, host)
        with contextlib.ExitStack() as closing:
            copy = None
            if self._keeps_logs and not self.dry:
                log.parent.mkdir(parents=True, exist_ok=True)
                copy = closing.enter_context(log.open("ab", buffering=0))
                self._bytes[id, host] = copy.tell()

            mark, marks = secrets.token_hex(8), 0

            def receive(raw: bytes) -> bool:
                nonlocal marks
                if raw.endswith(f"{mark}\n".encode()):  # behind half a line if the connection broke within it
                    marks += 1
                    return marks == 1
                if copy is not None:
                    copy.write(raw)
                self._bytes[id, host] += len(raw)
                line(raw.decode(errors="backslashreplace").rstrip("\r\n"))
                return True

            begin = self._bytes.setdefault((id, host), 0)
            return self._gcloud.stream(self._ssh(host, "follow", id, str(begin), mark), receive)

    def _is_lost(self, silent_since: float) -> bool:
        try:
            return self.node.is_gone() or time.time() - silent_since > SILENT_SECONDS
        except GcloudError:  # this machine has no network
            return False

    @property
    def deadline(self) -> float | None:
        return self.node.record.deadline

    def stop(self) -> None:
        self._on_all(lambda worker: self.script(worker, "stop", self.node.record.id))

    def stops(self) -> bool:
        return self.node.stops()

    def states(self) -> list[str]:
        """The first word of `worker.sh status` for every worker; `unreachable` without an answer."""

        def ask(worker: int) -> str:
            try:
                return self.script(worker, "status", self.node.record.id).split()[0]
            except GcloudError:
                return "unreachable"

        self.count = len(self.node.addresses())
        return self._on_all(ask)

    # ---- files

    def _install(self) -> None:
        record, archive = self.node.record, local_folder(self.node.record.tpu) / "code.tar.gz"
        self.node.change(phase="installing")
        self._say(f"copying and installing on {self.count} hosts")
        folder = f"trm-launches/{record.tpu}"
        make = ["mkdir", "-p", "-m", "700", folder, f"{folder}/code"]  # the mode is that of the last part of each
        self._command(0, make)  # alone, because the first connection makes the keys for all

        def copy(worker: int) -> None:
            if worker:
                self._command(worker, make)
            self._run(gcloud.upload(record.node, worker, archive, f"{folder}/code.tar.gz", internal_ip=self._internal))
            self._command(worker, ["bash", "-c", _UNPACK, "unpack", folder, WORKER_SCRIPT, *record.extras])

        self._on_all(copy)

    def _send_secrets(self) -> None:
        """The file is for its owner alone before it has contents; the run removes it when it has read it."""
        record = self.node.record
        if not record.worker_env_file:
            return
        name = f"trm-launches/{record.tpu}/environment"

        def send(worker: int) -> None:
            self._command(worker, ["install", "-m", "600", "/dev/null", name])
            path = Path(record.worker_env_file)
            self._run(gcloud.upload(record.node, worker, path, name, internal_ip=self._internal))

        self._on_all(send)

    def collect(self, run_folder: str, target: Path) -> None:
        """Copies a folder of the first worker, as a .tar file, so that its name is never part of a remote path."""
        record = self.node.record
        self.script(0, "pack", run_folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        name = f"trm-launches/{record.tpu}/results.tar"
        self._run(gcloud.download(record.node, 0, name, target, internal_ip=self._internal))

    # ---- commands

    @property
    def _internal(self) -> bool:
        return self.node.record.request.internal_ip

    def script(self, worker: int, *words: str) -> str:
        """Runs `worker.sh` and returns its output."""
        return self._run(self._ssh(worker, *words))

    def _ssh(self, worker: int, *words: str) -> list[str]:
        script = f"trm-launches/{self.node.record.tpu}/code/{WORKER_SCRIPT}"
        return gcloud.ssh(self.node.record.node, worker, ["bash", script, *words], internal_ip=self._internal)

    def _command(self, worker: int, words: Sequence[str]) -> str:
        return self._run(gcloud.ssh(self.node.record.node, worker, words, internal_ip=self._internal))

    def _run(self, argv: Sequence[str]) -> str:
        return self._gcloud.run(argv)

    def _on_all(self, act: Callable[[int], Any]) -> list[Any]:
        """For every worker at once, in a dry run one after the other. Raises the first error."""
        if self._gcloud.dry:
            return [act(worker) for worker in range(self.count)]
        with ThreadPoolExecutor(max_workers=max(self.count, 1)) as pool:
            return list(pool.map(act, range(self.count)))


def new_token() -> str:
    """For the ids of the starts of a launch."""
    return secrets.token_hex(4)
