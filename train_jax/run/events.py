"""Records how a run spends its wall time, so that this is known after any kill: events.jsonl and heartbeat.json.

A process that trains appends to events.jsonl when it starts, continues, logs, and ends. Between these lines, a thread
writes what has been spent since the last one to heartbeat.json, every second; a later session appends the
heartbeat of a killed one. In `gs://`, the events are uploaded before every heartbeat. `read_goodput` computes
from both the share of the time that went into steps that count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from train_jax.errors import PreemptedError, UserError
from train_jax.run.folder import RunFolder, write_text
from train_jax.runtime.clock import KINDS, Clock
from train_jax.storage.cache import continued_file, upload_working_file
from train_jax.storage.json_files import COUNT, FINITE, TEXT, Kind, find_object, misfit, optional
from train_jax.storage.lease import LostFolderError, check_writer
from train_jax.storage.lines import LineFile, read_lines
from train_jax.storage.storage import is_remote

HEARTBEAT_SECONDS = 1.0
REMOTE_HEARTBEAT_SECONDS = 20.0
"""Seconds between heartbeats in `gs://`, where each one is a request."""


class Events:
    """The events of one session; a process that does not write the run's files gives no folder."""

    def __init__(self, folder: RunFolder | None, clock: Clock, *, total_steps: int):
        self.clock = clock
        self._folder = folder
        self._ended = threading.Event()
        self._lock = threading.RLock()  # SIGTERM may end the run in another thread
        self._lost: LostFolderError | None = None
        if folder is None:
            return
        self._file = LineFile(continued_file(folder.events))
        last = _finish_killed(folder, self._file)
        self.session = last + 1
        self._write("start", time=clock.since, pid=os.getpid(), total_steps=total_steps)
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def continues(self, step: int) -> None:
        """Records that the session continues from this step and computes later ones again."""
        self.clock.dispatched(step)
        self._spent("continue")

    def progress(self) -> None:
        self._spent("progress")

    def check(self) -> None:
        """Raises `LostFolderError` if a heartbeat found that this process no longer writes the folder."""
        if self._lost is not None:
            raise self._lost

    def end(self, reason: str) -> None:
        """Writes the last event; calls after the first one do nothing."""
        with self._lock:
            if reason and not self._ended.is_set():
                self._spent("end", reason=reason)
                self._ended.set()

    def _spent(self, event: str, **more: Any) -> None:
        with self._lock:
            if self._folder is None or self._ended.is_set():
                return
            time, _, seconds = self.clock.spent(take=True)
            self._write(event, time=time, step=self.clock.step, seconds=seconds, **more)

    def _write(self, event: str, **fields: Any) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop a run, which this file only describes
            self._file.write({"event": event, "session": self.session, **fields})

    def _beat(self) -> None:
        assert self._folder is not None
        while True:
            with self._lock:
                beat = json.dumps(self._beat_now())
            try:
                check_writer(self._folder.path)
                upload_working_file(self._folder.events)  # the heartbeat counts from the last event
                write_text(self._folder.heartbeat, beat, durable=False)
            except LostFolderError as error:
                self._lost = error
                return
            except Exception:  # a file that cannot be written now may be written later
                pass
            if self._ended.wait(REMOTE_HEARTBEAT_SECONDS if is_remote(self._folder.path) else HEARTBEAT_SECONDS):
                return

    def _beat_now(self) -> dict[str, Any]:
        clock = self.clock
        time, kind, seconds = clock.spent()
        return {
            "session": self.session, "time": time, "kind": kind, "step": clock.step, "step_time": clock.step_time,
            "seconds": seconds,
        }  # fmt: skip

    @contextlib.contextmanager
    def recorded(self) -> Iterator[Events]:
        """Writes how the session ended, after the block."""
        reason = "interrupted"
        try:
            yield self
            reason = "finished"
        except PreemptedError:
            reason = "preempted"
            raise
        except UserError as error:
            reason = f"error: {error}"
            raise
        except Exception as error:  # its text may contain anything, and is in the log of the process
            reason = f"error: {type(error).__name__}"
            raise
        finally:
            self.end(reason)
            if self._folder is not None:
                self._thread.join()
                self._file.close()


