"""What a run was made on: its devices, its software, the size of its model. Training writes it, the report reads it."""

from __future__ import annotations

import datetime
import json
import platform
from importlib.metadata import PackageNotFoundError, version

from train_jax.run.folder import RunFolder, write_text
from train_jax.runtime.cores import cores

PACKAGES = ("torch", "torchax", "jax", "jaxlib", "optax", "orbax-checkpoint", "numpy")
"""Those whose version can change what a run learns."""


def write_machine(folder: RunFolder, *, devices: str, parameters: int) -> None:
    """`devices`: as `Devices.kind` has it; `parameters`: dense ones, without the puzzle table."""
    facts = {
        "last_started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "devices": devices,
        "parameters": parameters,
        "processor": _processor(),
        "cores": cores(),
        "versions": {"python": platform.python_version()} | _versions(),
    }
    write_text(folder.machine, json.dumps(facts, indent=1))


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    """The processor's model where Linux tells it, else what Python knows."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
