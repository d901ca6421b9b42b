"""The context of a traced call: the modes that it enters, and those of PyTorch that it has to leave as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from bridge._compat.torch import NO_MEMORY, UNVALIDATED_DISTRIBUTIONS, Replacements, before, compiler_is_loaded
from bridge.autograd import checkpoint, engine
from bridge.autograd.function import in_place_of_apply
from bridge.context import CURRENT, current, entered
from bridge.dispatch.compute import products_of_pytorch
from bridge.dispatch.function_mode import Functions
from bridge.dispatch.mode import Dispatch
from bridge.dispatch.named_functions import replaced
from bridge.errors import WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY
from bridge.tensor.generators import CallGenerator, default_generator_as, restore_python, state_of_python


def _turn_compiler_off(*_args: Any, **_kwargs: Any) -> None:
    """Before `torch.compile`: it would find modes active, not compile the code, and not try again.

    A call turns the compiler off where it begins, if that is loaded, which takes seconds.
    """
    if CURRENT.compiler is not None:
        CURRENT.compiler.enter_context(torch.compiler.set_stance("force_eager"))


_MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "the dtype of autocast": (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
}


def _put_back(before: dict[str, Any]) -> list[str]:
    """Restores the modes; returns the names of those that were changed."""
    changed = [name for name, (get, _) in _MODES.items() if get() != before[name]]
    for name in changed:
        _MODES[name][1](before[name])
    return changed


@contextlib.contextmanager
def tracing(dispatch: Dispatch) -> Iterator[None]:
    """Run the code under it through the bridge. Modes are thread-local: other threads' PyTorch work is not touched.

    An error of the bridge leaves it even where the code caught it: what the code does then is not what it does in
    PyTorch.
    """
    state, default_dtype, before_modes = (
        state_of_python(),
        torch.get_default_dtype(),
        {n: get() for n, (get, _) in _MODES.items()},
    )
    compiler, CURRENT.compiler = CURRENT.compiler, contextlib.ExitStack()
    try:
        with (
            entered(dispatch),
            _REPLACED,
            default_generator_as(CallGenerator()),
            products_of_pytorch(),
            CURRENT.compiler,
            dispatch,
            Functions(dispatch),
            replaced(dispatch.functions, current),
        ):
            if compiler_is_loaded():
                _turn_compiler_off()
            yield
            changed = _put_back(before_modes)
        if changed:
            raise dispatch.error(
                f"the call leaves {' and '.join(changed)} changed, which later calls and other code would have",
                "use a context manager such as torch.no_grad() or torch.autocast()",
            )
        drawn = restore_python(state) if threading.active_count() == 1 else None
        if drawn is not None:
            raise dispatch.error(
                f"the call drew random numbers from {drawn}, which would be constants of the program",
                "draw with torch, or pass the number as an argument",
            )
    except Exception as error:
        if dispatch.failed is not None and error is not dispatch.failed:
            raise dispatch.failed from error
        if isinstance(error, RuntimeError) and str(error).startswith(NO_MEMORY):
            raise dispatch.error(f"code that leaves PyTorch {WITHOUT_MEMORY}", WITHOUT_MEMORY_REMEDY, error) from error
        raise
    else:
        if dispatch.failed is not None:
            raise dispatch.failed
    finally:
        _put_back(before_modes)
        torch.set_default_dtype(default_dtype)
        CURRENT.compiler = compiler


_REPLACED = Replacements(
    UNVALIDATED_DISTRIBUTIONS,
    in_place_of_apply(tracing),
    *checkpoint.REPLACED,
    *engine.REPLACED,
    before(torch, "compile", _turn_compiler_off),
)
"""The names of PyTorch that another object has while a call runs."""
