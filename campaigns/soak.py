"""A soak: runs of the tiny preset on 8 rehearsed hosts of this machine take one random fault after the other.

    python -m campaigns.soak [--count 100] [--folder /tmp/soak] [--results campaigns/soak.jsonl]

A run is killed (SIGKILL to one host), frozen (SIGSTOP) or given notice (SIGTERM) at a random moment of a random phase,
and started again, until it finishes between two faults; then the next run begins. Every finished run is compared with a
run that was never disturbed: weights, EMA, optimizer state and carry, bit for bit. A run that ends on its own, as when
the machine is so busy that a process does not answer, is started again as `trm launch` would, and counted. Started
again with the same files, the soak goes on where it stopped, after which the run in progress has one interruption more.
`results` has a line for each fault, each finished run and each end without a fault; the tables of
`docs/reliability.md` are printed from it.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from campaigns.faults import Disturber
from campaigns.faults_list import LONGEST_SECONDS, Fault
from campaigns.faults_runs import EndedError, Run, differences
from train_jax.pods.launch.life import RunEnd, end_of

SIGNALS = {"SIGKILL": "kill", "SIGSTOP": "freeze", "SIGTERM": "notice"}
TIMES = {"restoring": 1, "compiling": 1, "training": 30, "saving": 3, "evaluating": 1}
"""A fault waits for the beginning of its phase, a random one of the first so many since the start, and for a random
time after that."""
END_SECONDS = 180.0
"""The longest that hosts which are not frozen may take to end after a fault, on a machine that others share."""


@dataclasses.dataclass(frozen=True)
class Soak:
    """Run faults until there are so many, in parts if it is interrupted, and print their table."""

    count: int = 100
    """Number of faults, those of earlier calls included."""
    hosts: int = 8
    """Number of hosts: processes with one device each."""
    folder: str = "/tmp/soak"
    """Folder of the runs."""
    results: str = "campaigns/soak.jsonl"
    """File to which a line is appended for each fault and each finished run."""
    seed: int = 0
    """Seed of the faults."""
    table: bool = False
    """Print the tables of `results` and run nothing."""


@dataclasses.dataclass
class Disturbed(Fault):
    """A fault of a soak; its `problems` are those of how the hosts ended."""

    run: int = 0
    """Number of the run that it disturbed."""
    step: int = 0
    """The last step that the run had begun since its start, 0 for none."""
    ending: str = ""
    """The end of the hosts, in the words of `trm launch`."""


def fault_of(number: int, hosts: int, seed: int) -> tuple[Disturbed, random.Random]:
    """Returns a fault, which its number determines, and the source of its moment."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choice([*SIGNALS])
    phase = rng.choice([*TIMES])
    victim = rng.randrange(hosts)
    return Disturbed(f"fault {number}", phase, hosts, victim, kind), rng


class Soaking:
    """The runs of a soak, one after the other."""

    def __init__(self, config: Soak):
        self._config = config
        self._folder = Path(config.folder)
        self._results = Path(config.results)
        self._disturber = Disturber(self._folder, config.seed, 0)
        self.faults, self.finishes, self.ends = read(self._results)
        self._run = self._next_run()

    def _next_run(self) -> Run:
        path = self._path = self._folder / f"run{len(self.finishes)}"
        return Run(path, self._folder / "data", self._config.hosts)

    def go(self) -> None:
        """Makes the faults that are left, and finishes the last run."""
        reference = self._disturber.reference(self._config.hosts)
        try:
            while len(self.faults) < self._config.count or any(f.run == len(self.finishes) for f in self.faults):
                self._run.start()
                try:
                    if len(self.faults) == self._config.count or not self._disturb():
                        self._finish(reference)
                except EndedError as error:
                    self._ended(error)
        finally:
            self._run.kill()

    def _disturb(self) -> bool:
        """Makes the next fault; returns False if the run finishes before it."""
        fault, rng = fault_of(len(self.faults), self._config.hosts, self._config.seed)
        if not self._run.reaches(fault.phase, rng.randint(1, TIMES[fault.phase])):
            return False
        time.sleep(rng.uniform(0, LONGEST_SECONDS[fault.phase]))
        fault.run = len(self.finishes)
        fault.step = self._run.step()
        began = time.monotonic()
        self._run.send(fault.victim, signal.Signals[fault.signal])
        frozen = {fault.victim} if fault.signal == "SIGSTOP" else set()
        fault.statuses = self._run.wait(END_SECONDS, without=frozen)
        fault.stop_seconds = round(time.monotonic() - began, 1)
        judge(fault)
        self._run.kill()
        for path in self._folder.glob(f"{self._path.name}.*.txt"):  # the next start overwrites them
            shutil.copy(path, self._folder / f"{fault.name.replace(' ', '')}.{path.name}")
        saved = [int(path.name) for path in self._path.glob("checkpoints/*") if path.name.isdigit()]
        fault.lost_steps = max(fault.step - max(saved, default=0), 0)
        self.faults.append(fault)
        self._record(dataclasses.asdict(fault))
        print(described(fault), flush=True)
        return True

    def _ended(self, error: EndedError) -> None:
        """Records an end without a fault. Raises it if a launch would not start the run again."""
        statuses = self._run.wait(END_SECONDS, without=set())
        self._run.kill()
        ending = ending_by(statuses)
        if not ending.again:
            raise error
        self.ends.append(ending.text)
        self._record({"ended": len(self.finishes), "ending": ending.text})
        print(f"run {len(self.finishes)} ended on its own: {ending.text}", flush=True)

    def _finish(self, reference: Path) -> None:
        self._run.finish()
        problems = differences(self._path, reference, metrics=False)
        self._record({"finished": len(self.finishes), "problems": problems})
        print(f"run {len(self.finishes)} finished: {'; '.join(problems) or 'bit for bit as undisturbed'}", flush=True)
        if not problems:
            shutil.rmtree(self._path)
        self.finishes.append(problems)
        self._run = self._next_run()

    def _record(self, line: dict) -> None:
        with self._results.open("a") as file:
            file.write(json.dumps(line) + "\n")