def read_events(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns the events of all sessions, and the heartbeat of a session that runs or was killed."""
    events = _written(folder)
    last = events[-1] if events else None
    beat = read_heartbeat(folder)
    if last is None or beat is None or last["event"] in _LAST or last["session"] != beat["session"]:
        return events
    killed = {"event": "killed", **{name: beat[name] for name in ("session", "time", "step", "seconds")}}
    return [*events, killed] if beat["time"] > last["time"] else events


SECONDS = Kind(
    "seconds by kind",
    lambda value: isinstance(value, dict) and value.keys() <= set(KINDS) and all(map(FINITE.fits, value.values())),
)
_LATER = {"session": COUNT, "time": FINITE, "step": COUNT, "seconds": SECONDS}
_HEARTBEAT = _LATER | {"kind": TEXT, "step_time": FINITE}
_FIELDS = {
    "start": {"session": COUNT, "time": FINITE, "total_steps": optional(COUNT)},
    "continue": _LATER,
    "progress": _LATER,
    "end": _LATER | {"reason": TEXT},
    "killed": _LATER,
}
"""Fields of each event."""


def _is_event(record: Any) -> bool:
    if misfit(record, {"event": TEXT}):
        return False
    fields = _FIELDS.get(record["event"])
    return fields is not None and not misfit(record, fields)


EVENT = Kind("an event", _is_event)


def read_heartbeat(folder: RunFolder) -> dict[str, Any] | None:
    """Returns the last sign of life of a run that trains or was killed; None if there is none, or it is damaged."""
    with contextlib.suppress(UserError):
        return find_object(folder.heartbeat, _HEARTBEAT, remedy="")
    return None


def _written(folder: RunFolder) -> list[dict[str, Any]]:
    return read_lines(folder.events, EVENT)


_LAST = ("end", "killed")


def _finish_killed(folder: RunFolder, file: LineFile) -> int:
    """Appends the last event of a session that was killed; returns the number of the last session, 0 for none."""
    events = read_events(folder)
    for event in events[len(_written(folder)) :]:
        with contextlib.suppress(OSError):
            file.write(event)
    return max((event["session"] for event in events), default=0)


LOST = "lost steps"
DOWN = "down"
PARTS = (*KINDS, LOST, DOWN)
"""Parts of the wall time: `KINDS` of `train_jax.runtime.clock`; `LOST`: steps that a later session computed again, with
their waits for data; `DOWN`: time between sessions, with sessions that ended before they opened the run's folder."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The wall time of a run from its first start to its last sign of life."""

    seconds: dict[str, float]
    """Seconds by part, without empty parts."""
    wall_seconds: float
    sessions: int
    lost_steps: int

    @property
    def share(self) -> float:
        return self.seconds.get("steps", 0.0) / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def line(self) -> str:
        """Returns a line such as `goodput 87.4 % of 124 s: start 5.1 %, saving 0.3 %`, largest part first."""
        rest = sorted(((value, part) for part, value in self.seconds.items() if part != "steps"), reverse=True)
        wall = self.wall_seconds or 1.0
        shown = [f"{part} {100 * value / wall:.1f} %" for value, part in rest if value >= 0.0005 * wall]
        text = f"goodput {100 * self.share:.1f} % of {self.wall_seconds:,.0f} s"
        return f"{text}: {', '.join(shown)}" if shown else text


def read_goodput(folder: RunFolder) -> Goodput | None:
    """Returns the goodput of a run; None without events, for a run of an older version or one that was not started."""
    return goodput_of(read_events(folder))


def goodput_of(events: Sequence[dict[str, Any]]) -> Goodput | None:
    sessions = [list(group) for _, group in itertools.groupby(events, lambda event: event["session"])]
    sessions = [session for session in sessions if session[0]["event"] == "start"]
    if not sessions:
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    lost_steps = 0
    counted = math.inf
    later_start = math.inf
    for session in reversed(sessions):
        seconds[DOWN] += max(0.0, later_start - session[-1]["time"]) if later_start < math.inf else 0.0
        lost_steps += _add_session(seconds, session, counted)
        counted = min([counted, *(event["step"] for event in session if event["event"] == "continue")])
        later_start = session[0]["time"]
    seconds = {part: value for part, value in seconds.items() if value > 0}
    times = [event["time"] for session in sessions for event in session]  # a clock may have been set back
    return Goodput(seconds, max(times) - min(times), len(sessions), lost_steps)


def _add_session(seconds: dict[str, float], session: list[dict[str, Any]], counted: float) -> int:
    """Adds the seconds of one session, of which the steps up to `counted` count; returns the number of the others."""
    # before it continues from a step, nothing can be lost
    lost_steps = 0
    step = None
    for event in session:
        after: Any = event.get("step", step)
        spent = event.get("seconds", {})
        lost = 0.0
        if step is not None and after > step and after > counted:
            lost = (after - max(step, counted)) / (after - step)
            lost_steps += int(after - max(step, counted))
        elif step is not None and step > counted:
            lost = 1.0  # the time of a step that had not ended
        for kind, value in spent.items():
            share = lost if kind in ("steps", "data") else 0.0
            seconds[kind] += value * (1 - share)
            seconds[LOST] += value * share
        step = after if event["event"] != "start" else None
    return lost_steps
