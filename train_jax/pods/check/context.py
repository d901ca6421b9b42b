"""The context of a proof: its options, its run and the devices."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from pathlib import Path
from typing import Any

from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices, Runner
from train_jax.task import Task
from train_jax.trainer.start import Training, assemble


@dataclasses.dataclass
class Context:
    """The run that is proved and the folder of the output."""

    name: str
    config: RunConfig
    task: Task
    folder: Path
    arguments: list[str]
    """Fields of `trm train` that follow the name."""
    has_data: bool = True
    """False if the data set is not built; its sizes alone are known then."""

    @cached_property
    def devices(self) -> Devices:
        return Devices(runner=self.config.compute.runner)

    @property
    def choices(self) -> Path:
        """The file that `--compute.choices` reads."""
        return self.folder / "choices.json"

    @property
    def program(self) -> Path:
        """A train step that another process of this proof saved."""
        return self.folder / "train-step.program"

    def training(self, runner: Runner, **compute: Any) -> Training:
        """Returns the run on all devices with other fields of `ComputeConfig`."""
        compute = {"runner": runner, "load": "", "steps_per_dispatch": 1, **compute}
        config = dataclasses.replace(self.config, compute=dataclasses.replace(self.config.compute, **compute))
        return assemble(config, self.task, Devices(runner=runner))
