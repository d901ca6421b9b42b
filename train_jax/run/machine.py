"""Writes the devices, software versions and model size of a run, for its report."""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import PackageNotFoundError, version

from train_jax.run.folder import RunFolder, write_text
from train_jax.runtime.cores import cores

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")
"""Packages whose version can change the result of training."""


def write_machine(folder: RunFolder, *, devices: str, parameters: int) -> None:
    """Writes the file; `devices` is `Devices.kind`, `parameters` the number of dense ones, without the puzzle table."""
    facts = {
        "last_started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "devices": devices,
        "parameters": parameters,
        "processor": processor(),
        "cores": cores(),
        "versions": {"python": platform.python_version()} | versions_of_packages(),
    }
    write_text(folder.machine, json.dumps(facts, indent=1))


def versions_of_packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def processor() -> str:
    """Returns the model name of the processor on Linux, otherwise the name that Python reports."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
