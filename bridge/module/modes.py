"""What a traced call changes in PyTorch and JAX, and puts back: modes, settings and replaced names."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from bridge._compat.flex import as_operations
from bridge._compat.torch import (
    NO_MEMORY,
    UNVALIDATED_DISTRIBUTIONS,
    Replacements,
    before,
    compiler_is_loaded,
    in_place_of_adaptive_softmax,
    in_place_of_script_call,
)
from bridge.autograd import checkpoint, engine
from bridge.autograd.function import OF_LIBRARIES, in_place_of_apply
from bridge.context import CURRENT, RUNNING
from bridge.dispatch.assignments import FROM_NUMPY
from bridge.dispatch.aten import Dispatch
from bridge.dispatch.function_mode import Functions
from bridge.dispatch.random import DEFAULT_GENERATOR
from bridge.dispatch.replacements import replaced
from bridge.errors import WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY
from bridge.generators import watched_draws
from bridge.symbolic.conversion import FUNCTIONS, converted

_PRECISIONS = {"highest": "highest", "high": "high", "medium": "default"}
_PRECISIONS_OF_CUDA = {"tf32": "high", "bf16": "default"}


def matmul_precision() -> str:
    """Returns the precision of float32 products in a call traced now, as a setting of JAX.

    This is `jax.default_matmul_precision` if the user has set it, else `torch.get_float32_matmul_precision()`, which
    `torch.backends.cuda.matmul.allow_tf32` sets too. JAX's own default is bf16 passes on a TPU and TF32 on a GPU;
    PyTorch's is "highest".
    """
    given = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if given is not None:
        return given
    try:
        return _PRECISIONS[torch.get_float32_matmul_precision()]
    except RuntimeError:  # the newer switch has set it for CUDA alone
        return _PRECISIONS_OF_CUDA.get(str(torch.backends.cuda.matmul.fp32_precision), "highest")


def _turn_compiler_off(*_args: Any, **_kwargs: Any) -> None:
    """Turns `torch.compile` off: it would find modes active, not compile the code, and not try again.

    If the compiler is loaded, a call turns it off at its beginning; loading it takes seconds.
    """
    if CURRENT.compiler is not None:
        CURRENT.compiler.enter_context(torch.compiler.set_stance("force_eager"))


_MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "autocast": (partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")),
    "the dtype of autocast": (partial(torch.get_autocast_dtype, "cpu"), partial(torch.set_autocast_dtype, "cpu")),
}


def _put_back(modes: Mapping[str, Any]) -> list[str]:
    """Restores the modes of PyTorch; returns the names of those that were changed."""
    changed = []
    for name, (get, put) in _MODES.items():
        if get() != modes[name]:
            changed.append(name)
            put(modes[name])
    return changed


def _states() -> tuple:
    """Returns the states of the generators of `random` and `numpy.random`, which belong to all threads."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest)  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def _current(dispatch: Dispatch, compiler: contextlib.ExitStack) -> Iterator[None]:
    """Makes the call the current one of this thread, which may be in another call already."""
    outer = CURRENT.call, CURRENT.recording, CURRENT.compiler, CURRENT.generator
    CURRENT.call = dispatch
    CURRENT.recording = bool(dispatch.recording)
    CURRENT.compiler = compiler
    CURRENT.generator = None
    RUNNING.append(dispatch)
    try:
        yield
    finally:
        RUNNING.remove(dispatch)
        CURRENT.call, CURRENT.recording, CURRENT.compiler, CURRENT.generator = outer


@contextlib.contextmanager
def tracing(dispatch: Dispatch) -> Iterator[None]:
    """Runs the code under it through the bridge. Modes are thread-local: PyTorch in other threads is not affected.

    An error of the bridge is raised at the end even if the code caught it, since what the code does afterwards differs
    from PyTorch.
    """
    modes = {name: get() for name, (get, _) in _MODES.items()}
    default_dtype = torch.get_default_dtype()
    states = _states()
    compiler = contextlib.ExitStack()
    try:
        with (
            _current(dispatch, compiler),
            compiler,
            jax.default_matmul_precision(matmul_precision()),
            dispatch,
            Functions(dispatch),
            _REPLACED,
            DEFAULT_GENERATOR,
            replaced(dispatch.options.functions),
            as_operations(),
        ):
            if compiler_is_loaded():
                _turn_compiler_off()
            if FUNCTIONS:
                compiler.enter_context(converted())
            if CURRENT.watched:
                compiler.enter_context(watched_draws())
            yield
            changed = _put_back(modes)
        if changed:
            raise dispatch.error(
                f"the call leaves {' and '.join(changed)} changed, which later calls and other code would have",
                "use a context manager such as torch.no_grad() or torch.autocast()",
            )
        CURRENT.states = None if _states() == states else states
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
        _put_back(modes)
        torch.set_default_dtype(default_dtype)


_REPLACED = Replacements(
    UNVALIDATED_DISTRIBUTIONS,
    in_place_of_apply(tracing),
    OF_LIBRARIES,
    FROM_NUMPY,
    *checkpoint.REPLACED,
    *engine.REPLACED,
    before(torch, "compile", _turn_compiler_off),
    in_place_of_adaptive_softmax(lambda: CURRENT.call is not None),
    in_place_of_script_call(lambda: CURRENT.call is not None),
)
"""The names of PyTorch that refer to other objects while a call runs."""
