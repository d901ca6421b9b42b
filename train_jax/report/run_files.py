"""Reads the files that a run of any task has: configuration, metrics, evaluation, machine, and where the time went."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.events import Goodput, read_goodput
from train_jax.run.folder import RunFolder, read_run
from train_jax.run.tracking import read_metrics


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What the report of any task may show."""

    folder: RunFolder
    config: RunConfig
    records: list[dict[str, float]]
    test: dict[str, Any] | None
    """Figures of the last evaluation on the whole test set."""
    finished: dict[str, Any] | None
    export_check: dict[str, Any] | None
    machine: dict[str, Any] | None
    goodput: Goodput | None
    """Where the wall time went; None for runs of older versions."""

    @property
    def title(self) -> str:
        return " ".join([self.folder.path.resolve().name, self.folder.weights_of]).strip()

    def curve(self, name: str, over: str = "step") -> list[tuple[float, float]]:
        return [(r[over], r[name]) for r in self.records if name in r and over in r]

    @property
    def train_seconds(self) -> float | None:
        seconds = [r["train_seconds"] for r in self.records if "train_seconds" in r]
        return (self.finished or {}).get("train_seconds", seconds[-1] if seconds else None)

    @property
    def steps(self) -> int:
        """The last recorded optimizer step."""
        return int((self.finished or {}).get("train_steps", max((r["step"] for r in self.records), default=0)))

    @property
    def examples_per_second(self) -> float | None:
        """The median over the records of metrics."""
        seconds = [r["step_seconds"] for r in self.records if r.get("step_seconds", 0) > 0]
        return self.config.global_batch_size / statistics.median(seconds) if seconds else None

    @property
    def weights(self) -> str:
        """The name of the weights that are evaluated."""
        return "EMA weights" if self.config.optim.ema_decay else "raw weights"

    def held_out_by(self, metric: str) -> dict[str, Any]:
        """The figures of the evaluation on the whole test set, or of the last one during training with `metric`."""
        if self.test is not None:
            return self.test
        during = [r for r in self.records if f"eval/{metric}" in r]
        return {name.removeprefix("eval/"): value for name, value in during[-1].items()} if during else {}


def read_run_files(run_dir: str, step: str = "newest") -> RunFiles:
    """Reads a run with the results of a checkpoint: `newest`, `best`, or its step.

    Raises `UserError` if it does not exist, has no metrics yet, or if the chosen checkpoint has not been evaluated.
    """
    folder, config = read_run(run_dir)
    if step != "newest":
        from train_jax.run.restore import results_folder  # imports JAX, which a report needs only for this

        folder = results_folder(run_dir, step)
    records, test = read_metrics(folder), read_json(folder.evaluation("test"))
    if not records and test is None:
        raise UserError(f"{run_dir} has no metrics yet; train it with `trm train`, or wait for the first metrics")
    if test is None and folder.weights_of:
        raise UserError(f"{folder.evaluation('test')} is missing; run `trm evaluate {run_dir} --step {step}` first")
    return RunFiles(
        folder=folder,
        config=config,
        records=records,
        test=test,
        finished=read_json(folder.finished),
        export_check=read_json(folder.export_check),
        machine=read_json(folder.machine),
        goodput=read_goodput(folder),
    )


def read_json(path: Path) -> Any:
    """Reads a JSON file; None if it does not exist. Raises `UserError` if it is damaged."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); remove it and run the stage that writes it again") from error
