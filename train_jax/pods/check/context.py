"""What the checks are about: a run, its processes and devices, and the folder of what they write."""

from __future__ import annotations

import dataclasses
import platform
from functools import cached_property
from pathlib import Path
from typing import Any

from train_jax.pods.unbuilt import task_of
from train_jax.run.config import RunConfig
from train_jax.runtime.backend import Choice
from train_jax.runtime.coordination import exchange
from train_jax.runtime.devices import Devices, Runner, devices_of
from train_jax.task import Task, task_class
from train_jax.trainer.start import Training, assemble, start


@dataclasses.dataclass
class Context:
    """The run to check, and what is expected of it. Task, devices and training are made when a check needs them."""

    name: str
    config: RunConfig
    choice: Choice
    """The platform, and why it is that one."""
    folder: Path = Path()
    """Folder of the files that checks write."""
    arguments: list[str] = dataclasses.field(default_factory=list)
    """Fields of `trm train` that follow the name."""
    has_data: bool = True
    """False if the data set is not built; its sizes alone are known then."""
    expect_devices: int = 0
    expect_processes: int = 0

    @cached_property
    def hosts(self) -> list[str]:
        """Names of the hosts, by process. Collective at the first use."""
        return exchange("check hosts", platform.node())

    @cached_property
    def task(self) -> Task:
        return task_class(self.config.task)(self.config) if self.has_data else task_of(self.config)

    @cached_property
    def devices(self) -> Devices:
        return devices_of(self.config.compute)

    @cached_property
    def run(self) -> Training:
        """The components of the run as `trm train` starts them."""
        return start(self.config, self.task, self.devices)

    @property
    def no_data(self) -> str:
        """The reason of a row that needs a data set which is not built."""
        return f"there is no data set at {self.config.data_dir}; trm build-data makes one"

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
        compute = {"runner": runner, "load": "", "steps_per_dispatch": 1, "shard": (), "model_devices": 1, **compute}
        config = dataclasses.replace(self.config, compute=dataclasses.replace(self.config.compute, **compute))
        return assemble(config, self.task, Devices(runner=runner))
