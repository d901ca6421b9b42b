"""Traced numbers: what `.item()` of a traced tensor gives.

A number is a `torch.SymFloat`, `SymInt` or `SymBool`, which PyTorch accepts wherever an operation takes a number, with
a tensor without dimensions behind it. It has no gradient and promotes as Python's numbers do: PyTorch decides dtypes
with a Python number in its place, and JAX computes with a weak type. Its precision is that of the array, at least 32
bits. It counts as an instance of Python's class. Where Python or PyTorch insists on the value itself, as for a shape,
the call is asked for it (`CallState.value_for_python`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compat.jax import weakly_typed
from bridge._compat.torch import NO_TORCH_FUNCTION, in_transform
from bridge.context import CallState, current, refusal
from bridge.symbolic.ranges import distance, range_of
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.tensor import BridgeTensor, empty_meta, stop_gradient, wrap

_FORMAT_REMEDY = "return the number beside the result and format it there; `jax.debug.print` shows it in a compiled run"
_KEY_REMEDY = "torch.where, or an index into a tensor, finds an entry by a traced number"


class _Node:
    """What PyTorch asks about a number."""

    def __init__(self, tensor: BridgeTensor):
        self.tensor = tensor

    def is_int(self) -> bool:
        return self.tensor.dtype == torch.int64

    def is_bool(self) -> bool:
        return self.tensor.dtype == torch.bool

    def is_float(self) -> bool:
        return self.tensor.dtype.is_floating_point

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    is_nested_int = is_constant

    def clone(self) -> _Node:
        return self

    def maybe_as_int(self) -> None:
        """Returns nothing: the value is not known."""

    maybe_as_float = maybe_as_bool = constant_int = constant_bool = nested_int = maybe_as_int

    def guard_int(self, _file: str, _line: int) -> int:
        return int(_value(self.tensor))

    def guard_float(self, _file: str, _line: int) -> float:
        return float(_value(self.tensor))

    def guard_bool(self, _file: str, _line: int) -> bool:
        return bool(_value(self.tensor))

    def str(self) -> str:
        return "a traced number"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        _value(self.tensor)  # PyTorch computes a shape from the number
        raise refusal("a traced number decides a shape", "use a Python number")


def _value(tensor: BridgeTensor) -> Any:
    """Returns the value that Python, or code in C++, asks for. Raises `BridgeError` if it is not known."""
    return _call().value_for_python(tensor)


def _call() -> CallState:
    call = current()
    if call is None:
        raise refusal("a traced number is used after the call that made it", "return it from the call")
    return call


# ---- making numbers


def number_behind(tensor: BridgeTensor) -> Any:
    """Returns the number that `tensor.item()` gives now; a later write into the tensor does not change it."""
    dtype = tensor.dtype
    if dtype.is_floating_point:
        kind: Any = FloatNumber
        dtype = torch.promote_types(dtype, torch.float32)
    elif dtype == torch.bool:
        kind = BoolNumber
    else:
        kind = IntNumber
        dtype = torch.int64
    array = jnp.reshape(stop_gradient(tensor.value), ()).astype(jax_dtype(dtype))
    made = wrap(array, empty_meta((), None, dtype), live=False)
    _call().has_numbers = True
    if kind is IntNumber:
        made._handle.storage.bounds = range_of(tensor)
    return kind(_Node(made))


@contextlib.contextmanager
def _arithmetic() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", enabled=False), _call().taking_apart():
        yield


def computed(function: Callable[..., torch.Tensor], *operands: Any) -> Any:
    """Returns the number that a function of tensors gives for numbers."""
    with _arithmetic():
        return number_of(function(*map(as_operand, operands)))


def number_of(tensor: torch.Tensor) -> Any:
    """Returns the number in a tensor of one element: a traced one, or Python's for a constant."""
    if isinstance(tensor, BridgeTensor):
        return number_behind(tensor)
    return tensor.item()


def as_operand(value: Any) -> Any:
    """Returns the tensor behind a number, and anything else unchanged."""
    if type(value) in NUMBERS:
        return value.node.tensor
    return value


def same_number(number: Any) -> Any:
    """Returns the number as one of ours; PyTorch's code in C++ makes another object of it."""
    kind = _OF_PYTORCH.get(type(number))
    if kind is None:
        return number
    return kind(number.node)


def over(number: Any, tensor: BridgeTensor) -> Any:
    """Returns a number of the same class over another tensor."""
    return type(number)(_Node(tensor))


def as_tensor(number: Any) -> torch.Tensor:
    """Returns the tensor that `torch.tensor(number)` gives."""
    tensor = number.node.tensor
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.get_default_dtype())
    return tensor


def weak_array(number: Any) -> jax.Array:
    """Returns the array of a number, which does not decide the dtype of a result."""
    return weakly_typed(number.node.tensor.value)


def of_class(number: Any) -> Any:
    """Returns a number of Python's of the same class."""
    return _TWINS[type(number)]