def ending_by(statuses: Sequence[int | None]) -> RunEnd:
    """Returns what `trm launch` makes of the exit statuses of the hosts, where a signal is a negative number."""
    return end_of([status if status is None or status >= 0 else 128 - status for status in statuses])


def judge(fault: Disturbed) -> None:
    """Notes the end of the hosts and its problems: a host that hangs, or a launch that would not start again."""
    ending = ending_by(fault.statuses)
    fault.ending = ending.text
    hanging = [host for host, status in enumerate(fault.statuses) if status is None]
    if hanging and (hanging != [fault.victim] or fault.signal != "SIGSTOP"):
        fault.problems.append(f"hosts {hanging} had not ended after {END_SECONDS:.0f} s")
    if ending.status and not ending.again:
        fault.problems.append("a launch would not start the run again")


def read(path: Path) -> tuple[list[Disturbed], list[list[str]], list[str]]:
    """Returns the faults, what differs in each finished run from the undisturbed one, and the ends without a fault."""
    lines = [json.loads(line) for line in path.open()] if path.exists() else []
    faults = [Disturbed(**line) for line in lines if "name" in line]
    finishes = [line["problems"] for line in lines if "finished" in line]
    return faults, finishes, [line["ending"] for line in lines if "ended" in line]


def described(fault: Disturbed) -> str:
    """One line on a fault."""
    when = f"after step {fault.step}" if fault.step else "before its first step"
    return (
        f"{fault.name}: {SIGNALS[fault.signal]} of host {fault.victim} while {fault.phase}, {when} of run {fault.run}: "
        f"{fault.ending} within {fault.stop_seconds:.1f} s, {fault.lost_steps} steps lost"
        f"{''.join(f'; {problem}' for problem in fault.problems)}"
    )


def tables(faults: Sequence[Disturbed], finishes: Sequence[Sequence[str]], ends: Sequence[str] = ()) -> str:
    """The faults by kind and phase, and the finishes in one line."""

    def outcome(fault: Disturbed) -> str:
        if fault.run >= len(finishes):
            return "not finished"
        return "differs" if fault.problems or finishes[fault.run] else "exact"

    hosts = faults[0].processes if faults else Soak.hosts
    lines = [
        f"| fault of 1 of {hosts} hosts | phase | faults | run finished bit for bit | differs | not finished | "
        "stopped after, s | steps lost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, name in SIGNALS.items():
        for phase in TIMES:
            group = [fault for fault in faults if (fault.signal, fault.phase) == (kind, phase)]
            if group:
                counts = [sum(outcome(f) == text for f in group) for text in ("exact", "differs", "not finished")]
                seconds = sorted(f.stop_seconds for f in group)
                lost = sorted(f.lost_steps for f in group)
                spans = f"{seconds[0]:.1f} to {seconds[-1]:.1f} | {lost[0]} to {lost[-1]}"
                lines.append(f"| {name} | {phase} | {len(group)} | {' | '.join(map(str, counts))} | {spans} |")
    exact = sum(not problems for problems in finishes)
    good = sum(outcome(fault) == "exact" for fault in faults)
    lines.append(
        f"\n{good} of {len(faults)} faults; {exact} of {len(finishes)} finished runs bit for bit; "
        f"{len(ends)} ends without a fault, started again{': ' * bool(ends)}{'; '.join(ends)}."
    )
    return "\n".join(lines)


def main(config: Soak) -> int:
    faults, finishes, ends = read(Path(config.results))
    if not config.table:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the processes of the run end, too
        soaking = Soaking(config)
        soaking.go()
        faults = soaking.faults
        finishes = soaking.finishes
        ends = soaking.ends
    print(f"\n{tables(faults, finishes, ends)}")
    return int(any(fault.problems for fault in faults) or any(finishes))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Soak)))
