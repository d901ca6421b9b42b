"""`trm train --restarts N`: starts a run again after a crash, in a new process.

It does not start it again after a mistake of the user, after the end of the run, or after SIGTERM, since the machine
goes away. With several processes each one has its own supervisor: one that dies makes the others end, and all start
again.

The run's process reports to its supervisor through a pipe, every second, that it is alive; a frozen one is killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from train_jax.errors import PreemptedError, UserError
from train_jax.runtime.endings import ending

PIPE = "TRM_SUPERVISOR_PIPE"
"""Environment variable of the run's process: the file descriptor to write to."""
BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
FIRST_WAIT_SECONDS = 5.0
"""Seconds before the first restart; each further restart without progress waits twice as long. Longer than the other
processes of a run need to notice that one died: until then, the coordinator is not the new one."""
LONGEST_WAIT_SECONDS = 300.0
RESTARTS_WITHOUT_PROGRESS = 3


# ---- the run's process


class _Lifeline:
    pipe: int | None = None


def connect_to_supervisor() -> None:
    """Starts to report to the supervisor, if there is one, that this process is alive."""
    number = os.environ.pop(PIPE, "")
    if number:
        _Lifeline.pipe = int(number)
        os.set_inheritable(_Lifeline.pipe, False)
        threading.Thread(target=_beat, name="supervisor", daemon=True).start()


def report_start(step: int) -> None:
    """Tells the supervisor the step that this process continues from."""
    _tell(f"{step}\n")


def _beat() -> None:
    while _tell("\n"):
        time.sleep(BEAT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)  # a run without its supervisor would hold the folder, and nobody would know


def _tell(line: str) -> bool:
    if _Lifeline.pipe is None:
        return True
    try:
        os.write(_Lifeline.pipe, line.encode())
    except OSError:
        return False
    return True


# ---- the supervisor


def restarts_option(argv: Sequence[str]) -> tuple[int, list[str]]:
    """Returns the value of `--restarts`, by default 0, and the other arguments. Raises `UserError` for a wrong one."""
    rest = list(argv)
    value = None
    for index, word in enumerate(argv):
        name, equals, after = word.partition("=")
        if name == "--restarts":
            value = after if equals else "".join(argv[index + 1 : index + 2])
            del rest[index : index + (1 if equals else 2)]
            break
    if value is None:
        return 0, rest
    if not value.isdecimal():
        raise UserError(f"--restarts {value or 'without a value'}: expected a number of restarts, such as 10")
    return int(value), rest


class Supervisor:
    """Runs a command again until another restart would not change its end."""

    def __init__(self, command: Sequence[str], restarts: int, say: Callable[[str], None], wait_scale: float = 1.0):
        self._command = command
        self._restarts = restarts
        self._say = say
        self._wait_scale = wait_scale
        self._process: subprocess.Popen | None = None
        self._stopped = threading.Event()
        self._step: int | None = None
        self._without_progress = 0

    def run(self) -> int:
        """Returns the exit status. Call it in the main thread: SIGTERM and SIGINT are left to the run's process."""
        before: dict[int, Any] = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._forward),
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: self._stopped.set()),  # the terminal sends it to all
        }
        try:
            return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        for restart in range(self._restarts + 1):
            status, what = self._once()
            if self._stopped.is_set():
                return PreemptedError.STATUS if status == 128 + signal.SIGTERM else status
            if not ending(status).supervisor_restarts:
                return status
            if restart == self._restarts:
                self._say(f"the run {what}; it was restarted {restart} times, which is what --restarts allows")
            elif self._without_progress >= RESTARTS_WITHOUT_PROGRESS:
                self._say(
                    f"the run {what}; {self._without_progress} restarts in a row made no progress beyond step "
                    f"{self._step or 0}, so it is not restarted again"
                )
                return status
            else:
                seconds = min(FIRST_WAIT_SECONDS * 2**self._without_progress, LONGEST_WAIT_SECONDS)
                self._say(f"the run {what}; restart {restart + 1} of {self._restarts} in {seconds:.0f} s")
                if self._stopped.wait(seconds * self._wait_scale):
                    return PreemptedError.STATUS
        return status

    def _once(self) -> tuple[int, str]:
        """Runs one process; returns its exit status, 128 and more for signals, and a description of its end."""
        read, write = os.pipe()
        environment = os.environ | {PIPE: str(write)}
        self._process = subprocess.Popen(self._command, env=environment, pass_fds=[write])
        os.close(write)
        frozen = self._attend(self._process, read)
        os.close(read)
        status = self._process.wait()
        if frozen:
            return 128 + signal.SIGKILL, f"sent no sign of life for {SILENCE_SECONDS:.0f} s and was killed"
        if status < 0:
            return 128 - status, f"was killed by {signal.Signals(-status).name}"
        return status, f"ended with status {status}"

    def _attend(self, process: subprocess.Popen, pipe: int) -> bool:
        """Waits until the process ends; returns whether it was killed because it gave no sign of life."""
        reader = _Reader(pipe)
        heard = None
        begun = False
        while process.poll() is None:
            asleep = time.monotonic()
            for line in reader.lines(BEAT_SECONDS):
                heard = time.monotonic()
                if line and not begun:
                    begun = True
                    self._note_start(int(line))
            if heard is not None and time.monotonic() - asleep > 2 * BEAT_SECONDS:
                heard = time.monotonic()  # this process itself was stopped
            if heard is not None and time.monotonic() - heard > SILENCE_SECONDS:
                process.kill()
                return True
        if not begun:
            self._without_progress += 1
        return False

    def _note_start(self, step: int) -> None:
        self._without_progress = 0 if self._step is None or step > self._step else self._without_progress + 1
        self._step = step

    def _forward(self, number: int, _frame: Any) -> None:
        self._stopped.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


class _Reader:
    """Reads lines from a pipe."""

    def __init__(self, pipe: int):
        self._pipe = pipe
        self._rest = b""

    def lines(self, timeout_seconds: float) -> list[bytes]:
        """Returns the complete lines; waits for some up to the timeout."""
        if not select.select([self._pipe], [], [], timeout_seconds)[0]:
            return []
        data = os.read(self._pipe, 1 << 12)
        if not data:  # closed: the process is about to end
            time.sleep(min(timeout_seconds, 0.1))
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines


def supervise(argv: Sequence[str], restarts: int) -> int:
    """Runs `trm train` with these arguments under a supervisor; returns the exit status."""

    def say(line: str) -> None:
        sys.stderr.write(f"trm: {line}\n")

    return Supervisor([sys.executable, "-m", "train_jax", "train", *argv], restarts, say).run()
