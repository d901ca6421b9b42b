"""The context of a traced call: the modes that it enters, and those of PyTorch that it has to leave as they were."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributions import Distribution

from bridge._compat.torch import NO_MEMORY, Replacements, before, compiler_is_loaded, validates_distributions
from bridge.autograd import checkpoint, engine
from bridge.autograd.function import in_place_of_apply
from bridge.context import CURRENT, entered
from bridge.context import current as active
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


class _Mode(NamedTuple):
    name: str
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _precision() -> str | None:
    """None where it was set for one backend alone, which PyTorch's general question refuses to tell."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


_MODES = (
    _Mode("gradient mode", torch.is_grad_enabled, torch.set_grad_enabled),
    _Mode("autocast", partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    _Mode("the dtype of autocast", partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
    _Mode(
        "the use of deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    _Mode("the precision of float32 products", _precision, torch.set_float32_matmul_precision),
    _Mode("the detection of anomalies", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
)


def _modes() -> dict[str, Any]:
    """The value of each mode."""
    return {mode.name: mode.get() for mode in _MODES}


def _put_back(before: dict[str, Any]) -> list[str]:
    """Restores the modes; returns the names of those that were changed."""
    changed = [mode for mode in _MODES if before[mode.name] is not None and mode.get() != before[mode.name]]
    for mode in changed:
        mode.put(before[mode.name])
    return [mode.name for mode in changed]


_BEFORE: list[bool] = []
"""For each traced call of the process, whether distributions checked their arguments when it began."""
_LOCK = threading.Lock()


@contextlib.contextmanager
def _unvalidated_distributions() -> Iterator[None]:
    """Within it distributions check their arguments only where they are told to: values are traced."""
    with _LOCK:
        _BEFORE.append(validates_distributions())
        Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        with _LOCK:
            Distribution.set_default_validate_args(_BEFORE.pop())


@contextlib.contextmanager
def tracing(dispatch: Dispatch) -> Iterator[None]:
    """Run the code under it through the bridge. Modes are thread-local: other threads' PyTorch work is not touched.

    An error of the bridge leaves it even where the code caught it: what the code does then is not what it does in
    PyTorch.
    """
    state, default_dtype, before_modes = state_of_python(), torch.get_default_dtype(), _modes()
    compiler, CURRENT.compiler = CURRENT.compiler, contextlib.ExitStack()
    try:
        with (
            entered(dispatch),
            _REPLACED,
            default_generator_as(CallGenerator()),
            products_of_pytorch(),
            _unvalidated_distributions(),
            CURRENT.compiler,
            dispatch,
            Functions(dispatch),
            replaced(dispatch.functions, active),
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
    in_place_of_apply(tracing), *checkpoint.REPLACED, *engine.REPLACED, before(torch, "compile", _turn_compiler_off)
)
"""The names of PyTorch that another object has while a call runs."""
