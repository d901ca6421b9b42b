"""The life of a run on several hosts: it is started on all of them, followed, and restarted after a preemption or a
lost host; and its rehearsal, with processes of this machine instead of hosts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from train_jax.errors import PreemptedError, UserError
from train_jax.runtime.cluster import VARIABLES
from train_jax.runtime.endings import TIME_OUT, ending
from train_jax.runtime.supervisor import PIPE

WAIT_SECONDS = 5.0
"""Seconds before a restart: longer than the other processes of a run need to notice that one died."""
STOP_SECONDS = 300.0
"""Seconds that a run may take to save after it was told to stop."""
KILL_SECONDS = 60.0
"""Seconds after an interruption of the rehearsal until the remaining processes are killed."""
_STEP = re.compile(r"step +(\d+)")
"""Pattern of the lines in which the first process reports its step."""


class View:
    """Writes the log lines of all hosts, each with its host, and the messages of the launcher, from several threads."""

    def __init__(self, write: Callable[[str], None]):
        """`write` gets whole lines without the line end."""
        self._write = write
        self._lock = threading.Lock()

    def line(self, host: int, text: str) -> None:
        """Writes a line of the log of a host."""
        with self._lock:
            self._write(f"host {host} | {text}")

    def say(self, text: str) -> None:
        """Writes a message of the launcher."""
        with self._lock:
            self._write(f"launch | {text}")


class Hosts(Protocol):
    """The hosts of a run: processes of this machine, or the workers of a TPU."""

    count: int

    @property
    def deadline(self) -> float | None:
        """Time at which the run is stopped, in seconds of the epoch; known after the first start."""

    def start(self) -> None:
        """Starts the run on every host, on new machines if the old ones are gone."""

    def follow(self, host: int, line: Callable[[str], None]) -> int | None:
        """Calls `line` with every line of the log; returns the exit status, None for a host that is gone."""

    def stop(self) -> None:
        """Sends SIGTERM to the run on every host."""

    def stops(self) -> bool:
        """Returns whether somebody asked the run to stop, so that it is not started again."""
        ...


class RunEnd(NamedTuple):
    """The common result of the processes of a run."""

    status: int
    """The exit status of the run as a whole."""
    again: bool
    """True if another start would continue the run."""
    text: str


def end_of(statuses: Sequence[int | None]) -> RunEnd:
    """Returns the end of a run for the exit statuses of all hosts; None is the status of a host that is gone.

    A host that ended with an error of its own decides, because the others then end as lost processes.
    """
    texts = ["gone" if status is None else ending(status).text for status in statuses]
    text = ", ".join(f"{count} of {len(statuses)} {what}" for what, count in Counter(texts).items())
    known = [status for status in statuses if status is not None]
    errors = [status for status in known if status and not ending(status).launch_restarts]
    if errors:
        return RunEnd(errors[0], False, text)
    if len(known) == len(statuses) and not any(known):
        return RunEnd(0, False, text)
    preempted = PreemptedError.STATUS in known or None in statuses
    return RunEnd(PreemptedError.STATUS if preempted else max(known), True, text)


def run_to_end(hosts: Hosts, view: View, restarts: int) -> int:
    """Runs the command, and restarts it while that can help; returns its exit status.

    A run that is stopped at its deadline has the status `TIME_OUT`.
    """
    for restart in range(restarts + 1):
        hosts.start()
        end = follow_to_end(hosts, view)
        if not end.again:
            view.say(end.text)
            return end.status
        if hosts.stops():
            view.say(f"{end.text}; stopped as asked, the same command continues the run")
            return end.status
        if restart < restarts:
            view.say(f"{end.text}; restart {restart + 1} of {restarts}")
            time.sleep(WAIT_SECONDS)
    view.say(f"{end.text}; it was restarted {restarts} times, which is what --restarts allows")
    return end.status


def follow_to_end(hosts: Hosts, view: View) -> RunEnd:
    """Shows the logs of all hosts until all have ended. Stops a run after its deadline, with a limit on the wait."""
    statuses: dict[int, int | None] = {}

    def follow(host: int) -> None:
        statuses[host] = hosts.follow(host, lambda text: view.line(host, text))

    threads = [threading.Thread(target=follow, args=(host,), daemon=True) for host in range(hosts.count)]
    for thread in threads:
        thread.start()
    if not _ended(threads, hosts.deadline):
        view.say("--max-hours has passed: stopping the run")
        hosts.stop()
        _ended(threads, time.time() + STOP_SECONDS)
        return RunEnd(TIME_OUT, False, ending(TIME_OUT).text)
    return end_of([statuses.get(host) for host in range(hosts.count)])


def _ended(threads: Sequence[threading.Thread], deadline: float | None) -> bool:
    """Waits for the threads, in short intervals so that signals are handled; returns whether they ended in time."""
    while any(thread.is_alive() for thread in threads):
        if deadline is not None and time.time() > deadline:
            return False
        for thread in threads:
            thread.join(0.05 if thread.is_alive() else 0)
    return True


# ---- rehearsals


class Fault(NamedTuple):
    """A signal that one host gets when the run has reached a step."""

    number: signal.Signals
    host: int
    step: int


def rehearsal(shape: str, command: Sequence[str], view: View, *, preempt: str = "", kill: str = "") -> LocalHosts:
    """Returns the hosts of `--rehearse 8x4`, with the faults of `--preempt` and `--kill`, such as 3@20.

    Raises `UserError` for another text, and for a host that does not exist.
    """
    match = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,2})", shape)
    if match is None:
        raise UserError(f"--rehearse {shape}: expected hosts x devices of each, such as 8x4")
    hosts = int(match[1])
    devices = int(match[2])
    faults = []
    for option, text, number in (("--preempt", preempt, signal.SIGTERM), ("--kill", kill, signal.SIGKILL)):
        match = re.fullmatch(r"(\d{1,3})@(\d{1,9})", text)
        if match and int(match[1]) < hosts:
            faults.append(Fault(number, int(match[1]), int(match[2])))
        elif text:
            raise UserError(f"{option} {text}: expected HOST@STEP with a host from 0 to {hosts - 1}, such as 1@20")
    return LocalHosts(hosts, devices, command, view, faults)


def process_variables(address: str, count: int, host: int) -> dict[str, str]:
    """Returns the environment variables that make a process one of several; none for a single one."""
    return dict(zip(VARIABLES, (address, str(count), str(host)), strict=True)) if count > 1 else {}


class LocalHosts:
    """Processes of this machine with virtual CPU devices, connected over loopback, instead of hosts.

    Each process gets the command line that a worker gets, and the variables that a launch gives a worker. A context
    that leaves no process behind.
    """

    deadline: float | None = None

    def __init__(self, hosts: int, devices: int, command: Sequence[str], view: View, faults: list[Fault]):
        """`devices` of each host; `command` is a stage of `trm` with its arguments, or `bash` with a script."""
        self.count = hosts
        self.faults = faults
        """Faults that have not happened yet."""
        self._devices = devices
        self._view = view
        self._command = [sys.executable, "-m", "train_jax", *command] if command[0] != "bash" else list(command)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False
        self._lifeline, self._write = os.pipe()
        threading.Thread(target=self._drain, daemon=True).start()

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._processes = [self._started(host, address) for host in range(self.count)]

    def _started(self, host: int, address: str) -> subprocess.Popen[bytes]:
        environment = {
            **{name: value for name, value in os.environ.items() if name not in VARIABLES},
            **process_variables(address, self.count, host),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={self._devices}",
            PIPE: str(self._write),  # `trm train` ends when this process does, whatever ends it
        }
        return subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[self._write],
            start_new_session=True,  # the terminal's Ctrl-C is for this process, which stops the others
        )

    def follow(self, host: int, line: Callable[[str], None]) -> int | None:
        process = self._processes[host]
        assert process.stdout is not None
        for raw in process.stdout:
            text = raw.decode(errors="backslashreplace").rstrip("\r\n")
            line(text)
            if host == 0 and (match := _STEP.match(text)):
                self._reached(int(match[1]))
        status = process.wait()
        return status if status >= 0 else 128 - status

    def _reached(self, step: int) -> None:
        for fault in [each for each in self.faults if each.step <= step]:
            self.faults.remove(fault)
            self._view.say(f"{fault.number.name} to host {fault.host}")
            self._send(self._processes[fault.host], fault.number)

    def stop(self) -> None:
        self._stopping = True
        for process in self._processes:
            self._send(process, signal.SIGTERM)

    def stops(self) -> bool:
        return self._stopping

    def _send(self, process: subprocess.Popen[bytes], number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, number)

    def _drain(self) -> None:
        """Reads the signs of life of all processes, so that the pipe is never full."""
        with contextlib.suppress(OSError):
            while os.read(self._lifeline, 1 << 12):
                pass

    def __enter__(self) -> LocalHosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        until = time.monotonic() + KILL_SECONDS
        while any(process.poll() is None for process in self._processes) and time.monotonic() < until:
            time.sleep(0.05)
        for process in self._processes:
            self._send(process, signal.SIGKILL)
            process.wait()
        os.close(self._write)
