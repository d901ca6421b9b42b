"""`x[mask]` by a mask that is traced: how many rows it selects is not known, and elementwise operations do not need it.

They run on all rows here, until `x[mask] = …` writes the selected ones or a sum or mean is taken of them. Rows that the
mask leaves out are ones, which come in by a `where` and leave by another, so nothing of them is in a result or a
gradient. What needs the number of rows is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from bridge._compat.jax import Tracer, same_values
from bridge._compat.torch import UncompiledDispatchMode, below_modes, in_transform
from bridge.errors import BridgeError, refusal
from bridge.indexing import is_traced_place, places_of
from bridge.lowerings import FUNCTIONS
from bridge.operations import written_arguments
from bridge.tensors import BridgeTensor
from bridge.untranslated import SHAPE_REMEDY

aten = torch.ops.aten

_ELEMENTWISE = {aten._to_copy.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default}
"""Operations beside those that PyTorch calls pointwise."""
_SUMS = (torch.sum, torch.Tensor.sum)
_MEANS = (torch.mean, torch.Tensor.mean)
_ONE_MASK = "compute the mask once and use it on both sides, or choose with torch.where"


class MaskedRows:
    """What is a tensor in PyTorch: the elements of `whole` that the mask selects.

    `behind`: how many dimensions of `whole` come after those of the mask. `place`: where the code has read them.
    """

    def __init__(self, whole: torch.Tensor, mask: BridgeTensor, behind: int, place: str):
        self.whole, self._mask, self._behind, self._place = whole, mask, behind, place

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # No answer is right: code may take another branch for what is no tensor, and C++ code crashes on what is none.
        raise refused(f"a result, or a check of its type, {self._place}")

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device"):
            return getattr(self.whole, name)
        if name.startswith("__"):
            raise AttributeError(name)
        raise refused(f"`.{name}`")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__setitem__ and type(args[2]) is cls and type(args[0]) is not cls:
            return args[2]._write(args[0], args[1])
        if func in (*_SUMS, *_MEANS) and len(args) == 1 and kwargs.keys() <= {"dtype"}:
            return args[0]._total(func, kwargs.get("dtype"))
        rows = [v for v in (*args, *kwargs.values()) if type(v) is cls]
        op = FUNCTIONS.get(func)
        if not rows or in_transform() or (op is not None and torch.Tag.pointwise not in op.tags):
            raise refused(f"`{func.__name__}`")
        return rows[0]._elementwise(rows, func, args, kwargs)

    def _elementwise(self, rows: list[MaskedRows], func: Any, args: tuple, kwargs: dict) -> Any:
        """`func`, which has to be made of elementwise operations, on the whole tensors."""
        others = [v for v in (*args, *kwargs.values()) if type(v) is not MaskedRows and isinstance(v, torch.Tensor)]
        dtypes = [v.dtype for v in rows] + [v.dtype for v in others if v.dim()]
        whole = functools.partial(self._whole_of, func, functools.reduce(torch.promote_types, dtypes))
        args, kwargs = tuple(map(whole, args)), {key: whole(value) for key, value in kwargs.items()}
        try:
            with _ElementwiseOnly(func, [each.whole for each in rows]):
                result = func(*args, **kwargs)
        except RuntimeError as error:  # such as PyTorch's for the truth of several numbers
            raise error if isinstance(error, BridgeError) else refused(f"`{func.__name__}`") from error
        for each in rows:
            if result is each.whole:
                return each
        if not isinstance(result, torch.Tensor) or result.dim() < self._behind + self._mask.dim():
            raise refused(f"`{func.__name__}`")
        return MaskedRows(result, self._mask, self._behind, self._place)

    def _whole_of(self, func: Any, common: torch.dtype, value: Any) -> Any:
        """An operand for all rows. `common`: the dtype of the operands that have dimensions, which the rest follows."""
        if type(value) is MaskedRows:
            if not same_values(value._mask.value, self._mask.value) or value._behind != self._behind:
                where = f", read {self._place} and {value._place}" if value._place != self._place else ""
                raise refused(f"`{func.__name__}` of rows by two masks{where}", _ONE_MASK)
            return value.whole
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() > self._behind:
            raise refused(f"`{func.__name__}` beside a tensor with rows of its own")
        if not value.dim() and torch.result_type(torch.empty(1, dtype=common), value) == common:
            value = value.to(common)
        return _selected(self._mask, self._behind, value, 1)

    def _write(self, target: torch.Tensor, index: Any) -> None:
        """`target[index] = self`, where the index has the mask of `self`."""
        view, mask, behind = mask_in(target, index) or (target, None, 0)
        if mask is None or not same_values(mask.value, self._mask.value) or behind != self._behind:
            raise refused("an assignment by another mask", _ONE_MASK)
        if target.dtype != self.dtype:
            with below_modes():  # PyTorch's error; a single value would be cast
                torch.zeros(2, dtype=target.dtype)[torch.ones(2, dtype=torch.bool)] = torch.zeros(2, dtype=self.dtype)
        view.copy_(torch.where(_wide(mask, behind), self.whole, view))

    def _total(self, func: Any, dtype: torch.dtype | None) -> torch.Tensor:
        """The sum or mean of all that is selected."""
        selected = _selected(self._mask, self._behind, self.whole, 0)
        result = self.dtype if dtype is None else dtype
        if func in _SUMS or not (result.is_floating_point or result.is_complex):
            return func(selected, dtype=dtype)
        count = self._mask.sum() * (selected.numel() // self._mask.numel())
        return (selected.to(result).sum(dtype=torch.promote_types(result, torch.float32)) / count).to(result)


class _ElementwiseOnly(UncompiledDispatchMode):
    """Refuses operations that are not elementwise, and those that write anything else than `wholes`."""

    def __init__(self, func: Any, wholes: list[torch.Tensor]):
        super().__init__()
        self._func, self._wholes = func, wholes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        elementwise = torch.Tag.pointwise in func.tags or func in _ELEMENTWISE
        written = written_arguments(func, args, kwargs)
        if not elementwise or any(all(target is not whole for whole in self._wholes) for target in written):
            raise refused(f"`{self._func.__name__}`")
        return func(*args, **kwargs)


def refused(what: str, remedy: str = SHAPE_REMEDY) -> BridgeError:
    """The error for `what`, which needs the number of rows."""
    return refusal(f"`x[mask]` makes a shape that depends on data, which {what} needs", remedy)


def is_mask(place: Any) -> bool:
    return isinstance(place, BridgeTensor) and place.dtype == torch.bool and bool(place.dim())


def rows_by_mask(tensor: torch.Tensor, index: Any, place: str) -> MaskedRows | None:
    """`tensor[index]` by one traced mask among integers and slices; None for another index."""
    known = mask_in(tensor, index)
    if known is None or not isinstance(known[1].value, Tracer):
        return None
    view, mask, behind = known
    return MaskedRows(_selected(mask, behind, view, 1), mask, behind, place)


def mask_in(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, BridgeTensor, int] | None:
    """The view that a mask in `tensor[index]` selects from, the mask, and how many dimensions come after it."""
    places = places_of(index)
    masks = [i for i, place in enumerate(places) if is_mask(place)]
    if len(masks) != 1 or not all(i in masks or _is_basic(place) for i, place in enumerate(places)):
        return None
    mask, before, after = places[masks[0]], places[: masks[0]], places[masks[0] + 1 :]
    view = tensor[(*before, *[slice(None)] * mask.dim(), *after)]
    dims_before, dims_after = (sum(p is None or isinstance(p, slice) for p in part) for part in (before, after))
    behind = dims_after if any(p is Ellipsis for p in before) else view.dim() - dims_before - mask.dim()
    first = view.dim() - behind - mask.dim()
    return (view, mask, behind) if mask.shape == view.shape[first : first + mask.dim()] else None


def _is_basic(place: Any) -> bool:
    return (
        place is None or place is Ellipsis or isinstance(place, slice) or type(place) is int or is_traced_place(place)
    )


def _selected(mask: torch.Tensor, behind: int, value: torch.Tensor, otherwise: int) -> torch.Tensor:
    return torch.where(_wide(mask, behind), value, torch.full((), otherwise, dtype=value.dtype))


def _wide(mask: torch.Tensor, behind: int) -> torch.Tensor:
    return mask[(..., *[None] * behind)]


def _method(function: Callable) -> Callable:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.overrides.handle_torch_function(function, (self,), self, *args, **kwargs)

    return method


def add_methods(cls: type) -> None:
    """Give a class that stands for a tensor all methods of tensors, as calls of its `__torch_function__`."""
    for name in dir(torch.Tensor):
        function = getattr(torch.Tensor, name)
        of_every_object = name in vars(cls) or name in ("__dir__", "__hash__", "__new__", "__repr__")
        if callable(function) and not of_every_object and function is not getattr(object, name, None):
            setattr(cls, name, _method(function))


add_methods(MaskedRows)
