"""The machine and the code of a run: devices, software versions, hashes of the source files."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import json
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder, write_text
from train_jax.runtime.backend import cores
from train_jax.version import COMPUTE_WITH, installed_version, tested_set

SOURCES = ("bridge", "models_torch", "train_jax")


def source_hashes(config: RunConfig) -> dict[str, str]:
    """Returns the hashes of all source files of the packages, and of the files of a user's model and task.

    Raises `OSError` for a file that cannot be read.
    """
    hashes = {}
    for package in SOURCES:
        root = Path(str(importlib.import_module(package).__file__)).parent
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                hashes[f"{package}/{path.relative_to(root)}"] = _hash_of(path)
    for name in (config.model, config.task):
        module = sys.modules.get(name.partition(":")[0]) if ":" in name else None
        if module is not None and module.__file__:
            hashes[name] = _hash_of(Path(module.__file__))
    return hashes


def hash_of_all(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:12]


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def write_machine(folder: RunFolder, *, devices: str, parameters: int) -> None:
    """Writes the file; `devices` is `Devices.kind`, `parameters` the number of dense ones, without the puzzle table."""
    facts = {
        "last_started": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "devices": devices,
        "parameters": parameters,
        "processor": processor(),
        "cores": cores(),
        "versions": {"python": platform.python_version()} | versions_of_packages() | {"tested as": tested_set()},
    }
    write_text(folder.machine, json.dumps(facts, indent=1))


def versions_of_packages() -> dict[str, str]:
    versions = {name: installed_version(name) for name in COMPUTE_WITH}
    return {name: found for name, found in versions.items() if found is not None}


def processor() -> str:
    """Returns the model name of the processor on Linux, otherwise the name that Python reports."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
