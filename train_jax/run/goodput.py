"""Goodput: the share of a run's wall time in steps that count, and what the rest was, from the run's folder alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from train_jax.run.events import read_events
from train_jax.run.folder import RunFolder
from train_jax.runtime.clock import KINDS

LOST, DOWN = "lost steps", "down"
PARTS = (*KINDS, LOST, DOWN)
"""`KINDS` of `train_jax.runtime.clock`; `LOST`: steps that a later session computed again, with their waits for
data; `DOWN`: between sessions, with those that ended before they opened the run's folder."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """The wall time of a run from its first start to its last sign of life."""

    seconds: dict[str, float]
    """By part, those without any left out."""
    wall_seconds: float
    sessions: int
    lost_steps: int

    @property
    def share(self) -> float:
        return self.seconds.get("steps", 0.0) / self.wall_seconds if self.wall_seconds > 0 else 0.0

    def line(self) -> str:
        """Such as `goodput 87.4 % of 124 s: start 5.1 %, compile 4.0 %, saving 0.3 %`, largest part first."""
        rest = sorted(((value, part) for part, value in self.seconds.items() if part != "steps"), reverse=True)
        wall = self.wall_seconds or 1.0
        shown = [f"{part} {100 * value / wall:.1f} %" for value, part in rest if value >= 0.0005 * wall]
        text = f"goodput {100 * self.share:.1f} % of {self.wall_seconds:,.0f} s"
        return f"{text}: {', '.join(shown)}" if shown else text


def read_goodput(folder: RunFolder) -> Goodput | None:
    """None for a run without events: of an older version, or not started."""
    return goodput_of(read_events(folder))


def goodput_of(events: Sequence[dict[str, Any]]) -> Goodput | None:
    sessions = [list(group) for _, group in itertools.groupby(events, lambda event: event["session"])]
    sessions = [session for session in sessions if session[0]["event"] == "start"]
    if not sessions:
        return None
    seconds = dict.fromkeys(PARTS, 0.0)
    lost_steps, counted, later_start = 0, math.inf, math.inf
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
    lost_steps, step = 0, None  # before it continues from a step, nothing can be lost
    for event in session:
        after: Any = event.get("step", step)
        spent = event.get("seconds", {})
        lost = 0.0
        if step is not None and after > step and after > counted:
            lost = (after - max(step, counted)) / (after - step)
            lost_steps += int(after - max(step, counted))
        elif step is not None and step > counted:
            lost = 1.0  # of a step that had not ended
        for kind, value in spent.items():
            share = lost if kind in ("steps", "data") else 0.0
            seconds[kind] += value * (1 - share)
            seconds[LOST] += value * share
        step = after if event["event"] != "start" else None
    return lost_steps
