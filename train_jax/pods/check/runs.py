"""Training runs of a proof, each in its own processes: a profile, a kill and its continuation, precompiled programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from train_jax.errors import LostProcessError
from train_jax.plugin import file_options
from train_jax.pods.check.context import Context
from train_jax.pods.check.record import NO_TIME
from train_jax.pods.check.rows import Row, absent, named
from train_jax.pods.yardsticks import read_profile
from train_jax.run.folder import RunFolder, complete_steps
from train_jax.runtime.compilation import SHIPPED, VARIABLE, shipped_programs
from train_jax.storage.lines import read_lines
from train_jax.storage.storage import path_of

STEPS = 6
SAVED = 3
"""Steps of a run, and the step of its first checkpoint."""
SAME = 1e-5
"""Largest relative difference of a loss after the continuation; a GPU adds in varying order."""
COMMAND = (sys.executable, "-m", "train_jax")


class _OverError(Exception):
    """The time of the run is over."""


class _Run:
    """A run in its own process. Its output goes to a file, because a pipe that nobody reads would block it."""

    def __init__(self, process: subprocess.Popen, output: Path, deadline: float):
        self.process = process
        self._output = output
        self._deadline = deadline

    @property
    def text(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool] = lambda: False) -> None:
        """Waits until the condition holds or the run has ended. Raises `_OverError` at the deadline."""
        while self.process.poll() is None and not condition():
            if time.monotonic() > self._deadline:
                raise _OverError
            time.sleep(0.02)

    def check(self, *statuses: int) -> None:
        """Raises `RuntimeError` with the end of the output if the run ended with none of these statuses."""
        if self.process.returncode not in statuses:
            lines = [line for line in self.text.splitlines() if line.strip()]
            said = [line for line in lines if line.startswith("trm:")] or lines[-3:]
            raise RuntimeError(f"status {self.process.returncode}: {' / '.join(said)[:350]}")


class Runs:
    """The runs of one proof. Every process of a pod makes the same calls; `deadline` is a value of `time.monotonic`."""

    def __init__(self, context: Context, deadline: float, run_seconds: float, first: bool):
        """`run_seconds` is the time limit of each run; the `first` process removes earlier runs."""
        self._context = context
        self._last = deadline
        self._seconds = run_seconds
        self.first = first
        self._deadline = deadline

    def rows(self, name: str) -> list[Row]:
        """Returns the rows of one of `RUNS`."""
        if not self._context.has_data:
            return [absent(name, self._context.no_data)]
        self._deadline = min(self._last, time.monotonic() + self._seconds)
        try:
            return _OF_NAME[name](self)
        except _OverError:
            if self._deadline == self._last:
                return [absent(name, NO_TIME)]
            return [named(name, f"no end within {self._seconds:.0f} s", fail=True)]
        except Exception as error:
            return [named(name, f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", fail=True)]

    def _new(self, name: str) -> RunFolder:
        folder = self._folder(name)
        if self.first:  # the others wait for this process before they look into it
            shutil.rmtree(folder.path, ignore_errors=True)
        return folder

    def _folder(self, name: str) -> RunFolder:
        return RunFolder(self._context.folder / "runs" / name)

    @contextlib.contextmanager
    def _running(
        self, name: str, *fields: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> Iterator[_Run]:
        """Starts a run; it is killed at the end of the block if it is still running."""
        batch = str(self._context.config.eval_batch_size)
        shared = {
            "--run-dir": str(self._folder(name).path), "--checkpoint-every-steps": str(SAVED),
            "--eval-every-steps": str(STEPS), "--eval-examples": batch, "--log-every-steps": "1", "--keep-best": "",
            "--wandb": "disabled", "--compute.steps-per-dispatch": "1", "--compute.load": "",
            "--compute.runner": "shard_map",  # `pmap` on several hosts gives no program for the profile
        }  # fmt: skip
        words = [word for pair in shared.items() for word in pair]
        command = [*COMMAND, *file_options(), "train", self._context.name, *self._context.arguments, *words, *fields]
        with tempfile.TemporaryDirectory() as place, Path(place, "output").open("wb") as output:
            variables = os.environ | environment
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=variables)
            try:
                yield _Run(process, Path(output.name), self._deadline)
            finally:
                process.kill()
                process.wait()

    def _finished(self, name: str, *fields: str) -> str:
        """Returns the output of a run of a few steps. Raises `RuntimeError` with the end of it if the run failed."""
        with self._running(name, "--steps", str(STEPS), *fields) as run:
            run.wait_until()
            run.check(0)
            return run.text

    def _profiled(self) -> list[Row]:
        folder = self._new("whole")
        begin = time.monotonic()
        self._finished("whole", "--profile", "3", "--profile-skip", "1")
        run = named("run", f"{STEPS} steps and an evaluation in {time.monotonic() - begin:.1f} s, the start included")
        figures = read_profile(folder.profile(0))
        text = f"{figures.steps} steps, {figures.wall:.2f} ms each, {figures.busy:.2f} ms in operations; "
        return [run, named("profile", text + str(folder.profile(0)), fail=figures.steps < 1, wall_ms=figures.wall)]

    def _continued(self) -> list[Row]:
        folder = self._new("killed")

        def saved() -> bool:
            return SAVED in complete_steps(folder.checkpoints)

        with self._running("killed", "--steps", str(STEPS)) as run:
            # The first process kills its own run; those of other hosts end because they have lost it.
            run.wait_until(saved if self.first else lambda: False)
            if run.process.poll() is not None:
                run.check(0, LostProcessError.STATUS)
        before = complete_steps(folder.checkpoints)
        text = self._finished("killed")
        continued = re.search(r"continuing (?:at|from) step (\d+)", text)
        at = int(continued[1]) if continued else STEPS if STEPS in before else 0
        losses, whole = (_losses(self._folder(name).metrics) for name in ("killed", "whole"))
        pairs = [(losses.get(step, float("inf")), loss) for step, loss in whole.items() if step > SAVED]
        apart = max((abs(one - other) / abs(other) for one, other in pairs), default=-1.0)
        text = f"killed after step {SAVED}, continued at step {at}; losses of steps {SAVED + 1} to {STEPS} "
        text += "were not compared" if apart < 0 else "are the same bits" if apart == 0 else f"differ by {apart:.1e}"
        return [named("kill and continuation", text, fail=at < SAVED or not 0 <= apart <= SAME, limit=f"{SAME:g}")]

    def _loaded(self) -> list[Row]:
        given = self._context.config.compute.load
        program = path_of(given) if given else self._context.program
        if not program.exists():
            return [absent("program, loaded", "no program was saved; give --compute.load FILE of compile-pod")]
        plain = ("--compute.attention", "plain", "--compute.mlp", "plain", "--compute.choices", "")
        text = self._begun("loaded", *(self._own_dispatch() if given else plain), "--compute.load", str(program))
        loaded = re.search(r"train step loaded in ([\d.]+) s", text)
        how = f"loaded in {loaded[1]} s from {program}" if loaded else "the run did not say that it loaded the program"
        return [named("program, loaded", f"{how}; {self._first_step('loaded')}", fail=loaded is None)]

    def _shipped(self) -> list[Row]:
        """Runs with a compilation cache that holds only programs compiled elsewhere."""
        name = "program, shipped"
        given = os.environ.get(VARIABLE, "")
        programs = shipped_programs(path_of(given)) if given else {}
        if not programs:
            return [absent(name, f"{VARIABLE} names no folder of `trm compile-pod --fill-cache`")]
        with tempfile.TemporaryDirectory() as place:
            for each in (*programs, SHIPPED):
                Path(place, each).write_bytes((path_of(given) / each).read_bytes())
            runner = ("--compute.runner", self._context.config.compute.runner, "--compute.compile-cache")
            text = self._begun("shipped", *self._own_dispatch(), *runner, environment={VARIABLE: place})
        compiled = re.search(r"train step compiled in .*", text)
        how = compiled[0] if compiled else "the run did not say how it got its program"
        return [named(name, f"{how}; {self._first_step('shipped')}", fail="from the compilation cache" not in how)]

    def _own_dispatch(self) -> list[str]:
        """Returns the fields that give a run the same program as the run that is proved."""
        steps = str(self._context.config.compute.steps_per_dispatch)
        fields = ["--compute.steps-per-dispatch", steps, "--log-every-steps", steps, "--checkpoint-every-steps", steps]
        return [*fields, "--eval-every-steps", "0"]

    def _begun(self, name: str, *fields: str, environment: Mapping[str, str] = MappingProxyType({})) -> str:
        """Returns the output of a run that ends after its first step.

        It has as many steps as the run that is proved, not `STEPS`, because the number is part of the program.
        """
        self._new(name)
        with self._running(name, *fields, environment=environment) as run:
            run.wait_until(lambda: "\nstep " in run.text)
            if run.process.poll() is not None:
                run.check(0, *([] if self.first else [LostProcessError.STATUS]))
            return run.text

    def _first_step(self, name: str) -> str:
        """Returns the time of the first step in words."""
        times = {event["event"]: event["time"] for event in reversed(list(read_lines(self._folder(name).events)))}
        if not {"continue", "progress"} <= times.keys():
            return "no step"
        return f"first step {times['progress'] - times['continue']:.1f} s after the restore"


_OF_NAME: dict[str, Callable[[Runs], list[Row]]] = {
    "profile": Runs._profiled,
    "kill and continuation": Runs._continued,
    "program, loaded": Runs._loaded,
    "program, shipped": Runs._shipped,
}
RUNS = tuple(_OF_NAME)
"""The training runs of a proof, in their order."""


def _losses(metrics: Path) -> dict[int, float]:
    """Returns the loss of each step of a run; for a step that was run twice, that of the last session."""
    values: dict[int, float] = {}
    for line in metrics.read_text().splitlines():
        record: dict[str, Any] = json.loads(line)
        for name, value in record.items():
            if name.startswith("train/") and name.endswith("loss"):
                values[int(record["step"])] = float(value)
    return values
