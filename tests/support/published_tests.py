"""Runs a file of nanochat's tests on other code than its own."""

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest


def run_published(name: str, modules: dict[str, dict[str, Any]]) -> int:
    """Runs `tests/{name}.py` of the checkout that NANOCHAT_DIR names; returns pytest's status.

    `modules` are what the file imports, such as `nanochat.engine`, with their contents.
    """
    for module, contents in modules.items():
        package = module.partition(".")[0]
        sys.modules.setdefault(package, types.ModuleType(package))
        sys.modules[module] = types.ModuleType(module)
        vars(sys.modules[module]).update(contents)
    tests = Path(os.environ["NANOCHAT_DIR"]) / "tests" / f"{name}.py"
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-c", os.devnull, "-rs", str(tests)]))
