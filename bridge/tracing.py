"""Which traced call a thread is in, and the context that makes it."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, Self

import torch

from bridge._compat.torch import NO_MEMORY, compiler_is_loaded
from bridge.dispatch import Dispatch
from bridge.errors import UNDER_WAY, WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY
from bridge.function_mode import Functions
from bridge.generators import CallGenerator, default_generator_as, restore_python, state_of_python
from bridge.precision import products_of_pytorch
from bridge.process_modes import modes, put_back
from bridge.recording import NO_GRAPH
from bridge.tensors import RECORDING


class _Compiler(contextlib.ExitStack):
    """Within it `torch.compile` runs code as it is: with modes active it could not compile it, and would not try again.

    Where the compiler is not loaded, which takes seconds, the first `torch.compile` of the call turns it off.
    """

    def __enter__(self) -> Self:
        self.is_off = False
        if compiler_is_loaded():
            self.turn_off()
        return super().__enter__()

    def turn_off(self) -> None:
        if not self.is_off:
            self.is_off = True
            self.enter_context(torch.compiler.set_stance("force_eager"))


class _Active(threading.local):
    dispatch: Dispatch | None = None
    compiler: _Compiler | None = None


_ACTIVE = _Active()


def active() -> Dispatch | None:
    """The traced call that this thread is in."""
    return _ACTIVE.dispatch


def turn_compiler_off(*_args: Any, **_kwargs: Any) -> None:
    """Before `torch.compile`: in a traced call that began without a loaded compiler."""
    if _ACTIVE.compiler is not None:
        _ACTIVE.compiler.turn_off()


def _frame_of_with() -> types.FrameType | None:
    """The frame whose `with` statement the calling context manager belongs to."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == contextlib.__file__:
        frame = frame.f_back
    return frame


@contextlib.contextmanager
def tracing(dispatch: Dispatch) -> Iterator[None]:
    """Run the code under it through the bridge. Modes are thread-local: other threads' PyTorch work is not touched.

    An error of the bridge leaves it even where the code caught it: what the code does then is not what it does in
    PyTorch.
    """
    state, default_dtype, before_modes = state_of_python(), torch.get_default_dtype(), modes()
    before, _ACTIVE.dispatch = _ACTIVE.dispatch, dispatch
    compiler, _ACTIVE.compiler = _ACTIVE.compiler, _Compiler()
    recorded, RECORDING.on = RECORDING.on, dispatch.recording != NO_GRAPH
    under_way = threading.get_ident(), dispatch
    UNDER_WAY.append(under_way)
    entry_before, dispatch.entry = dispatch.entry, _frame_of_with()
    try:
        with (
            default_generator_as(CallGenerator()),
            products_of_pytorch(),
            _ACTIVE.compiler,
            dispatch,
            Functions(dispatch),
        ):
            yield
            changed = put_back(before_modes)
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
        put_back(before_modes)
        torch.set_default_dtype(default_dtype)
        UNDER_WAY.remove(under_way)
        dispatch.entry = entry_before
        _ACTIVE.dispatch, _ACTIVE.compiler, RECORDING.on = before, compiler, recorded
