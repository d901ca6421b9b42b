"""A campaign of faults: runs of the tiny preset are killed, preempted or frozen at random moments, and continued.

    python -m campaigns.faults [kills terms terms4 lost late] [--count 50] [--folder /tmp/faults]

Every disturbed run is continued to its end and compared with a run that was never disturbed: weights, EMA, optimizer
state, carry and metrics, bit for bit on the same devices. Started again with the same folder, the campaign continues
where it stopped. It prints a line for each fault and, at the end, the table of `docs/reliability.md`; `results.json` in
the folder has every figure.

- `kills`: SIGKILL at a random moment of each phase in turn
- `terms`, `terms4`: SIGTERM to the only process, or to one of four
- `lost`: one of four processes is killed or frozen, process 0 or another; continued with 4, 2 and 1 processes, the last
  two compared with the undisturbed run after the same change of devices at the same step
- `late`: one of four processes compiles for 90 s longer than the others, which wait for it
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tyro

from campaigns.faults_list import LATE, LATE_SECONDS, LONGEST_SECONDS, PHASES, Fault, Part, faults, problems_of, table
from campaigns.faults_runs import FIELDS, STEPS, Run, differences, largest_difference

PREPARED_STEP = 30
"""Step of the checkpoint that is restored by the runs that are disturbed while they restore."""


@dataclasses.dataclass(frozen=True)
class Campaign:
    """Disturb runs, continue them and compare."""

    parts: tyro.conf.Positional[tuple[Part, ...]] = ("kills", "terms", "terms4", "lost", "late")
    """Parts of the campaign."""
    count: int = 50
    """Folder for runs and results."""
    folder: str = "/tmp/faults"
    """Runs and results."""
    seed: int = 0
    """Seed of the moments at which the faults happen."""


class Disturber:
    """Makes the reference runs once, then one fault after the other."""

    def __init__(self, folder: Path, seed: int, count: int):
        self.folder = folder
        self.seed = seed
        self.count = count
        folder.mkdir(parents=True, exist_ok=True)
        self._results = folder / "results.jsonl"
        self.done = {}
        if self._results.exists():
            self.done = {(r := json.loads(line))["name"]: r for line in self._results.open()}

    def reference(self, processes: int) -> Path:
        """Returns the folder of a run that nobody disturbed; beside it is a copy of its state at `PREPARED_STEP`."""
        path = self.folder / f"reference{processes}"
        data = self.folder / "data"
        if not data.exists():
            sizes = "--size 4 --num-train 64 --num-test 16"
            words = ["build-data", "sudoku", *sizes.split(), "--output-dir", data]
            subprocess.run([sys.executable, "-m", "train_jax", *map(str, words)], check=True, stdout=subprocess.DEVNULL)
        if not (path / "FINISHED").exists():
            shutil.rmtree(path, ignore_errors=True)
            Run(path, data, processes).finish()
        return path

    def prepared(self, name: str, phase: str, processes: int) -> Path:
        """Returns a folder with a run to disturb."""
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        if phase in ("restoring", "exporting"):
            shutil.copytree(self.reference(processes), path)
        if phase == "restoring":
            (path / "FINISHED").unlink()
            for checkpoint in (path / "checkpoints").iterdir():
                if int(checkpoint.name) > PREPARED_STEP:
                    shutil.rmtree(checkpoint)
        return path

    def disturb(self, fault: Fault, seed: int) -> Fault:
        """Makes one fault and continues the run."""
        if fault.name in self.done:
            return Fault(**self.done[fault.name])
        path = self.prepared(fault.name, fault.phase, fault.processes)
        if fault.signal == LATE:
            self._delay(fault, path)
        else:
            self._interrupt(fault, path, random.Random(f"{self.seed} {seed} {fault.name}"))
        with self._results.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(fault)) + "\n")
        if not fault.problems:
            shutil.rmtree(path)
        return fault

    def _delay(self, fault: Fault, path: Path) -> None:
        run = Run(path, self.folder / "data", fault.processes)
        run.start(only=fault.victim, COMPILE_SECONDS=str(LATE_SECONDS))
        run.finish()
        fault.problems = differences(path, self.reference(fault.processes), metrics=True)

    def _interrupt(self, fault: Fault, path: Path, rng: random.Random) -> None:
        reference = self.reference(fault.processes)
        run = Run(path, self.folder / "data", fault.processes, export=fault.phase == "exporting")
        run.start()
        run.wait_for_phase(fault.phase, rng.randint(1, PHASES[fault.phase]))
        time.sleep(rng.uniform(0, LONGEST_SECONDS[fault.phase]))
        stopped_at = run.step()
        began = time.monotonic()
        run.send(fault.victim, signal.Signals[fault.signal])
        frozen = {fault.victim} if fault.signal == "SIGSTOP" else set()
        fault.statuses = run.wait(60, without=frozen)
        fault.stop_seconds = time.monotonic() - began
        fault.problems = problems_of(fault, run, stopped_at)
        run.kill()
        if fault.phase == "exporting":
            again = Run(path, self.folder / "data", fault.processes, export=True)
            again.finish()
            if (path / "weights.safetensors").read_bytes() != self._weights(reference):
                fault.problems.append("other weights exported")
        elif fault.name.startswith("lost"):
            self._continue_elsewhere(fault, path, reference, stopped_at)
        else:
            self._continue(fault, path, reference, stopped_at)

    def _continue(self, fault: Fault, path: Path, reference: Path, stopped_at: int) -> None:
        run = Run(path, self.folder / "data", fault.processes)
        run.start()
        self._recover(fault, run, stopped_at)
        run.finish()
        fault.problems += differences(path, reference, metrics=fault.signal == "SIGKILL")

    def _recover(self, fault: Fault, run: Run, stopped_at: int) -> None:
        began = time.monotonic()
        first = run.first_step()
        fault.lost_steps = max(stopped_at - first + 1, 0) if first else 0
        run.wait_for_step(min(stopped_at + 1, STEPS))
        fault.recovery_seconds = time.monotonic() - began

    def _continue_elsewhere(self, fault: Fault, path: Path, reference: Path, stopped_at: int) -> None:
        """Continues the run with 4, 2 and 1 processes. Other numbers of devices round differently, so those runs are
        compared with the undisturbed run, continued from the same step on the same devices."""
        for processes, devices in ((4, 1), (2, 4), (1, 2)):
            copy = path.with_name(f"{path.name}-{processes}")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(path, copy)
            run = Run(copy, self.folder / "data", processes, devices)
            run.start()
            if processes == 4:
                self._recover(fault, run, stopped_at)
            run.finish()
            expected = reference if processes == 4 else self._moved(reference, run.continued_at(), processes, devices)
            fault.problems += [
                f"with {processes} processes: {problem}" for problem in differences(copy, expected, metrics=False)
            ]
            fault.drift = max(fault.drift, largest_difference(copy, reference))
            shutil.rmtree(copy)

    def _moved(self, reference: Path, step: int, processes: int, devices: int) -> Path:
        """Returns the folder of the reference run, continued from its checkpoint at `step` on other devices."""
        path = self.folder / f"{reference.name}-from-{step}-on-{processes}x{devices}"
        if not (path / "FINISHED").exists():
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(reference, path)
            (path / "FINISHED").unlink()
            for checkpoint in (path / "checkpoints").iterdir():
                if int(checkpoint.name) > step:
                    shutil.rmtree(checkpoint)
            Run(path, self.folder / "data", processes, devices).finish()
        return path

    def _weights(self, reference: Path) -> bytes:
        path = reference / "weights.safetensors"
        if not path.exists():
            Run(reference, self.folder / "data", 1, export=True).finish()
        return path.read_bytes()


def main(campaign: Campaign) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns of metadata that an item of arrays does not need
    disturber = Disturber(Path(campaign.folder), campaign.seed, campaign.count)
    planned = [fault for part in campaign.parts for fault in faults(part, campaign.count)]
    results: list[Fault] = []
    for number, fault in enumerate(planned, 1):
        result = disturber.disturb(fault, number)
        results.append(result)
        print(
            f"{number}/{len(planned)} {result.name} {result.phase}: "
            f"{'; '.join(result.problems) or 'as if undisturbed'}, stopped after {result.stop_seconds:.1f} s, "
            f"{result.lost_steps} steps lost, recovered after {result.recovery_seconds:.1f} s"
            + (f", on other devices within {result.drift:.1e} of the undisturbed run" if result.drift else ""),
            flush=True,
        )
    summary: dict[str, Any] = {"fields": FIELDS, "faults": [dataclasses.asdict(fault) for fault in results]}
    (disturber.folder / "results.json").write_text(json.dumps(summary, indent=1))
    print(f"\n{table(results)}")
    return int(any(fault.problems for fault in results))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Campaign)))
