"""Objects from outside the project, named `package.module:name`: tasks, kinds of puzzles, optimizers."""

import importlib
import os
import re
import sys
from typing import Any

from train_jax.errors import UserError


def is_plugin(name: str) -> bool:
    """Whether `name` has the form `package.module:name`."""
    return re.fullmatch(r"[\w.]+:\w+", name) is not None


def load_plugin(name: str, what: str) -> Any:
    """The object that `package.module:name` names, from PYTHONPATH or the current folder; `what` names it in errors.

    Raises `UserError` if the module cannot be imported or has no such object.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last, so that it shadows nothing that is installed
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"{what} {name!r}: {module_name!r} cannot be imported ({type(error).__name__}: {error}); "
            "run where Python finds it, or put its folder into PYTHONPATH"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = ", ".join(sorted(key for key in vars(module) if not key.startswith("_"))[:10])
        raise UserError(f"{what} {name!r}: {module_name!r} has no {attribute!r}; it has {public}") from None
