"""The source files of a run, by their hashes: all processes of a run must have the same."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from train_jax.run.config import RunConfig

PACKAGES = ("bridge", "models_torch", "train_jax")


def source_hashes(config: RunConfig) -> dict[str, str]:
    """Of every source file of the packages, and of that of a model and a task of the user.

    Raises `OSError` for a file that cannot be read.
    """
    hashes = {}
    for package in PACKAGES:
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
