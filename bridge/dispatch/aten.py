"""Every ATen operation of a traced call.

`Dispatch` sits below PyTorch's own dispatcher, so composite functions, autocast, gradient mode and view rules are
PyTorch's own. What arrives here are ATen operations. Each of them makes a view or writes in place (`views.py`), draws
random numbers (`random.py`), or computes a new tensor (`computation.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import jax
import torch

from bridge._compat.jax import Tracer
from bridge._compat.torch import (
    HigherOrderOperator,
    UncompiledDispatchMode,
    is_composite,
    is_without_memory,
    lazy_conjugates,
    schema_name,
)
from bridge.autograd.nondifferentiable import NO_DERIVATIVE
from bridge.context import CallState, Options
from bridge.dispatch.computation import DEFECT_REMEDY, TRACE_ERRORS, LoweringError, compute
from bridge.dispatch.constants import BY_SHAPE, ConstantTable
from bridge.dispatch.random import RANDOM, draw, seeded_generator
from bridge.dispatch.schemas import draws_numbers, is_random, kind_of, with_numbers, with_tensors, written_arguments
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
    value_for_python,
)
from bridge.dispatch.views import GIVES_MEMORY, make_view, reshape_in_place, write_in_place
from bridge.errors import BridgeError
from bridge.lowerings import DECOMPOSITIONS, LOWERINGS
from bridge.symbolic.numbers import NUMBERS
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
            has_numbers=self.has_numbers,
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
        if self.constants.is_traced(tensor):
            return self.wrap(tensor)
        return tensor

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
            raise asks_values(self, func, args, kwargs) from error
        except Exception as error:
            # Since PyTorch 2.15 `NotImplementedError` is raised for arguments of the wrong dtype, too.
            if self._is_missing(error) and kernel_error(func, args, kwargs) is None:
                return untranslated(self, func, args, kwargs, error)
            self._raise_as_pytorch(error, func, args, kwargs)
            raise

    def _is_missing(self, error: Exception) -> TypeGuard[NotImplementedError]:
        return isinstance(error, NotImplementedError) and (self.survey or not isinstance(error, LoweringError))

    def _raise_as_pytorch(self, error: Exception, func: Any, args: tuple, kwargs: dict) -> None:
        """Raises the error of PyTorch's kernel instead of its meta device's or a lowering's error, if there is one."""
        for array in (t._handle.storage.array for t in (*self.state, *self.inputs)):
            if not isinstance(array, Tracer) and array.is_deleted():
                what = f"an array of shape {array.shape} that the call was given has been deleted"
                raise self.error(what, "pass the arrays that the call with `donate_argnums` returned") from error
        defect = isinstance(error, LoweringError)
        asks = isinstance(error, _OF_ARGUMENTS) and not isinstance(error, jax.errors.JaxRuntimeError)
        if asks and (defect or not self._nested):
            of_kernel = kernel_error(func, args, kwargs)
        else:
            of_kernel = None
        if of_kernel is not None:
            of_kernel.add_note(self.where())
            raise of_kernel from None
        if not NUMBERS.isdisjoint(map(type, (*args, *kwargs.values()))):
            raise asks_values(self, func, args, kwargs) from error
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
        if not (NUMBERS.isdisjoint(map(type, args)) and NUMBERS.isdisjoint(map(type, kwargs.values()))):
            args, kwargs = with_numbers(self, func, args, kwargs)
        for value in args:
            if type(value) in _TRACED:
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

    def number_of(self, tensor: BridgeTensor) -> Any:
        return number_of(self, aten._local_scalar_dense.default, tensor)

    def value_for_python(self, tensor: BridgeTensor) -> Any:
        return value_for_python(self, tensor)

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
        traced = self.condition is not None or self.truths
        written = traced and written_arguments(func, args, kwargs)
        if written or self.constants.any_traced(args, kwargs) or not NUMBERS.isdisjoint(map(type, kwargs.values())):
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
        if not lowered and func not in RANDOM and is_composite(func):
            # The operation occurs in a decomposition, below PyTorch's autograd layer, which would have decomposed it.
            with self.taking_apart():
                return func.decompose(*args, **kwargs)
        kind = kind_of(func)
        if kind != "compute":
            if torch.Tag.inplace_view in func.tags:
                kind = "reshape"
            for target in written_arguments(func, args, kwargs):
                self.materialize(target)
        args = with_tensors(args, self.wrap)
        if kwargs:
            kwargs = with_tensors(kwargs, self.wrap)
        if kind == "compute":
            result = compute(self, func, args, kwargs)
            if kwargs.get("check_errors"):
                name = schema_name(func).removeprefix("aten::").lstrip("_").replace("linalg_", "linalg.")
                check_matrix(self, func, result[-1], name, is_matrix=args[0].dim() == 2)
            return result
        return _BY_KIND[kind](self, func, args, kwargs)


_TRACED = NUMBERS | {BridgeTensor}
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
