"""The life of a run on several hosts: started on all, followed, and started again after a preemption or a lost host."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from train_jax.errors import LostProcessError, PreemptedError, StorageError
from train_jax.pod.launch.view import View

TIME_OUT = 124
"""Exit status of a run that was stopped at `--max-hours`, as `timeout` has it."""
WAIT_SECONDS = 5.0
"""Before a restart: longer than the other processes of a run need to notice that one died."""
STOP_SECONDS = 300.0
"""How long a run that was told to stop may take to save."""

_FINAL = {1, 2, StorageError.STATUS, TIME_OUT, 130, 141}
"""An error that another start would repeat, a mistake of the user, Ctrl-C; without 0."""


class Hosts(Protocol):
    """Where a run is: processes of this machine, or the workers of a TPU."""

    count: int

    @property
    def deadline(self) -> float | None:
        """When the run is stopped, in seconds of the epoch; known after the first start."""
        ...

    def start(self) -> None:
        """Starts the run on every host, on new machines if the old ones are gone."""
        ...

    def follow(self, host: int, line: Callable[[str], None]) -> int | None:
        """Calls `line` with every line of the log; returns the exit status, None for a host that is gone."""
        ...

    def stop(self) -> None:
        """Sends SIGTERM to the run on every host."""
        ...

    def stops(self) -> bool:
        """Whether somebody asked the run to stop, so that it is not started again."""
        ...


class Ending(NamedTuple):
    """How the processes of a run ended."""

    status: int
    """Of the run as a whole."""
    again: bool
    """Whether another start would continue the run."""
    text: str


def ending_of(statuses: Sequence[int | None]) -> Ending:
    """What the exit statuses of all hosts mean; None for a host that is gone.

    A host that ended with an error of its own decides, because the others then end as lost processes.
    """
    counts = Counter(map(_described, statuses))
    text = ", ".join(f"{count} of {len(statuses)} {what}" for what, count in counts.items())
    known = [status for status in statuses if status is not None]
    errors = [status for status in known if status in _FINAL]
    if errors:
        return Ending(errors[0], False, text)
    if len(known) == len(statuses) and not any(known):
        return Ending(0, False, text)
    preempted = PreemptedError.STATUS in known or None in statuses
    return Ending(PreemptedError.STATUS if preempted else max(known), True, text)


def _described(status: int | None) -> str:
    if status is None:
        return "gone"
    if status == PreemptedError.STATUS:
        return "preempted"
    if status == LostProcessError.STATUS:
        return "lost another host"
    if status == TIME_OUT:
        return "stopped at --max-hours"
    if status > 128 and status - 128 in set(signal.Signals):
        return f"killed by {signal.Signals(status - 128).name}"
    return f"ended with status {status}" if status else "finished"


def run_to_end(hosts: Hosts, view: View, restarts: int) -> int:
    """Runs until the command ends in a way that another start would not change; returns its exit status.

    A run that is stopped at its deadline has the status `TIME_OUT`.
    """
    for restart in range(restarts + 1):
        hosts.start()
        if not (ending := follow_to_end(hosts, view)).again:
            view.say(ending.text)
            return ending.status
        if hosts.stops():
            view.say(f"{ending.text}; stopped as asked, the same command continues the run")
            return ending.status
        if restart < restarts:
            view.say(f"{ending.text}; restart {restart + 1} of {restarts}")
            time.sleep(WAIT_SECONDS)
    view.say(f"{ending.text}; it was restarted {restarts} times, which is what --restarts allows")
    return ending.status


def follow_to_end(hosts: Hosts, view: View) -> Ending:
    """Shows the logs of all hosts until all have ended. A run past its deadline is stopped, and not waited for long."""
    statuses: dict[int, int | None] = {}

    def follow(host: int) -> None:
        statuses[host] = hosts.follow(host, lambda text: view.line(host, text))

    threads = [threading.Thread(target=follow, args=(host,), daemon=True) for host in range(hosts.count)]
    for thread in threads:
        thread.start()
    if not _ended(threads, hosts.deadline):
        view.say("--max-hours is over: stopping the run")
        hosts.stop()
        _ended(threads, time.time() + STOP_SECONDS)
        return Ending(TIME_OUT, False, "stopped at --max-hours")
    return ending_of([statuses.get(host) for host in range(hosts.count)])


def _ended(threads: Sequence[threading.Thread], deadline: float | None) -> bool:
    """Waits for the threads, in short turns so that signals are handled; returns whether they ended in time."""
    while any(thread.is_alive() for thread in threads):
        if deadline is not None and time.time() > deadline:
            return False
        for thread in threads:
            thread.join(0.05 if thread.is_alive() else 0)
    return True
