"""Runs of the tiny preset in separate processes, and the differences between two of them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 60
FIELDS = {
    "steps": STEPS,
    "checkpoint-every-steps": 10,
    "keep-checkpoints": 10,
    "eval-every-steps": 20,
    "eval-batch-size": 16,
    "log-every-steps": 5,
}
TIMES = {"train_seconds", "step_seconds", "data_wait_share"}
PATIENCE_SECONDS = 600.0


def free_address() -> str:
    """Returns a free address for the coordinator of several processes on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class EndedError(RuntimeError):
    """A process of a run ended on its own."""


class Run:
    """The processes of one run; their output is in files beside its folder."""

    def __init__(self, folder: Path, data: Path, processes: int, devices: int = 1, *, export: bool = False):
        self._folder = folder
        self._count = processes
        self._devices = devices
        self._arguments = ["train", "tiny", "--data-dir", data, "--run-dir", folder, "--wandb", "disabled"]
        self._arguments += [word for name, value in FIELDS.items() for word in (f"--{name}", value)]
        if export:
            self._arguments = ["export", folder]
            self._count = 1
        self._processes: list[subprocess.Popen] = []

    def start(self, *, only: int | None = None, **environment: str) -> None:
        """Starts the processes, or restarts them if they have ended; `environment` is for all, or for `only` one."""
        address = free_address()
        self._processes = []
        for index in range(self._count):
            variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(self._count)}
            variables = variables | {"JAX_PROCESS_ID": str(index)} if self._count > 1 else {}
            command = [
                sys.executable,
                "-m",
                "campaigns.faults_process",
                str(self._devices),
                *map(str, self._arguments),
            ]
            with self._output(index).open("w") as file:
                everything = os.environ | variables | (environment if only in (None, index) else {})
                self._processes.append(subprocess.Popen(command, env=everything, stdout=file, stderr=file))

    def _output(self, index: int) -> Path:
        return self._folder.with_name(f"{self._folder.name}.{index}.txt")

    def text(self, index: int) -> str:
        return self._output(index).read_text(errors="replace") if self._output(index).exists() else ""

    def _until(self, reached: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached():
            ended = [process.poll() for process in self._processes]
            if (any(ended) or None not in ended) and not reached():  # of several processes, one may finish first
                raise EndedError(f"{self._folder}: ended with {ended} before {what}: {self.text(0)[-2000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self._folder}: no {what} after {PATIENCE_SECONDS:.0f} s: {self.text(0)[-2000:]}")
            time.sleep(0.005)

    def wait_for_phase(self, phase: str, times: int) -> None:
        """Blocks until process 0 has begun a phase `times` times."""
        self._until(lambda: self.text(0).count(f"phase {phase}") >= times, f"{phase} {times} times")

    def reaches(self, phase: str, times: int) -> bool:
        """Blocks until process 0 has begun a phase `times` times; returns False if the run finishes earlier."""
        self._until(lambda: self.text(0).count(f"phase {phase}") >= times or self._ended(), f"{phase} {times} times")
        return self.text(0).count(f"phase {phase}") >= times

    def _steps(self) -> list[int]:
        words = [line.split() for line in self.text(0).splitlines(keepends=True) if line.endswith("\n")]
        return [int(line[2]) for line in words if line[:2] == ["phase", "training"] and len(line) == 3]

    def step(self) -> int:
        """Returns the last step that process 0 has begun, 0 for none."""
        return max(self._steps(), default=0)

    def continued_at(self) -> int:
        """Returns the step of the checkpoint that the run continued from, 0 for none."""
        steps = re.findall(r"continuing at step (\d+)", self.text(0))
        return int(steps[-1]) if steps else 0

    def first_step(self) -> int:
        """Returns the first step that process 0 begins, 0 if nothing is left to do. Blocks until it is known."""
        self._until(lambda: self._steps() or self._ended(), "the first step")
        return min(self._steps(), default=0)

    def wait_for_step(self, step: int) -> None:
        self._until(lambda: self.step() >= step or self._ended(), f"step {step}")

    def _ended(self) -> bool:
        return all(process.poll() == 0 for process in self._processes)

    def send(self, index: int, number: signal.Signals) -> None:
        self._processes[index].send_signal(number)

    def wait(self, seconds: float, without: set[int]) -> list[int | None]:
        """Returns the exit statuses, None for processes that still run after `seconds`; ignores those in `without`."""
        deadline = time.monotonic() + seconds
        for index, process in enumerate(self._processes):
            while index not in without and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        return [process.poll() for process in self._processes]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def finish(self) -> None:
        """Starts the run, if it is not started, and waits for its end."""
        if not self._processes:
            self.start()
        statuses = self.wait(PATIENCE_SECONDS, set())
        self.kill()
        if set(statuses) != {0}:
            texts = "\n".join(self.text(index)[-3000:] for index in range(self._count))
            raise EndedError(f"{self._folder}: statuses {statuses}: {texts}")


def differences(folder: Path, reference: Path, *, metrics: bool) -> list[str]:
    """Returns the differences between two finished runs, bit for bit: arrays of the last checkpoint, and metrics."""
    differing = []
    for item in ("model", "optimizer", "carry"):
        arrays, expected = (read_arrays(path / "checkpoints" / str(STEPS) / item) for path in (folder, reference))
        if arrays.keys() != expected.keys():
            differing.append(f"{item}: other arrays")
        else:
            differing += [name for name, array in expected.items() if arrays[name].tobytes() != array.tobytes()]
    if metrics and read_metrics(folder) != read_metrics(reference):
        differing.append("metrics.jsonl")
    return differing


def largest_difference(folder: Path, reference: Path) -> float:
    """Returns the largest difference of weights and buffers; not of the optimizer state, where moments of weights with
    nearly no gradient are rounding.
    """
    largest = 0.0
    for item in ("model", "optimizer"):
        arrays, expected = (read_arrays(path / "checkpoints" / str(STEPS) / item) for path in (folder, reference))
        names = [name for name in expected if "opt_state" not in name]
        largest = max([largest, *(relative_error(arrays[name], expected[name]) for name in names)])
    return largest


def relative_error(array: np.ndarray, expected: np.ndarray) -> float:
    difference = np.abs(array.astype(np.float64) - expected.astype(np.float64)).max(initial=0)
    return float(difference / max(np.abs(expected).max(initial=0), 1e-12))


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of one item of a checkpoint."""
    import orbax.checkpoint as ocp

    if not path.exists():
        return {}
    with ocp.StandardCheckpointer() as checkpointer:
        stored: Any = checkpointer.metadata(path)
        like = {name: np.empty(array.shape, array.dtype) for name, array in dict(stored.item_metadata).items()}
        return dict(checkpointer.restore(path, like))


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Returns the records of a run, without times and speeds."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in record.items() if k not in TIMES and not k.startswith("perf/")} for record in records]
