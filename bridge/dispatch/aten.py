"""Every torch operation of a traced call, and the modes and replaced names that pass it to the bridge.

`Dispatch` sits below PyTorch's own dispatcher, so composite functions, autocast, gradient mode and view rules are
PyTorch's own. What arrives here are ATen operations. Each of them makes a view or writes in place (`views.py`), draws
random numbers (`random.py`), or computes a new tensor (`computation.py`).
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
import torch

from bridge._compat.jax import Tracer
from bridge._compat.torch import (
    NO_MEMORY,
    UNVALIDATED_DISTRIBUTIONS,
    HigherOrderOperator,
    Replacement,
    Replacements,
    UncompiledDispatchMode,
    before,
    compiler_is_loaded,
    in_place_of_adaptive_softmax,
    in_place_of_script_call,
    is_composite,
    is_without_memory,
    lazy_conjugates,
    schema_name,
)
from bridge.autograd import checkpoint, engine
from bridge.autograd.function import OF_LIBRARIES, in_place_of_apply
from bridge.autograd.nondifferentiable import NO_DERIVATIVE
from bridge.context import CURRENT, RUNNING, CallState, Options
from bridge.dispatch.computation import (
    DEFECT_REMEDY,
    TRACE_ERRORS,
    LoweringError,
    compute,
    draws_numbers,
    is_random,
    kind_of,
    with_tensors,
    written_arguments,
)
from bridge.dispatch.constants import BY_SHAPE, ConstantTable
from bridge.dispatch.function_mode import Functions
from bridge.dispatch.random import DEFAULT_GENERATOR, RANDOM, draw, seeded_generator
from bridge.dispatch.values import (
    CHECKS,
    UNSUPPORTED_REMEDY,
    asks_values,
    check_matrix,
    is_all_true,
    is_equal,
    kernel_error,
    number_of,
    of_functions,
    raise_kernel_error,
    untranslated,
)
from bridge.dispatch.views import GIVES_MEMORY, make_view, reshape_in_place, write_in_place
from bridge.errors import WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY, BridgeError
from bridge.generators import watched_draws
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.symbolic.ranges import checked, note_constant
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten

_OF_ARGUMENTS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
"""Exceptions that PyTorch raises for wrong arguments."""


class Dispatch(UncompiledDispatchMode, CallState):
    """The operations of one traced call."""

    supports_higher_order_operators = True  # such an operation reaches `__torch_dispatch__`, which refuses it by name

    def __init__(self, options: Options, names: Mapping[int, str], constants: Any = None, **state: Any):
        UncompiledDispatchMode.__init__(self)
        checks_int64 = checked(options.int64)
        CallState.__init__(self, options, names, constants or ConstantTable(), checks_int64=checks_int64, **state)
        self._nested = 0
        """The depth of decompositions at the operation at hand: PyTorch has no part in what those are made of."""

    def again(self, recording: int) -> Dispatch:
        return Dispatch(
            self.options,
            self.names,
            self.constants,
            recording=recording,
            is_backward=True,
            state=self.state,
            products_of_pytorch=self.products_of_pytorch,
        )

    def wrap(self, real: torch.Tensor) -> BridgeTensor:
        if type(real) is BridgeTensor:
            return real
        tensor = self.constants.wrap(self, real)
        note_constant(self, real, tensor)
        return tensor

    def materialize(self, real: torch.Tensor) -> BridgeTensor:
        return self.constants.materialize(self, real)

    def _traced_only(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.wrap(tensor) if self.constants.is_traced(tensor) else tensor

    # The dispatcher.

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            raise self.error(*of_functions(func))
        try:
            if func in CHECKS and CHECKS[func](args):
                raise_kernel_error(func, args, kwargs)
            return self._run(func, args, kwargs)
        except BridgeError:
            raise
        except TRACE_ERRORS as error:
            raise asks_values(self, func, args) from error
        except Exception as error:
            is_missing = isinstance(error, NotImplementedError) and (
                self.survey or not isinstance(error, LoweringError)
            )
            # Since PyTorch 2.15 a kernel raises it for arguments of the wrong dtype, too.
            if is_missing and str(error) != str(kernel_error(func, args, kwargs)):
                return untranslated(self, func, args, kwargs, error)
            self._raise_as_pytorch(error, func, args, kwargs)
            raise

    def _raise_as_pytorch(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
        """Raises the error of PyTorch's kernel instead of its meta device's or a lowering's error, if there is one."""
        for array in (t._handle.storage.array for t in (*self.state, *self.inputs)):
            if not isinstance(array, Tracer) and array.is_deleted():
                what = f"an array of shape {array.shape} that the call was given has been deleted"
                raise self.error(what, "pass the arrays that the call with `donate_argnums` returned") from error
        defect = isinstance(error, LoweringError)
        asks = isinstance(error, _OF_ARGUMENTS) and not isinstance(error, jax.errors.JaxRuntimeError)
        of_kernel = kernel_error(func, args, kwargs) if asks and (defect or not self._nested) else None
        if of_kernel is not None:
            of_kernel.add_note(self.where())
            raise of_kernel from None
        if defect:
            raise self.error(f"the lowering of `{func.name()}` failed ({error})", DEFECT_REMEDY) from error
        if isinstance(error, ValueError) and func.namespace == "aten":
            # The error comes from PyTorch's Python form, which its meta device runs; the kernel accepts the arguments.
            raise self.error(
                f"`{func.name()}` has no translation ({error})", UNSUPPORTED_REMEDY.format(func)
            ) from error
        if not hasattr(error, "__notes__"):
            error.add_note(self.where())  # is added to PyTorch's own message

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in BY_SHAPE:
            args = self.constants.without_values(func, args, kwargs) or args
        for value in args:
            if type(value) is BridgeTensor:
                break
        else:
            if self._is_constant(func, args, kwargs):
                return self._in_pytorch(func, args, kwargs)
        if self.recording or func in DECOMPOSITIONS:
            # A tensor that PyTorch has saved for its backward may be a real one that traced values were written into.
            args = with_tensors(args, self._traced_only)
            kwargs = with_tensors(kwargs, self._traced_only)
        rule = NO_DERIVATIVE.get(func)
        if rule is not None and not self._nested:
            return rule(self, func, args, kwargs)
        return self.redispatch(func, args, kwargs)

    @contextlib.contextmanager
    def taking_apart(self) -> Iterator[None]:
        self._nested += 1
        try:
            with self:
                yield
        finally:
            self._nested -= 1

    def _is_constant(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """True if the result depends on no input, parameter, buffer or key."""
        written = self.condition is not None and written_arguments(func, args, kwargs)
        if written or self.constants.any_traced(args, kwargs):
            return False
        if is_random(func):
            return seeded_generator(self, func, kwargs) is not None
        return not self.constants.is_large(func, args, kwargs)

    def _in_pytorch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs an operation on constants."""
        if any(isinstance(a, torch.UntypedStorage) and is_without_memory(a) for a in args):
            raise NotImplementedError(GIVES_MEMORY)
        for target in written_arguments(func, args, kwargs):
            if not self.constants.may_write(target):
                self.materialize(target)  # raises an error
        if is_random(func):
            generator = seeded_generator(self, func, kwargs)
            assert generator is not None
            return self.constants.compute(lambda *a, **k: draw(generator, func, a, k), func, args, kwargs)
        with lazy_conjugates():
            return self.constants.compute(func, func, args, kwargs)

    def redispatch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        by_values = _DECIDED_BY_VALUES.get(func)
        if by_values is not None:
            return by_values(self, func, self.wrap(args[0]), *args[1:], **kwargs)
        ours = func in DECOMPOSITIONS and self.options.lowerings.get(func.name(), func) is not None
        lowered = func in LOWERINGS or self.options.lowerings.get(func.name())
        if ours and (not lowered or draws_numbers(func, args, kwargs)):
            with self.taking_apart():
                return DECOMPOSITIONS[func](*args, **kwargs)
        if is_composite(func) and not lowered and func not in RANDOM:
            # The operation occurs in a decomposition, below PyTorch's autograd layer, which would have decomposed it.
            with self.taking_apart():
                return func.decompose(*args, **kwargs)
        kind = kind_of(func)
        if kind != "compute":
            kind = "reshape" if torch.Tag.inplace_view in func.tags else kind
            for target in written_arguments(func, args, kwargs):
                self.materialize(target)
        args = with_tensors(args, self.wrap)
        kwargs = with_tensors(kwargs, self.wrap) if kwargs else kwargs
        if kind == "compute":
            result = compute(self, func, args, kwargs)
            if kwargs.get("check_errors"):
                name = schema_name(func).removeprefix("aten::").lstrip("_").replace("linalg_", "linalg.")
                check_matrix(self, func, result[-1], name, is_matrix=args[0].dim() == 2)
            return result
        return _BY_KIND[kind](self, func, args, kwargs)


_BY_KIND = {"view": make_view, "write": write_in_place, "reshape": reshape_in_place}
_DECIDED_BY_VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: number_of,
    aten.is_nonzero.default: number_of,
    aten.equal.default: is_equal,
    aten._is_all_true.default: is_all_true,
    aten._linalg_check_errors.default: check_matrix,
    aten._has_same_storage_numel.default: lambda *_: True,  # a tangent and its primal, which have no memory here
}
"""Operations that give PyTorch's code a number, or raise an error."""


# ---- Python functions that a call replaces by name

_REPLACEMENTS: dict[str, Callable[..., Any]] = {}


def register_function(name: str, replacement: Callable[..., Any]) -> None:
    """Runs `replacement` where code in a traced call looks up the function `name`; calls by PyTorch run the original.

    `name` is `package.module:attribute`, with further attributes after dots: of a namespace that holds the function, or
    of a class. Code that has done `from package.module import f` looks it up in its own module: `own.module:f`. The
    replacement gets the same arguments, runs as the code of the module does, and may write into tensors. The module
    need not be imported yet. The last replacement for a name counts.

    Raises `ValueError` for a name of another form; a call raises `BridgeError` if the module has no such function.
    """
    check_name(name)
    _REPLACEMENTS[name] = replacement


def check_name(name: str) -> None:
    """Raises `ValueError` unless the name has the form of a function's name."""
    module, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise ValueError(f"{name!r} names no function; use package.module:function")


def replaced(functions: Iterable[str]) -> contextlib.ExitStack:
    """Returns a context in which the registered functions, and these, are replaced in the modules imported so far.

    Code outside of a traced call, in other threads, runs the functions themselves.
    """
    stack = contextlib.ExitStack()
    for name in dict.fromkeys([*_REPLACEMENTS, *functions]):
        if name.partition(":")[0] in sys.modules:
            stack.enter_context(_replacement_of(name))
    return stack


_LOCK = threading.Lock()
_PLACES: dict[str, tuple[Any, Replacements]] = {}
"""The owner of each function that has been replaced so far, and its replacement."""


def _replacement_of(name: str) -> Replacements:
    module, _, path = name.partition(":")
    *steps, attribute = path.split(".")
    try:
        owner = functools.reduce(getattr, steps, sys.modules[module])
        getattr(owner, attribute)
    except AttributeError as error:
        raise BridgeError(f"the registered function {name} is not there: {error}; correct the name") from None

    def make(original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            call = CURRENT.call
            if call is None:
                return original(*args, **kwargs)
            function = call.options.functions.get(name) or _REPLACEMENTS.get(name) or original
            return function(*args, **kwargs)

        return chosen

    with _LOCK:
        if name not in _PLACES or _PLACES[name][0] is not owner:
            _PLACES[name] = owner, Replacements(Replacement(owner, attribute, make))
        return _PLACES[name][1]


# ---- the context of a traced call


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
def tracing(dispatch: Dispatch) -> Iterator[None]:
    """Runs the code under it through the bridge. Modes are thread-local: PyTorch in other threads is not affected.

    An error of the bridge is raised at the end even if the code caught it, since what the code does afterwards differs
    from PyTorch.
    """
    outer = CURRENT.call, CURRENT.recording, CURRENT.compiler, CURRENT.generator
    modes = {name: get() for name, (get, _) in _MODES.items()}
    default_dtype = torch.get_default_dtype()
    states = _states()
    compiler = contextlib.ExitStack()
    CURRENT.call = dispatch
    CURRENT.recording = bool(dispatch.recording)
    CURRENT.compiler = compiler
    CURRENT.generator = None
    RUNNING.append(dispatch)
    try:
        with (
            compiler,
            jax.default_matmul_precision(matmul_precision()),
            dispatch,
            Functions(dispatch),
            _REPLACED,
            DEFAULT_GENERATOR,
            replaced(dispatch.options.functions),
        ):
            if compiler_is_loaded():
                _turn_compiler_off()
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
        RUNNING.remove(dispatch)
        CURRENT.call, CURRENT.recording, CURRENT.compiler, CURRENT.generator = outer


_REPLACED = Replacements(
    UNVALIDATED_DISTRIBUTIONS,
    in_place_of_apply(tracing),
    OF_LIBRARIES,
    *checkpoint.REPLACED,
    *engine.REPLACED,
    before(torch, "compile", _turn_compiler_off),
    in_place_of_adaptive_softmax(lambda: CURRENT.call is not None),
    in_place_of_script_call(lambda: CURRENT.call is not None),
)
"""The names of PyTorch that refer to other objects while a call runs."""
