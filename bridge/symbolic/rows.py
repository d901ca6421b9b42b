"""Rows whose number depends on data, as `x[mask]` and `x[:n]` have them.

`Rows` is a tensor with all elements, and a mask that says which of them PyTorch would have. Functions that compute each
element by itself are handled here, all others in `row_functions.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bridge._compat.jax import same_values
from bridge._compat.torch import UncompiledDispatchMode, in_transform, make_wrapper, schema_name
from bridge.context import refusal
from bridge.errors import BridgeError
from bridge.symbolic.constants import as_constant
from bridge.symbolic.numbers import as_operand, number_of
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten
SHAPE_REMEDY = "keep shapes independent of data: torch.where for a branch, a mask and a sum for a selection"
LENGTH_REMEDY = "give attention keys and values of this length, or mask the whole buffer by torch.arange(size) < n"


ONE_MASK = "compute the mask once and use it on both sides, or choose with torch.where"
_DROPOUT_REMEDY = "drop before the selection, or set p to 0: as many numbers are drawn as there are rows"
_NUMBER_REMEDY = (
    "mask.to(torch.uint8).argmax() is the place of the only true element and works as an index; "
    "torch.where(mask, x, 0).sum() is the only element of x[mask]; torch.stack makes one tensor of a list of them"
)
_ELEMENTWISE = {
    aten._to_copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.copy_.default,
    aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor,
    aten.floor_divide.default, aten.floor_divide.Scalar, aten.floor_divide_.Tensor, aten.floor_divide_.Scalar,
}  # fmt: skip
"""Elementwise operations besides those that PyTorch calls pointwise."""
_NUMBERS = {
    torch.is_nonzero, torch.Tensor.is_nonzero, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__int__,
    torch.Tensor.__float__, torch.Tensor.__complex__, torch.Tensor.__bool__, torch.Tensor.__index__,
}  # fmt: skip
"""Functions of a tensor with one element that return its number."""
_OF_EVERY_ROW = {
    "dtype",
    "device",
    "requires_grad",
    "layout",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_nested",
    "itemsize",
}
"""Attributes that rows share with the tensor of all rows."""

FUNCTIONS: dict[Any, Callable] = {}
"""Function of PyTorch -> what to call with it and with its arguments, among which there are rows."""


def handles(*functions: Callable) -> Callable[[Callable], Callable]:
    """Enters a function of `(func, *args, **kwargs)` into `FUNCTIONS`."""

    def enter(handler: Callable) -> Callable:
        FUNCTIONS.update(dict.fromkeys(functions, handler))
        return handler

    return enter


def refused(what: str, remedy: str = SHAPE_REMEDY, rows: str = "x[mask]", made: str = "") -> BridgeError:
    """Returns the error for `what`, which needs the number of rows."""
    return refusal(f"`{rows}` makes a shape that depends on data, which {what} needs{made}", remedy)


class Rows(torch.Tensor):
    """The rows of `whole` that a mask selects; a subclass of tensors, so that code which checks types finds one.

    PyTorch's own record of it has all rows, and no operation of PyTorch ever computes with it: `__torch_function__` is
    asked first, and knows the function or refuses it.
    """

    whole: Any
    """All rows. What the mask leaves out is 1, or computed from 1; nothing may depend on it."""
    mask: Any
    """True for the rows that PyTorch would have; of shape (rows,)."""
    first: int
    """The dimension of the rows."""
    made: str
    """The place where the code has made them."""
    length: Any
    """The length n of `x[:n]`, of which one size is traced; None for rows by a mask."""
    origin: Any
    """The mask as the code has it, perhaps of several dimensions; None once the rows have been combined."""
    are_places: bool
    """True for a result of `torch.where(mask)`: the places of the origin's true elements."""

    @property
    def behind(self) -> int:
        """The number of dimensions after that of the rows."""
        return self.whole.dim() - 1 - self.first

    @property
    def shape(self) -> tuple:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The shape with the traced number of rows, which a `torch.Size` cannot hold."""
        sizes = [*self.whole.shape]
        return (*sizes[: self.first], self.count(), *sizes[self.first + 1 :])

    def count(self) -> Any:
        """Returns the traced number of rows; with it, `torch.ones` and its like make other rows of the same mask."""
        if self.length is not None:
            return self.length
        number = number_of(self.mask.sum())
        as_operand(number).rows_mask = self.mask
        return number

    def like(self, whole: torch.Tensor, first: int | None = None) -> Rows:
        """Returns rows by the same mask."""
        return rows_of(whole, self.mask, self.first if first is None else first, self.made, self.length, self.origin)

    def wide(self) -> torch.Tensor:
        """Returns the mask with dimensions of size 1 after its own, as many as `whole` has behind the rows."""
        return self.mask[(..., *[None] * self.behind)]

    def only(self, otherwise: Any) -> torch.Tensor:
        """Returns all rows, with a number in place of those that the mask leaves out."""
        return torch.where(self.wide(), self.whole, torch.full((), otherwise, dtype=self.dtype))

    def selects_as(self, other: Rows) -> bool:
        """True if both are known to be the same rows of as many."""
        if self.mask is other.mask:
            return True
        if (self.length is None) is not (other.length is None) or self.mask.shape != other.mask.shape:
            return False
        selectors = (each.mask if each.length is None else each.length for each in (self, other))
        return same_values(*(each.value for each in selectors))

    def refused(self, what: str, remedy: str = "", made: str = "") -> BridgeError:
        """Returns the error for `what`, which needs the number of rows."""
        if self.length is not None:
            return refused(what, remedy or LENGTH_REMEDY, "x[:n]", made)
        return refused(what, as_constant(self.mask.value, remedy or SHAPE_REMEDY), made=made)  # pyright: ignore

    def __iter__(self) -> Any:
        return FUNCTIONS[torch.Tensor.__iter__](torch.Tensor.__iter__, self)

    def __len__(self) -> int:  # here, so that no code of PyTorch's is between this and the code that asks
        return FUNCTIONS[torch.Tensor.__len__](torch.Tensor.__len__, self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"rows of {self.whole!r}"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if in_transform():
            raise refused(f"`{func.__name__}`")
        special = FUNCTIONS.get(func)
        if special is not None:
            return special(func, *args, **kwargs)
        if func.__name__ == "__get__":
            return _attribute(func, args[0])
        return elementwise(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raise refused(f"`{func.name()}`")


def rows_of(
    whole: torch.Tensor,
    mask: torch.Tensor,
    first: int,
    made: str,
    length: Any = None,
    origin: Any = None,
    are_places: bool = False,
) -> Rows:
    """Makes `Rows`, whose attributes these are."""
    rows: Any = make_wrapper(Rows, whole.shape, dtype=whole.dtype)
    rows.whole = whole
    rows.mask = mask
    rows.first = first
    rows.made = made
    rows.length = length
    rows.origin = origin
    rows.are_places = are_places
    return rows


def ranks(mask: torch.Tensor) -> torch.Tensor:
    """Returns the place of each row among those that the mask selects."""
    return mask.cumsum(0) - 1


def _attribute(func: Any, rows: Rows) -> Any:
    name = func.__self__.__name__
    if name not in _OF_EVERY_ROW:
        raise rows.refused(f"`.{name}`")
    return getattr(rows.whole, name)


def elementwise(func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs a function, which has to consist of elementwise operations, on all rows."""
    name = f"`{func.__name__}`"
    among = [value for value in (*args, *kwargs.values()) if type(value) is Rows]
    if not among:  # they are in a list
        raise refused(name)
    rows = max(among, key=torch.Tensor.dim)
    if func in _NUMBERS:
        raise rows.refused(name, _NUMBER_REMEDY)
    args = tuple(whole_of(rows, value, name) for value in args)
    kwargs = {key: whole_of(rows, value, name) for key, value in kwargs.items()}
    with _ElementwiseOnly(
        lambda: rows.refused(name, _DROPOUT_REMEDY * ("dropout" in name)), [each.whole for each in among]
    ):
        result = func(*args, **kwargs)
    if not isinstance(result, torch.Tensor) or result.dim() <= rows.behind:
        raise rows.refused(name)
    made = rows.like(result, result.dim() - 1 - rows.behind)
    return made if any(_memory(result) is _memory(each.whole) for each in among) else settled(made)


