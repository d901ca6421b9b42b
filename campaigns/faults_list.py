"""The faults of the campaign `campaigns.faults`, what is expected of each, and their table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from campaigns.faults_runs import STEPS, Run

Part = Literal["kills", "terms", "terms4", "lost", "late"]
PHASES = {"compiling": 1, "training": 60, "saving": 6, "evaluating": 3, "restoring": 1, "exporting": 1}
"""Number of times that each phase begins in a run."""
LONGEST_SECONDS = {
    "compiling": 3.0,
    "training": 0.02,
    "saving": 0.3,
    "evaluating": 0.3,
    "restoring": 0.5,
    "exporting": 6,
}
"""Seconds after the beginning of each phase within which the fault happens, at a random moment."""
LATE_SECONDS = 90
LATE = f"{LATE_SECONDS} s late"
"""A fault without a signal: the process compiles for this much longer than the others."""


@dataclasses.dataclass
class Fault:
    """One fault and what it cost."""

    name: str
    phase: str
    processes: int
    victim: int
    signal: str
    statuses: list[int | None] = dataclasses.field(default_factory=list)
    stop_seconds: float = 0.0
    """Seconds from the signal until the last of the other processes had ended."""
    lost_steps: int = 0
    recovery_seconds: float = 0.0
    """Seconds from the start of the next process until it begins the step after the last one before the fault."""
    drift: float = 0.0
    """Largest difference of the weights that are learned on other numbers of devices, relative to the largest entry of
    the array.
    """
    problems: list[str] = dataclasses.field(default_factory=list)


def problems_of(fault: Fault, run: Run, stopped_at: int) -> list[str]:
    """Returns the problems with the way in which the processes ended."""
    others = [status for index, status in enumerate(fault.statuses) if index != fault.victim]
    texts = [run.text(index) for index in range(fault.processes)]
    problems = []
    if fault.signal == "SIGTERM" and fault.phase != "exporting":
        finished = stopped_at == STEPS and set(fault.statuses) == {0}  # the rest took less than three seconds
        if set(fault.statuses) != {75} and not finished:
            problems.append(f"statuses {fault.statuses}, expected 75")
        if fault.stop_seconds > 10:
            problems.append(f"stopped after {fault.stop_seconds:.1f} s")
        saved = f"saved after step {stopped_at}" if stopped_at else "before the first step"
        later = f"saved after step {stopped_at + 1}"
        if not finished and not all(saved in text or later in text for text in texts):
            problems.append(f"not saved at step {stopped_at}")
    if fault.name.startswith("lost"):
        if set(others) != {69}:
            problems.append(f"statuses {others}, expected 69")
        if fault.stop_seconds > 30:
            problems.append(f"stopped after {fault.stop_seconds:.1f} s")
        named = [f"trm: process {fault.victim} on " in text for i, text in enumerate(texts) if i != fault.victim]
        if not all(named):
            problems.append("an error does not name the process")
    return problems


def faults(part: Part, count: int) -> list[Fault]:
    """Returns the faults of one part of the campaign."""
    phases = list(PHASES)
    if part == "kills":
        return [Fault(f"kill{n}", phases[n % 6], 1, 0, "SIGKILL") for n in range(count)]
    if part == "terms":
        return [Fault(f"term{n}", phases[n % 6], 1, 0, "SIGTERM") for n in range(count * 3 // 5)]
    if part == "terms4":
        return [Fault(f"term4-{n}", phases[n % 5], 4, n * 3 % 4, "SIGTERM") for n in range(count * 2 // 5)]
    if part == "late":
        return [Fault(f"late-{victim}", "compiling", 4, victim, LATE) for victim in (2, 0)]
    cases = [(victim, name) for name in ("SIGKILL", "SIGSTOP") for victim in (2, 0)]
    return [Fault(f"lost-{name}-{victim}", "training", 4, victim, name) for victim, name in cases]


def table(results: Sequence[Fault]) -> str:
    """Returns the table of `docs/reliability.md`."""
    lines = [
        "| fault | phase | faults | continued exactly | stopped after, s | steps lost | recovered after, s |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Fault]] = {}
    for fault in results:
        kind = f"{fault.signal}{':' if fault.signal == LATE else ' to'} 1 of {fault.processes}"
        kind += f" (process {fault.victim})" if fault.name.startswith(("lost", "late")) else ""
        groups.setdefault((kind, fault.phase), []).append(fault)
    for (kind, phase), group in groups.items():

        def span(name: str, digits: int = 1, group: list[Fault] = group) -> str:
            values = sorted(float(getattr(fault, name)) for fault in group)
            low = f"{values[0]:.{digits}f}"
            high = f"{values[-1]:.{digits}f}"
            return low if low == high else f"{low} to {high}"

        exact = sum(not fault.problems for fault in group)
        figures = [span("stop_seconds"), span("lost_steps", 0), span("recovery_seconds")]
        lines.append(f"| {kind} | {phase} | {len(group)} | {exact} | {' | '.join(figures)} |")
    return "\n".join(lines)
