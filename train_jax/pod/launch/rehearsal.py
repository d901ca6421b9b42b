"""The hosts of a pod as processes of this machine, with virtual CPU devices, connected over loopback.

Each process gets the command line that a worker gets, and the variables that a launch gives a worker.
"""

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
from collections.abc import Callable, Sequence
from typing import NamedTuple

from train_jax.errors import UserError
from train_jax.pod.launch.view import View
from train_jax.runtime.cluster import VARIABLES
from train_jax.runtime.supervisor import PIPE

_STEP = re.compile(r"step +(\d+)")
"""The beginning of the lines in which the first process reports how far it is."""
KILL_SECONDS = 60.0
"""Processes that are still there so long after the rehearsal was interrupted are killed."""


class Shape(NamedTuple):
    """Hosts, and devices of each."""

    hosts: int
    devices: int

    @staticmethod
    def parse(text: str) -> Shape:
        """Reads `8x4`. Raises `UserError` for another text."""
        match = re.fullmatch(r"([1-9]\d{0,2})x([1-9]\d{0,2})", text)
        if match is None:
            raise UserError(f"--rehearse {text}: expected hosts x devices of each, such as 8x4")
        return Shape(int(match[1]), int(match[2]))


class Fault(NamedTuple):
    """A signal for one host when the run has reached a step."""

    number: signal.Signals
    host: int
    step: int

    @staticmethod
    def parse(option: str, text: str, number: signal.Signals, hosts: int) -> Fault:
        """Reads `HOST@STEP`, such as 3@20. Raises `UserError` for another text, or a host that does not exist."""
        match = re.fullmatch(r"(\d{1,3})@(\d{1,9})", text)
        if match is None or int(match[1]) >= hosts:
            raise UserError(f"{option} {text}: expected HOST@STEP with a host from 0 to {hosts - 1}, such as 1@20")
        return Fault(number, int(match[1]), int(match[2]))


def process_variables(address: str, count: int, host: int) -> dict[str, str]:
    """The environment variables that make a process one of several; none for a single one."""
    return dict(zip(VARIABLES, (address, str(count), str(host)), strict=True)) if count > 1 else {}


class LocalHosts:
    """Processes of this machine in the place of hosts. A context that leaves no process behind."""

    deadline: float | None = None

    def __init__(self, shape: Shape, command: Sequence[str], view: View, faults: Sequence[Fault] = ()):
        """`command`: a stage of `trm` with its arguments, or `bash` with a script."""
        self.count = shape.hosts
        self.faults = list(faults)
        """Those that have not happened yet."""
        self._devices, self._view = shape.devices, view
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
        """Reads the signs of life of all processes, so that the pipe never is full."""
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


def rehearsal(shape: str, command: Sequence[str], view: View, *, preempt: str = "", kill: str = "") -> LocalHosts:
    """The hosts of `--rehearse SHAPE`, with the faults of `--preempt` and `--kill`. Raises `UserError`."""
    parsed = Shape.parse(shape)
    faults = [
        Fault.parse(option, text, number, parsed.hosts)
        for option, text, number in (("--preempt", preempt, signal.SIGTERM), ("--kill", kill, signal.SIGKILL))
        if text
    ]
    return LocalHosts(parsed, command, view, faults)
