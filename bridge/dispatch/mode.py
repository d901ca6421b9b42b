"""Every torch operation of a traced call, and the modes and replaced names that bring it here.

`Dispatch` sits below PyTorch's own dispatcher, so composite functions, autocast, gradient mode and view rules are
PyTorch's own. What arrives here are ATen operations, and for each one of three things happens: it makes a view or
writes in place (`views.py`), it draws random numbers (`random.py`), or it computes a new tensor (`compute.py`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import torch

from bridge._compat.torch import (
    NO_MEMORY,
    UNVALIDATED_DISTRIBUTIONS,
    HigherOrderOperator,
    Replacement,
    Replacements,
    UncompiledDispatchMode,
    before,
    compiler_is_loaded,
    is_composite,
    is_without_memory,
    returns,
    schema_name,
)
from bridge.autograd import checkpoint, engine
from bridge.autograd.engine import NO_GRAPH
from bridge.autograd.function import in_place_of_apply
from bridge.autograd.nondifferentiable import NO_DERIVATIVE, apply_rule
from bridge.context import CURRENT, current, entered
from bridge.dispatch.compute import (
    DEFECT_REMEDY,
    TRACE_ERRORS,
    LoweringError,
    MetaCache,
    compute,
    draws_numbers,
    each_of,
    is_random,
    kind_of,
    shapes_by_data,
    with_named_tensors,
    with_tensors,
    written_arguments,
)
from bridge.dispatch.constants import BY_SHAPE, ConstantTable
from bridge.dispatch.function_mode import Functions
from bridge.dispatch.random import (
    RANDOM,
    CallGenerator,
    Rng,
    default_generator_as,
    draw,
    restore_python,
    seeded_generator,
    state_of_python,
)
from bridge.dispatch.values import (
    CHECKS,
    SHAPE_REMEDY,
    UNSUPPORTED_REMEDY,
    Survey,
    asked_inside,
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
from bridge.errors import WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY, BridgeError, BridgeWarning, where_in_module
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.symbolic.ranges import checked, note_constant
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten

_OF_ARGUMENTS = (RuntimeError, IndexError, ValueError, TypeError, AssertionError)
"""Exceptions that PyTorch raises for arguments."""


class Dispatch(UncompiledDispatchMode):
    """One traced call: its random key, its tensors, its submodules' names."""

    supports_higher_order_operators = True  # comes to `__torch_dispatch__`, and is refused by name

    def __init__(
        self,
        rng: Rng | None,
        names: Mapping[int, str],
        off: frozenset[str] = frozenset(),
        lowerings: Mapping[str, Callable] = types.MappingProxyType({}),
        survey: Survey | None = None,
        traced: bool = True,
        int64: str = "refuse",
        recording: int = NO_GRAPH,
        functions: Mapping[str, Callable] = types.MappingProxyType({}),
    ):
        super().__init__()
        self.functions = functions
        """Names of Python functions -> what the calls of this module run in their place."""
        self.traced = traced
        self.recording = recording
        self.state: list[BridgeTensor] = []
        """The traced tensors of parameters and buffers."""
        self.inputs: list[BridgeTensor] = []
        self.survey = survey
        self.rng, self.draws = rng, 0
        self.is_backward = False
        self._names = names
        self.off, self.lowerings = off, lowerings
        self._use(ConstantTable())
        self._said: set[str] = set()
        self._nested = 0
        """In how many decompositions the operation at hand is: PyTorch has no part in what those are made of."""
        self.failed: BridgeError | None = None
        """The first error, which the module's own code may have caught."""
        self.metas_of = MetaCache()
        self.products_of_pytorch = not precision_is_given()
        self._int64 = int64
        self.checks_int64 = checked(int64)
        self.checked: str | None = None
        """Within a function of `values.CHECKING`: what it checks."""

    def again(self, recording: int) -> Dispatch:
        """For a later pass over the same module: its names and tensors, no random key."""
        other = Dispatch(
            None,
            self._names,
            self.off,
            self.lowerings,
            int64=self._int64,
            recording=recording,
            functions=self.functions,
        )
        other.is_backward = True
        other._use(self._constants)
        other.state = self.state
        other.products_of_pytorch = self.products_of_pytorch
        return other

    # Real tensors.

    def _use(self, table: ConstantTable) -> None:
        self._constants = table
        self.stand_in, self.real_of = table.stand_in, table.real_of
        self.is_traced, self.may_write = table.is_traced, table.may_write

    def adopt(self, real: torch.Tensor) -> BridgeTensor:
        """The traced tensor for any tensor: itself, the stand-in for a state tensor, or a constant."""
        tensor = self._constants.adopt(self, real)
        if tensor is not real:
            note_constant(self, real, tensor)
        return tensor

    def take_over(self, real: torch.Tensor) -> BridgeTensor:
        """As `adopt`; from here on `real` and whatever shares its memory is traced."""
        return self._constants.take_over(self, real)

    def _traced_only(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.adopt(tensor) if self.is_traced(tensor) else tensor

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
            what = "makes a shape that depends on data" if shapes_by_data(func) else "needs a traced tensor's values"
            inside, remedy = asked_inside(SHAPE_REMEDY)
            raise self.error(f"`{func.name()}` {what}{inside}", remedy) from error
        except Exception as error:
            if isinstance(error, NotImplementedError) and (self.survey or not isinstance(error, LoweringError)):
                return untranslated(self, func, args, kwargs, error)
            self._raise_as_pytorch(error, func, args, kwargs)
            raise

    def _raise_as_pytorch(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
        """Raise the error of PyTorch's kernel in place of its meta device's or of a lowering's, if there is one."""
        defect = isinstance(error, LoweringError)
        asks = isinstance(error, _OF_ARGUMENTS) and not isinstance(error, jax.errors.JaxRuntimeError)
        of_kernel = kernel_error(func, args, kwargs) if asks and (defect or not self._nested) else None
        if of_kernel is not None:
            of_kernel.add_note(self.where())
            raise of_kernel from None
        if defect:
            raise self.error(f"the lowering of `{func.name()}` failed ({error})", DEFECT_REMEDY) from error
        if isinstance(error, ValueError) and func.namespace == "aten":
            # Of PyTorch's form in Python, which its meta device runs; the kernel has not refused the arguments.
            raise self.error(f"`{func.name()}` has no translation ({error})", UNSUPPORTED_REMEDY) from error
        if not hasattr(error, "__notes__"):
            error.add_note(self.where())  # to PyTorch's own message

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in BY_SHAPE:
            args = self._constants.without_values(func, args, kwargs) or args
        for value in args:
            if type(value) is BridgeTensor:
                break
        else:
            if self._is_constant(func, args, kwargs):
                return self._in_pytorch(func, args, kwargs)
        if self.recording or func in DECOMPOSITIONS:
            # What PyTorch has kept for its backward may be a real tensor that traced values were written into.
            args, kwargs = with_tensors(args, self._traced_only), with_named_tensors(kwargs, self._traced_only)
        rule = NO_DERIVATIVE.get(func)
        if rule is not None and not self._nested and rule.applies(*args, **kwargs):
            return apply_rule(rule, self.replay, func, args, kwargs, self.where)
        return self.replay(func, args, kwargs)

    @contextlib.contextmanager
    def taking_apart(self) -> Iterator[None]:
        """Code that makes one operation of others, which come here in turn."""
        self._nested += 1
        try:
            with self:
                yield
        finally:
            self._nested -= 1

    def _is_constant(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """True if the result depends on no input, on no parameter, buffer or key."""
        if self._constants.any_traced(args, kwargs):
            return False
        if is_random(func):
            return seeded_generator(self, func, kwargs) is not None
        return not self._constants.is_large(func, args, kwargs)

    def _in_pytorch(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on constants."""
        if any(isinstance(a, torch.UntypedStorage) and is_without_memory(a) for a in args):
            raise NotImplementedError(GIVES_MEMORY)
        for target in written_arguments(func, args, kwargs):
            if not self.may_write(target):
                self.take_over(target)  # which is an error
        if is_random(func):
            generator = seeded_generator(self, func, kwargs)
            assert generator is not None
            return self._constants.compute(lambda *a, **k: draw(generator, func, a, k), func, args, kwargs)
        return self._constants.compute(func, func, args, kwargs)

    def replay(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operation on traced tensors."""
        by_values = _DECIDED_BY_VALUES.get(func)
        if by_values is not None:
            return by_values(self, func, self.adopt(args[0]), *args[1:], **kwargs)
        ours = func in DECOMPOSITIONS and func.name() not in self.off
        if ours and (func not in LOWERINGS or draws_numbers(func, args, kwargs)):
            with self.taking_apart():
                return DECOMPOSITIONS[func](*args, **kwargs)
        if is_composite(func) and func not in LOWERINGS and func not in RANDOM:
            # Met inside a decomposition, where PyTorch's autograd layer no longer takes it apart.
            with self.taking_apart():
                return func.decompose(*args, **kwargs)
        kind = kind_of(func)
        if kind != "compute":
            kind = "reshape" if torch.Tag.inplace_view in func.tags else kind
            for target in written_arguments(func, args, kwargs):
                self.take_over(target)
        args, kwargs = with_tensors(args, self.adopt), with_named_tensors(kwargs, self.adopt)
        if kind == "compute":
            result = compute(self, func, args, kwargs)
            if kwargs.get("check_errors"):
                name = schema_name(func).removeprefix("aten::").lstrip("_").replace("linalg_", "linalg.")
                check_matrix(self, func, result[-1], name, is_matrix=args[0].dim() == 2)
            return result
        return _BY_KIND[kind](self, func, args, kwargs)

    def where(self, cause: BaseException | None = None) -> str:
        """The submodule and the line of its code that are running, or that raised `cause`."""
        return where_in_module(self._names, cause)

    def warn(self, what: str, remedy: str = "") -> None:
        """Once for each place."""
        place = self.where()
        if place not in self._said:
            self._said.add(place)
            warnings.warn(BridgeWarning(f"{what} {place}" + (remedy and f": {remedy}")), stacklevel=2)

    def error(self, what: str, remedy: str, cause: BaseException | None = None) -> BridgeError:
        """The error that the call ends with; it names the place where `cause` was raised, if there is one."""
        error = BridgeError(f"{what} {self.where(cause)}. Remedy: {remedy}.")
        self.failed = self.failed or error
        return error


def _each(dispatch: Dispatch, func: Any, args: tuple, kwargs: dict) -> Any:
    """An operation on lists of tensors, such as `_foreach_add`."""
    with dispatch:
        results = [one(*mine, **keywords) for one, mine, keywords in each_of(func, args, kwargs)]
    return results if returns(func) else None


_BY_KIND = {"view": make_view, "write": write_in_place, "reshape": reshape_in_place, "each": _each}
_DECIDED_BY_VALUES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: number_of,
    aten.is_nonzero.default: number_of,
    aten.equal.default: is_equal,
    aten._is_all_true.default: is_all_true,
    aten._linalg_check_errors.default: check_matrix,
    aten._has_same_storage_numel.default: lambda *_: True,  # of a tangent and its primal: they have no memory here
}
"""Operations that give PyTorch's code a number, or raise."""


# How exact products of float32 numbers are: as PyTorch's setting says, unless JAX has been told something itself.

_OF_PYTORCH = {"highest": "highest", "high": "high", "medium": "default"}
_OF_CUDA = {"tf32": "high", "bf16": "default"}


def matmul_precision() -> str:
    """The precision of float32 products in a call traced now, in JAX's words.

    `jax.default_matmul_precision` where the user has set it, otherwise `torch.get_float32_matmul_precision()`, which
    `torch.backends.cuda.matmul.allow_tf32` sets too. JAX's own default is bf16 passes on a TPU and TF32 on a GPU;
    PyTorch's is "highest".
    """
    return _of_jax() or _of_pytorch()


def _of_jax() -> str | None:
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


def _of_pytorch() -> str:
    try:
        return _OF_PYTORCH[torch.get_float32_matmul_precision()]
    except RuntimeError:  # set for CUDA alone, by the newer switch
        return _OF_CUDA.get(str(torch.backends.cuda.matmul.fp32_precision), "highest")


def precision_is_given() -> bool:
    """True if the user has set `jax.default_matmul_precision`."""
    return _of_jax() is not None


def products_of_pytorch() -> contextlib.AbstractContextManager:
    """The context of a traced call: float32 products have PyTorch's precision, unless JAX has been given one."""
    if precision_is_given():
        return contextlib.nullcontext()
    return jax.default_matmul_precision(_of_pytorch())


# ---- Python functions that a call replaces by name

_REPLACEMENTS: dict[str, Callable[..., Any]] = {}


def register_function(name: str, replacement: Callable[..., Any]) -> None:
    """Run `replacement` where code in a traced call looks up the function `name`; PyTorch's calls run it unchanged.

    `name` is `package.module:attribute`, with further attributes after dots: of a namespace that holds the function, or
    of a class. Code that has done `from package.module import f` looks it up in its own module: `own.module:f`. The
    replacement gets the same arguments, runs as the code of the module does, and may write into tensors. The module
    need not be imported yet. The last replacement for a name counts.

    Raises `ValueError` for a name of another form; a call raises `BridgeError` if the module has no such function.
    """
    check_name(name)
    _REPLACEMENTS[name] = replacement


def check_name(name: str) -> None:
    """Raise `ValueError` unless the name has the form of a function's."""
    module, _, path = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
        raise ValueError(f"{name!r} names no function; use package.module:function")


@contextlib.contextmanager
def replaced(functions: Iterable[str], active: Callable[[], Any]) -> Iterator[None]:
    """Within it the registered functions, and these, are replaced in the modules that have been imported so far.

    `active` returns the traced call of a thread: code outside of one, in other threads, runs the functions themselves.
    """
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys([*_REPLACEMENTS, *functions]):
            if name.partition(":")[0] in sys.modules:
                stack.enter_context(_place_of(name, active))
        yield


_LOCK = threading.Lock()
_PLACES: dict[str, tuple[Any, Replacements]] = {}
"""The owner of each function that was replaced so far, and what replaces it there."""


def _place_of(name: str, active: Callable[[], Any]) -> Replacements:
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
            call = active()
            function: Any = original
            if call is not None:
                function = call.functions.get(name) or _REPLACEMENTS.get(name, original)
            return function(*args, **kwargs)

        return chosen

    with _LOCK:
        if name not in _PLACES or _PLACES[name][0] is not owner:
            _PLACES[name] = owner, Replacements(Replacement(owner, attribute, make))
        return _PLACES[name][1]


# ---- the context of a traced call


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
