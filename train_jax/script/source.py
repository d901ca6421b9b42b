"""A training script of the user: a plain PyTorch file that defines a model, its data and its loss.

    def model(): ...                  an nn.Module
    def train_data(): ...             a map-style data set, a list, arrays, a DataLoader, or an iterable of batches
    def loss(model, batch): ...       a scalar, or (sum, count); a dict of metrics may follow
    def test_data(): ...              optional
    def collate(examples): ...        optional, as for torch.utils.data.DataLoader
    def optimizer(model): ...         optional, a torch.optim.Optimizer
    def schedule(optimizer): ...      optional, a torch.optim.lr_scheduler.LRScheduler
    def preview(outputs, batch): ...  optional, images and texts for the report

The file imports nothing of this package. Names and signatures are checked when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from train_jax.errors import UserError

FUNCTIONS = {
    "model": (),
    "train_data": (),
    "loss": ("model", "batch"),
    "test_data": (),
    "collate": ("examples",),
    "optimizer": ("model",),
    "schedule": ("optimizer",),
    "preview": ("outputs", "batch"),
}
"""The arguments of each function of a script, by position."""
REQUIRED = ("model", "train_data", "loss")


@dataclasses.dataclass(frozen=True)
class Script:
    """The functions of a script; those that it does not define are None."""

    name: str
    """Name of the module."""
    path: str
    model: Callable[[], Any]
    train_data: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    test_data: Callable[[], Any] | None = None
    collate: Callable[[list], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    schedule: Callable[[Any], Any] | None = None
    preview: Callable[[Any, Any], Any] | None = None

    @property
    def file(self) -> str:
        """Name of the file, for messages."""
        return os.path.basename(self.path)

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the script. Raises `UserError`, with the line of the file, for what it raises."""
        with self.errors_of(f"{function}()"):
            return getattr(self, function)(*arguments)

    @contextlib.contextmanager
    def errors_of(self, what: str) -> Iterator[None]:
        """Makes an exception of the user's code a `UserError` with the line of the file that it comes from."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{self.place_of(error)}: {what} raised {_in_short(error)}; correct it") from error

    def place_of(self, error: BaseException) -> str:
        """Returns the last line of the file in the traceback of an error, such as `mine.py:12`."""
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self.path]
        return f"{self.file}:{lines[-1]}" if lines else self.file

    def without_functions(self) -> Script:
        """Returns a script that has the messages of this one, and can be pickled."""
        return Script(self.name, self.path, _absent, _absent, _absent)

    def line_of(self, function: str) -> str:
        """Returns the line at which a function is defined, such as `mine.py:12`."""
        code = getattr(inspect.unwrap(getattr(self, function)), "__code__", None)
        return f"{self.file}:{code.co_firstlineno}" if code is not None else self.file


def _absent(*_: Any) -> Any:
    raise NotImplementedError("a function of a script in another process")


_given: dict[str, Script] = {}
"""Scripts that were not read from a file, by name."""


def use_script(script: Script) -> None:
    """Makes `script_of` return a script that is no file."""
    _given[script.name] = script


def script_of(name: str) -> Script:
    """Returns the script in the module `name`, which is imported. Raises `UserError` for a wrong name or signature."""
    if name in _given:
        return _given[name]
    module = sys.modules.get(name)
    if module is None:
        raise UserError(f"{name} is not imported; give --plugin and the path of the script")
    path = str(module.__file__)
    file = os.path.basename(path)
    if missing := [each for each in REQUIRED if not hasattr(module, each)]:
        example = f"def {missing[0]}({', '.join(FUNCTIONS[missing[0]])})"
        raise UserError(f"{path} does not define {' and '.join(missing)}; add `{example}`")
    found = {each: getattr(module, each) for each in FUNCTIONS if hasattr(module, each)}
    for each, value in found.items():
        if not callable(value):
            kind = type(value).__name__
            raise UserError(f"{file}: {each} is of type {kind}, expected a function; write `def {each}(…)`")
    if "schedule" in found and "optimizer" not in found:
        raise UserError(f"{file}: schedule needs the optimizer of the script; add `def optimizer(model)`")
    script = Script(name, path, **found)
    for each in found:
        _check_signature(script, each)
    return script


def _check_signature(script: Script, function: str) -> None:
    expected = FUNCTIONS[function]
    try:
        signature = inspect.signature(getattr(script, function))
    except ValueError:  # written in C
        return
    try:
        signature.bind(*expected)
    except TypeError:
        raise UserError(
            f"{script.line_of(function)}: {function}{signature} cannot be called as "
            f"{function}({', '.join(expected)}); change its arguments"
        ) from None


def _in_short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"