def as_float(value: Any) -> Any:
    """Returns `float(value)` of a number or a tensor of one element."""
    return computed(lambda x: x.reshape(()).to(_float_dtype(x)), value)


def _to_int(function: Callable[..., torch.Tensor]) -> Callable[[Any], Any]:
    """Returns the function of a number or a tensor of one element for one of tensors that rounds."""
    return functools.partial(computed, lambda x: function(_whole(x.reshape(()))).to(torch.int64))


def numbers_in(values: Any) -> list[Any]:
    """Returns the numbers among the arguments of an operation, also in lists."""
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += numbers_in(value)
        elif type(value) in NUMBERS:
            found.append(value)
    return found


def refuse_numbers(values: list | tuple) -> None:
    """Raises `BridgeError` for a number in a list, which is a shape or names dimensions."""
    for value in values:
        if type(value) in NUMBERS:
            _value(as_operand(value))


def _float_dtype(tensor: torch.Tensor) -> torch.dtype:
    if tensor.dtype.is_floating_point:
        return tensor.dtype
    return torch.get_default_dtype()


# ---- functions of Python's that insist on the value

_UNARY = "sqrt exp exp2 expm1 log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh erf erfc isnan isinf isfinite"
_BINARY = "pow atan2 fmod copysign hypot"
_ROUNDING = "floor ceil trunc"
MATHEMATICS = frozenset({"log", "fabs", *_UNARY.split(), *_BINARY.split(), *_ROUNDING.split()})
"""The names of functions in the module `math` that numbers have, too."""


def _logarithm(x: Any, base: Any = None) -> torch.Tensor:
    if base is None:
        return torch.log(x)
    return torch.log(torch.as_tensor(x)) / torch.log(torch.as_tensor(base))