def settled(rows: Rows) -> Rows:
    """Returns the rows with ones again where the mask leaves them out.

    There a function may have made infinity or NaN, and a gradient of zero times infinity would reach its operands.
    """
    if rows.length is None and rows.dtype.is_floating_point:
        return rows.like(rows.only(1))
    return rows


def _memory(tensor: Any) -> Any:
    if isinstance(tensor, BridgeTensor):
        return tensor._handle.storage
    return tensor


def whole_of(rows: Rows, value: Any, name: str) -> Any:
    """Returns the operand for all rows, which are broadcast from the last dimension."""
    if type(value) is Rows:
        if value.behind != rows.behind or not rows.selects_as(value):
            raise rows.refused(f"{name} of rows by two masks", ONE_MASK)
        # Attention handles `x[:n]` by itself; elsewhere the other rows would be arbitrary content of the buffer.
        if value.length is None:
            return value.whole
        return value.only(1)
    if isinstance(value, torch.Tensor) and value.dim() > rows.behind and value.shape[-1 - rows.behind] != 1:
        raise rows.refused(f"{name} beside a tensor with rows of its own")
    return value


class _ElementwiseOnly(UncompiledDispatchMode):
    """Refuses operations that are not elementwise, and those that write into anything but `wholes`."""

    def __init__(self, error: Callable[[], BridgeError], wholes: list[torch.Tensor]):
        super().__init__()
        self._error = error
        self._wholes = wholes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_elementwise = torch.Tag.pointwise in func.tags or func in _ELEMENTWISE
        elsewhere = schema_name(func).endswith("_") and all(args[0] is not whole for whole in self._wholes)
        if not is_elementwise or elsewhere or "out" in kwargs:
            raise self._error()
        return func(*args, **kwargs)
