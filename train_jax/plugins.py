"""Imports objects of the user, named `package.module:name`: tasks, kinds of puzzles, optimizers."""

import importlib
import os
import re
import sys
from typing import Any

from train_jax.errors import UserError


def is_plugin(name: str) -> bool:
    """Returns whether `name` has the form `package.module:name`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


def load_plugin(name: str, what: str) -> Any:
    """Imports `package.module:name` from PYTHONPATH or the current folder; `what` describes it in error messages.

    Raises `UserError` if the module cannot be imported or has no such object.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it shadows no installed package
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"{what} {name!r}: {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "add its folder to PYTHONPATH, or run in this folder"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:10])
        raise UserError(f"{what} {name!r}: {module_name!r} has no {attribute!r}; use one of {public}") from None