def _in_floats(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Returns the function of numbers for one of tensors that computes in floating point."""

    def run(*operands: Any) -> Any:
        return function(*(torch.as_tensor(each).to(_float_dtype(torch.as_tensor(each))) for each in operands))

    return functools.partial(computed, run)


def extreme(function: Callable[..., Any], items: Iterable[Any]) -> Any:
    """Returns what `max` or `min` gives, which is the first of the largest or least numbers."""
    better = operator.gt if function is max else operator.lt

    def chosen(a: Any, b: Any) -> torch.Tensor:
        return torch.where(torch.as_tensor(better(b, a)), b, a)

    whole = greatest if function is max else least
    items = list(items)
    choose = whole if all(isinstance(item, int) for item in items) else functools.partial(computed, chosen)
    return functools.reduce(choose, items)


def greatest(a: Any, b: Any) -> Any:
    """Returns the larger one of two integers."""
    return computed(lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)), a, b)


def least(a: Any, b: Any) -> Any:
    """Returns the smaller one of two integers."""
    return computed(lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)), a, b)


def _range(*ends: Any) -> Any:
    """Returns the numbers of `range(i, i + n)`, whose length is known; any other range asks for the value."""
    start = as_operand(ends[0])
    length = distance(as_operand(ends[1]), start) if len(ends) == 2 else None
    if length is None:
        return range(*ends)
    return [computed(lambda first, i=i: first + i, start) for i in range(length)]


IN_PLACE_OF: dict[int, tuple[Callable[..., Any], int]] = {
    id(float): (as_float, 1),
    id(int): (_to_int(torch.trunc), 1),
    id(range): (_range, 3),
    id(math.log): (_in_floats(_logarithm), 2),
    **{id(getattr(math, name)): (_to_int(getattr(torch, name)), 1) for name in _ROUNDING.split()},
    id(math.fabs): (_in_floats(torch.abs), 1),
    **{id(getattr(math, name)): (_in_floats(getattr(torch, name)), 1) for name in _UNARY.split()},
    **{id(getattr(math, name)): (_in_floats(getattr(torch, name)), 2) for name in _BINARY.split()},
}
"""`id` of a function of Python's -> the function of traced numbers, and the largest number of its arguments."""


# ---- arithmetic


def _whole(operand: Any) -> Any:
    """Returns an operand of arithmetic, in which a bool is an integer."""
    if isinstance(operand, torch.Tensor):
        return operand.to(torch.int64) if operand.dtype == torch.bool else operand
    return int(operand) if isinstance(operand, bool) else operand


def _power(base: Any, exponent: Any) -> Any:
    """Returns `base**exponent`; of integers, Python gives a float if the exponent is negative."""
    whole = all(isinstance(each, int) or range_of(each).root is not None for each in (base, exponent))
    if not whole or range_of(exponent).low >= 0:
        return base**exponent
    if isinstance(exponent, int):
        return base.to(torch.get_default_dtype()) ** exponent
    what = "an integer has a traced power that may be negative, so that Python may give an integer or a float"
    raise refusal(what, "`2.0**n`, which is a float; or `.clamp(min=0)` before `.item()`")


def _binary(function: Callable[[Any, Any], Any], counts: bool = True) -> Callable[[Any, Any], Any]:
    """Returns the method of an operator. `counts`: a bool is an integer in it."""

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        if counts:
            return computed(lambda a, b: function(_whole(a), _whole(b)), self, other)
        return computed(function, self, other)

    return method


def _reflected(function: Callable[[Any, Any], Any], counts: bool = True) -> Callable[[Any, Any], Any]:
    return _binary(lambda a, b: function(b, a), counts)


def _unary(function: Callable[[Any], Any], dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return computed(lambda x: function(_whole(x)).to(dtype or x.dtype), self)

    return method


def _round(self: Any, digits: int | None = None) -> Any:
    if digits is None:
        return computed(lambda x: _whole(x).round().to(torch.int64), self)
    return computed(lambda x: _whole(x).round(decimals=digits), self)


def _is_whole(self: Any) -> Any:
    return computed(lambda x: _whole(x) == _whole(x).trunc(), self)


def _itself(self: Any, _memo: Any = None) -> Any:
    return self


def _of_numpy(self: Any, function: Any, method: str, *values: Any, **options: Any) -> Any:
    """Returns what a function of NumPy gives, by the function of PyTorch with its name."""
    name = function.__name__
    counterpart = getattr(torch, name, None)
    values = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
    plain = method == "__call__" and not options and all(isinstance(value, (int, float)) for value in values)
    if not plain or counterpart is None:
        raise refusal(f"`numpy.{name}` asks for a traced number", f"a function of PyTorch, such as `torch.{name}`")
    return computed(lambda *tensors: counterpart(*map(torch.as_tensor, tensors)), *values)


def _asks(kind: type) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return kind(_value(self.node.tensor))

    return method


def _refuses(what: str, remedy: str) -> Callable[..., Any]:
    def method(self: Any, *_: Any) -> Any:
        raise refusal(what, remedy)

    return method


def _shown(self: Any) -> str:
    return f"{type(self).__name__}(traced)"


_format = _refuses("a traced number is formatted", _FORMAT_REMEDY)


class _Number:
    """The methods of a number."""

    node: _Node

    __add__ = _binary(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _binary(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _binary(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = _binary(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __pow__ = _binary(_power)
    __rpow__ = _reflected(_power)
    __and__ = _binary(operator.and_, counts=False)
    __rand__ = _reflected(operator.and_, counts=False)
    __or__ = _binary(operator.or_, counts=False)
    __ror__ = _reflected(operator.or_, counts=False)
    __xor__ = _binary(operator.xor, counts=False)
    __rxor__ = _reflected(operator.xor, counts=False)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    __trunc__ = _unary(torch.trunc, torch.int64)
    __floor__ = _unary(torch.floor, torch.int64)
    __ceil__ = _unary(torch.ceil, torch.int64)
    __round__ = _round
    is_integer = _is_whole
    conjugate = __copy__ = __deepcopy__ = _itself

    __bool__ = _asks(bool)
    __float__ = _asks(float)
    __int__ = __index__ = _asks(int)
    __complex__ = _asks(complex)

    __format__ = __str__ = _format
    __repr__ = _shown
    __hash__ = _refuses("a traced number is a key of a dict or a member of a set", _KEY_REMEDY)
    __reduce_ex__ = _refuses("a traced number is pickled", "return it, and pickle the result")
    __array_ufunc__ = _of_numpy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs a function of PyTorch in which a number stands for a tensor, which PyTorch calls this method for."""
        call = _call()
        kwargs = kwargs or {}
        if call.recording or in_transform():  # formulas of gradients would keep a tensor that has forgotten its number
            args = tuple(map(as_operand, args))
            kwargs = {name: as_operand(value) for name, value in kwargs.items()}
        return NO_TORCH_FUNCTION(func, types, args, kwargs)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self


class FloatNumber(_Number, torch.SymFloat):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A float whose value is traced."""

    __class__ = property(lambda _: float)  # pyright: ignore[reportAssignmentType]


class IntNumber(_Number, torch.SymInt):  # pyright: ignore[reportIncompatibleMethodOverride]
    """An int whose value is traced."""

    __class__ = property(lambda _: int)  # pyright: ignore[reportAssignmentType]


class BoolNumber(_Number, torch.SymBool):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A bool whose value is traced."""

    __class__ = property(lambda _: bool)  # pyright: ignore[reportAssignmentType]


_TWINS = {FloatNumber: 1.0, IntNumber: 1, BoolNumber: True, torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}
_OF_PYTORCH: dict[type, Any] = {torch.SymFloat: FloatNumber, torch.SymInt: IntNumber, torch.SymBool: BoolNumber}
NUMBERS = frozenset(_TWINS)
"""The classes of traced numbers, and those that PyTorch makes of them where its code in C++ passes one on."""
