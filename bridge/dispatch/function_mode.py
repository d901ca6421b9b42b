"""Python functions of PyTorch that must be caught before it decomposes them, or that never reach its dispatcher."""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bridge._compat.flex import FLEX_ATTENTION
from bridge._compat.jax import Tracer
from bridge._compat.torch import (
    below_modes,
    casts_under_autocast,
    engine_requires_grad,
    in_transform,
    tree_map_only,
    wrapped_by_transform,
)
from bridge.autograd import engine
from bridge.context import CURRENT, CallState
from bridge.dispatch.assignments import TracedArray, is_assigning, replace_assignments
from bridge.dispatch.flex import flex_attention
from bridge.dispatch.schemas import with_tensors
from bridge.dispatch.values import CHECKING
from bridge.errors import WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY
from bridge.lowerings import DECOMPOSITIONS, FUNCTIONS
from bridge.symbolic.numbers import NUMBERS, as_operand, as_tensor, same_number
from bridge.symbolic.places import (
    conditions_among,
    is_mask,
    is_prefix,
    is_traced_number,
    is_traced_place,
    is_whole,
    is_window,
    place_of_tensors,
    places_of,
    selected,
)
from bridge.symbolic.row_functions import WHOLE
from bridge.symbolic.rows import Rows, ranks, refused, rows_of
from bridge.symbolic.selections import positions_of, rows_by_length, rows_by_mask, sized
from bridge.tensor.arrays import tensor_of
from bridge.tensor.pytrees import TRACED_NUMBERS
from bridge.tensor.tensor import BridgeTensor

_GRADIENT_HOOKS = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)
_MEMORY = (
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.__dlpack__,
    torch.Tensor.__dlpack_device__,
)
_CLASSES_OF_CALLS = (torch.Tensor, *TRACED_NUMBERS)
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
"""Under autocast PyTorch would decompose the operation for the bridge, with products in float32."""
_CONSTRUCTORS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)

_FILLERS = {torch.full: 1, torch.full_like: 1, torch.Tensor.new_full: 2, torch.scalar_tensor: 0}
"""Functions that fill a tensor -> position of the number among their arguments."""
_NAMES_OF_NUMBERS = ("fill_value", "s")
_SIZED = {
    **dict.fromkeys((torch.ones, torch.zeros, torch.full), 0),
    **dict.fromkeys((torch.Tensor.new_ones, torch.Tensor.new_zeros, torch.Tensor.new_full), 1),
}
"""Functions that make a tensor of a size -> the number of arguments before the size."""
_FORGOTTEN: dict[Any, str] = {F.l1_loss: "weight", torch.chain_matmul: "out"}
_HOOK_REMEDY = "write what the hook does as the backward of a torch.autograd.Function, or leave it out"


class Functions(TorchFunctionMode):
    """The mode that is active beside `Dispatch`."""

    def __init__(self, dispatch: CallState):
        super().__init__()
        self._dispatch = dispatch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = with_tensors(args, self._traced_tensor)
        kwargs = with_tensors(kwargs, self._traced_tensor) if kwargs else {}
        for cls in types:
            if cls is Rows or not issubclass(cls, _CLASSES_OF_CALLS):
                return self._by_other_classes(func, types, args, kwargs)
        op = FUNCTIONS.get(func)
        if op is not None and self._dispatch.options.lowerings.get(op.name(), op) is not None:
            return self._whole(func, op, types, args, kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        if kwargs:
            return self._plain(func, args, kwargs)
        return func(*args)

    def _of_our_tensor(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Answers questions to which PyTorch's engine or memory would give a wrong answer of its own."""
        tensor = args[0]
        if type(tensor) is BridgeTensor:
            return _OF_OUR_TENSORS[func](*args, **kwargs)
        if func in _MAKE_TRACED and not wrapped_by_transform(tensor) and self._makes_traced(func, args, kwargs):
            twin = self._dispatch.materialize(tensor)
            if _OF_OUR_TENSORS[func](twin, *args[1:], **kwargs) is twin:
                return tensor
            return None
        return func(*args, **kwargs)

    def _dropout(self, func: Any, args: tuple, kwargs: dict) -> Any:
        by_number = all(type(v) not in _TRACED for v in (*args[1:], *kwargs.values()))
        if by_number:
            return func(*args, **kwargs)
        return _dropout_by_traced_number(*args, **kwargs)

    def _batch_norm(self, func: Any, args: tuple, kwargs: dict) -> Any:
        given = inspect.signature(func).bind(*args, **kwargs)
        momentum = given.arguments.get("momentum")
        if type(momentum) not in _TRACED:
            return func(*args, **kwargs)
        return _batch_norm_by_traced_number(func, given.arguments, momentum)

    def _pad(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `F.pad`, which insists on Python's number, by the operation that it runs for a constant."""
        x, pad, mode, value = inspect.signature(_padded).bind(*args, **kwargs).args
        if type(value) not in _TRACED or mode != "constant":
            return func(*args, **kwargs)
        return torch.constant_pad_nd(x, pad, value)

    def _by_other_classes(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """The result of a class that is no tensor and has a `__torch_function__`, or PyTorch's error if none knows."""
        op = FUNCTIONS.get(func)
        if Rows in types:
            self._refuse_forgotten(func)
            if func not in WHOLE and op not in (None, _ATTENTION) and torch.Tag.pointwise not in op.tags:
                raise refused(f"`{func.__name__}`")  # its lowering would see all rows
            types = (Rows, *(cls for cls in types if cls is not Rows))  # numbers beside them are their operands
        for cls in types:
            with self:
                result = cls.__torch_function__(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _plain(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs.get("requires_grad") is True:  # `torch.zeros(3, requires_grad=True)`
            return self._dispatch.wrap(func(*args, **(kwargs | {"requires_grad": False}))).requires_grad_()
        return func(*args, **kwargs)

    def _whole(self, func: Any, op: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """Runs the lowering of `op` for a function of `FUNCTIONS`, unless a layer of PyTorch has to see it first."""
        if not args:  # PyTorch has two names for what operations call `self`
            name = next((n for n in ("input", "tensor") if n in kwargs), None)
            args = () if name is None else (kwargs[name],)
            kwargs = {k: v for k, v in kwargs.items() if k != name}
        autocast = torch.is_autocast_enabled("cpu") and casts_under_autocast(op)
        if autocast and op is not _ATTENTION:
            return func(*args, **kwargs)
        if in_transform() or self._dispatch.recording:
            made_of = None if autocast else DECOMPOSITIONS.get(op)
            return (made_of or func)(*args, **kwargs)
        if not autocast:
            return self._dispatch.__torch_dispatch__(op, types, args, kwargs)
        dtype = torch.get_autocast_dtype("cpu")
        args, kwargs = tree_map_only(torch.Tensor, lambda t: _under_autocast(t, dtype), (args, kwargs))
        with torch.autocast("cpu", enabled=False):
            return self._dispatch.__torch_dispatch__(op, types, args, kwargs)

    def _flex_attention(self, func: Any, args: tuple, kwargs: dict) -> Any:
        with self:
            return flex_attention(*args, **kwargs)

    def _hook(self, func: Any, args: tuple, kwargs: dict) -> Any:
        raise self._dispatch.error(f"`{func.__name__}` needs the gradients of PyTorch's engine", _HOOK_REMEDY)

    def _engine(self, func: Any, args: tuple, kwargs: dict) -> Any:
        return engine.ENGINE_CALLS[func](self._dispatch, func, args, kwargs)

    def _get_item(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `x[i]`; PyTorch would ask `i` for its number, or a mask for its true elements."""
        if self._dispatch.has_numbers:
            args = (args[0], place_of_tensors(args[1]))
        tensor, index = args
        places = places_of(index)
        if any(map(is_mask, places)) and self._can_select():
            rows = rows_by_mask(tensor, index, self._dispatch.where())
            return func(*args, **kwargs) if rows is None else rows
        if not any(is_traced_number(i) or is_window(i) or is_prefix(i) for i in places):
            try:
                return func(*args, **kwargs)
            except IndexError:
                if self._dispatch.condition is None or not isinstance(index, torch.Tensor):
                    raise
                self._dispatch.note_check()  # a turn of a loop over rows: PyTorch has it only if its row is selected
                return func(tensor, index.clamp(-len(tensor), len(tensor) - 1))
        if not self._can_select():
            if self._dispatch.recording:
                raise self._dispatch.error(
                    "`x[i]` has a traced i in a call that asks PyTorch's engine for a gradient",
                    "x.index_select(0, i.view(1))[0]; or torch.func.grad in the place of torch.autograd.grad",
                )
            return func(*args, **kwargs)
        dispatch = self._dispatch
        if not isinstance(tensor, BridgeTensor):
            tensor = dispatch.materialize(tensor) if dispatch.constants.may_write(tensor) else dispatch.wrap(tensor)
        if any(map(is_prefix, places)):
            made = rows_by_length(tensor, places, dispatch.error, dispatch.where())
            return func(*args, **kwargs) if made is None else made
        view, rest = selected(tensor, places, dispatch.error)
        return func(view, rest) if rest else view

    def _masked_select(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `x[mask]`, where both are broadcast."""
        tensor, mask = itertools.chain(args, (kwargs[name] for name in ("input", "mask") if name in kwargs))
        if not is_mask(mask) or not self._can_select() or "out" in kwargs:
            return func(*args, **kwargs)
        if tensor.shape != mask.shape:
            tensor, mask = torch.broadcast_tensors(tensor, mask)
        rows = rows_by_mask(tensor, mask, self._dispatch.where())
        if rows is None:
            return func(*args, **kwargs)
        return rows

    def _positions(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `torch.where(mask)` or `mask.nonzero()`."""
        alone = len(args) == 1 and (not kwargs or (func is not torch.where and kwargs.keys() == {"as_tuple"}))
        if not alone or type(args[0]) is not BridgeTensor or not args[0].dim() or not self._can_select():
            return func(*args, **kwargs)
        mask: Any = args[0] if args[0].dtype == torch.bool else args[0] != 0
        if not isinstance(mask.value, Tracer):
            return func(*args, **kwargs)
        made = positions_of(mask, self._dispatch.where())
        if kwargs.get("as_tuple", func is torch.where):
            return made
        whole = torch.stack([each.whole for each in made], -1)
        return rows_of(whole, made[0].mask, 0, made[0].made, origin=mask)

    def _item(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `x.item()` of a tensor of a transform, of which PyTorch makes a number of its own class."""
        if type(args[0]) is BridgeTensor:
            return args[0].item()
        return same_number(func(*args, **kwargs))

    def _set_item(self, func: Any, args: tuple, kwargs: dict) -> None:
        """Runs `x[i] = value` for the indices of `_get_item`."""
        if self._dispatch.has_numbers:
            args = (args[0], place_of_tensors(args[1]), as_operand(args[2]))
        tensor, index, value = args
        places = places_of(index)
        conditions = conditions_among(places)
        if conditions and self._can_select():
            return self._set_if(func, tensor, places, conditions, value)
        if not any(is_traced_number(i) or is_window(i) for i in places):
            return func(*args, **kwargs)
        if not all(is_traced_place(i) or is_whole(i) for i in places):
            if not self._can_select():
                return func(*args, **kwargs)
            view, rest = selected(self._dispatch.materialize(tensor), places, self._dispatch.error)
            return func(view, rest, value)
        if not isinstance(value, torch.Tensor):
            value = torch.as_tensor(value, dtype=tensor.dtype)
        places = [None if is_whole(i) else i for i in places]
        torch.ops.aten.index_put_(tensor, places, value.to(tensor.dtype))

    def _set_if(self, func: Any, tensor: Any, places: tuple, conditions: list[BridgeTensor], value: Any) -> None:
        """Runs `x[…, condition, …] = value`, which writes the value where all conditions hold and nothing elsewhere."""
        rest = tuple(i for i in places if all(i is not condition for condition in conditions))
        value = torch.as_tensor(value, dtype=tensor.dtype)
        if any(map(is_mask, rest)):
            before = None
        else:
            before = self._get_item(torch.Tensor.__getitem__, (tensor, rest), {})
        if before is None or value.dim() > before.dim():
            return func(tensor, places, value)
        all_hold = functools.reduce(torch.logical_and, conditions)
        self._set_item(func, (tensor, rest, torch.where(all_hold, value, before)), {})

    def _can_select(self) -> bool:
        """True if no layer of PyTorch has to see the operation."""
        return not in_transform() and not self._dispatch.recording

    def _forgetful(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs a function that does not pass one of its arguments on to modes, which would then ignore it."""
        self._refuse_forgotten(func)
        return self._plain(func, args, kwargs)

    def _refuse_forgotten(self, func: Any) -> None:
        name = _FORGOTTEN.get(func)
        frame = sys._getframe(1)
        while name and frame is not None and frame.f_code is not func.__code__:
            frame = frame.f_back
        if name and frame is not None and frame.f_locals[name] is not None:
            what = f"`{func.__name__}` does not hand its argument `{name}` on to modes, so that it would be lost"
            raise self._dispatch.error(what, "write the function in operations of PyTorch")

    def _checking(self, func: Any, args: tuple, kwargs: dict) -> Any:
        self._dispatch.is_checking = True
        try:
            return self._plain(func, args, kwargs)
        finally:
            self._dispatch.is_checking = False

    def _construct(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if not any(map(_holds_traced, args)):
            return self._plain(func, args, kwargs)
        made = _constructed(func, args, kwargs)
        if kwargs.get("requires_grad"):
            return made.requires_grad_()
        return made

    def _sized(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `torch.ones(2, n)` and its like, one of whose sizes is traced."""
        dispatch = self._dispatch
        owner = args[: _SIZED[func]]
        sizes = args[len(owner) :]
        rest: tuple = ()
        if sizes and isinstance(sizes[0], (tuple, list)):
            rest = sizes[1:]
            sizes = tuple(sizes[0])

        def make(sizes: tuple) -> torch.Tensor:
            return self._plain(func, (*owner, sizes, *rest), kwargs)

        made = sized(make, sizes, func.__name__, dispatch.error, dispatch.where())
        if made is None:
            return self._plain(func, args, kwargs)
        return made

    def _counted(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns `torch.arange(n)` for the number of rows by a mask: the place of each among them."""
        mask = getattr(as_operand(args[0]), "rows_mask", None) if len(args) == 1 else None
        if mask is None:
            return self._plain(func, args, kwargs)
        return rows_of(ranks(mask).to(kwargs.get("dtype") or torch.int64), mask, 0, self._dispatch.where())

    def _fill(self, func: Any, args: tuple, kwargs: dict) -> Any:
        made = _filled(func, args, {k: v for k, v in kwargs.items() if k != "requires_grad"})
        if made is None:
            return (self._sized if func in _SIZED else self._plain)(func, args, kwargs)
        if kwargs.get("requires_grad"):
            return made.requires_grad_()
        return made

    def _memory(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Returns the array or list that Python code outside of PyTorch gets for a tensor."""
        tensor = args[0]
        if not isinstance(tensor, BridgeTensor):
            return func(*args, **kwargs)
        of_numpy = func in (torch.Tensor.numpy, torch.Tensor.__array__)
        if of_numpy and isinstance(tensor.value, Tracer) and is_assigning():
            if replace_assignments():
                raise engine.Restart(self._dispatch.recording)
            if func is torch.Tensor.numpy and not tensor.requires_grad:
                return TracedArray(tensor)
        if not of_numpy or isinstance(tensor.value, Tracer):
            raise self._dispatch.error(f"`{func.__name__}()` {WITHOUT_MEMORY}", WITHOUT_MEMORY_REMEDY)
        if tensor.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with below_modes():
            return tensor_of(tensor.value).to(tensor.dtype).numpy()

    def _traced_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is Rows or wrapped_by_transform(tensor):
            return tensor
        if self._dispatch.recording and self._dispatch.constants.may_write(tensor) and engine_requires_grad(tensor):
            return tensor  # traced values were written into it, and PyTorch's graph has the real tensor
        if self._dispatch.constants.is_traced(tensor):
            return self._dispatch.wrap(tensor)
        return tensor

    def _makes_traced(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """True if a constant cannot stay one: it becomes a leaf, or gets a traced value."""
        if func == _DATA_SET:  # each access makes another wrapper
            return isinstance(args[1], BridgeTensor)
        return bool(next(iter((*args[1:], *kwargs.values())), True))


def _under_autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the argument of an operation that autocast computes in `dtype`."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    if eligible:
        return tensor.to(dtype)
    return tensor


def _set_requires_grad(tensor: BridgeTensor, wanted: bool) -> None:
    tensor.requires_grad = wanted


def _set_data(tensor: BridgeTensor, other: torch.Tensor) -> None:
    tensor.data = other


def _detach_in_place(tensor: BridgeTensor) -> BridgeTensor:
    tensor.detach_in_place()
    if CURRENT.recording:
        with below_modes():
            torch.detach_(tensor)  # updates PyTorch's own record
    return tensor


# Each lookup returns an equal object, but not the same one.
_DATA_SET = torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_GET_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # pyright: ignore[reportAttributeAccessIssue]
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # pyright: ignore[reportAttributeAccessIssue]
_GET_IS_LEAF = torch.Tensor.is_leaf.__get__  # pyright: ignore[reportAttributeAccessIssue]
_GET_GRAD_FN = torch.Tensor.grad_fn.__get__  # pyright: ignore
_OF_OUR_TENSORS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.data.__get__: lambda tensor: tensor.data,  # pyright: ignore[reportAttributeAccessIssue]
    _DATA_SET: _set_data,
    _GET_REQUIRES_GRAD: lambda tensor: tensor.requires_grad,
    _SET_REQUIRES_GRAD: _set_requires_grad,
    _GET_IS_LEAF: lambda tensor: tensor.is_leaf,
    _GET_GRAD_FN: lambda tensor: tensor.grad_fn,
    torch.Tensor.requires_grad_: BridgeTensor.requires_grad_,
    torch.Tensor.detach_: _detach_in_place,
    torch.detach_: _detach_in_place,
    torch.Tensor.__deepcopy__: BridgeTensor.__deepcopy__,
    torch.Tensor.tolist: BridgeTensor.tolist,
    torch.Tensor.is_inference: lambda tensor: tensor._handle.storage.inference,
    torch.is_inference: lambda tensor: tensor._handle.storage.inference,
}
_SPECIAL: dict[Any, Callable[[Functions, Any, tuple, dict], Any]] = {
    **dict.fromkeys(_OF_OUR_TENSORS, Functions._of_our_tensor),
    F.dropout: Functions._dropout,
    F.batch_norm: Functions._batch_norm,
    F.pad: Functions._pad,
    FLEX_ATTENTION: Functions._flex_attention,
    **dict.fromkeys(_GRADIENT_HOOKS, Functions._hook),
    **dict.fromkeys(engine.ENGINE_CALLS, Functions._engine),
    **dict.fromkeys(_CONSTRUCTORS, Functions._construct),
    **dict.fromkeys(_SIZED, Functions._sized),
    **dict.fromkeys(_FILLERS, Functions._fill),
    torch.arange: Functions._counted,
    **dict.fromkeys(_MEMORY, Functions._memory),
    **dict.fromkeys(CHECKING, Functions._checking),
    **dict.fromkeys((torch.masked_select, torch.Tensor.masked_select), Functions._masked_select),
    **dict.fromkeys((torch.where, torch.nonzero, torch.Tensor.nonzero), Functions._positions),
    torch.Tensor.__getitem__: Functions._get_item,
    torch.Tensor.item: Functions._item,
    torch.Tensor.__setitem__: Functions._set_item,
    **dict.fromkeys(_FORGOTTEN, Functions._forgetful),
}
_TRACED = NUMBERS | {BridgeTensor}
_MAKE_TRACED = (_DATA_SET, _SET_REQUIRES_GRAD, torch.Tensor.requires_grad_)


def _dropout_by_traced_number(x: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Drops by a traced probability; PyTorch insists on a Python number, which an override is not."""
    if not training:
        return x
    kept = torch.where(torch.rand_like(x) < p, 0, x / (1 - p))  # for p = 1, `where` also discards the division by 0
    if inplace:
        return x.copy_(kept)
    return kept


def _batch_norm_by_traced_number(func: Callable, given: dict[str, Any], momentum: Any) -> torch.Tensor:
    """Normalizes with a traced momentum: the statistics of the batch alone are written, and then mixed with the old."""
    running = [given[name] for name in ("running_mean", "running_var") if given.get(name) is not None]
    before = [each.clone() for each in running]
    result = func(**(given | {"momentum": 1.0}))
    if given.get("training"):
        with torch.no_grad():
            for each, old in zip(running, before, strict=True):
                each.copy_(each * momentum + old * (1 - momentum))
    return result


def _padded(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> None:
    """Has the arguments of `F.pad`."""


# `torch.tensor`, `torch.full` and their like with traced numbers, whose values PyTorch would ask for.


def _holds_traced(data: Any) -> bool:
    """True for a traced number, and if a nested list holds one or a tensor; a tensor by itself is no list."""
    if isinstance(data, (list, tuple)):
        return any(isinstance(v, BridgeTensor) or _holds_traced(v) for v in data)
    return type(data) in NUMBERS


def _constructed(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    """Returns the tensor that `func` makes from the list: numbers without a gradient, in the dtype that PyTorch infers.

    Raises `ValueError` where PyTorch does.
    """
    owner, data = args if func is torch.Tensor.new_tensor else (None, args[0])
    shape, leaves = _flat(data)
    dtype = kwargs.get("dtype") or (owner.dtype if owner is not None else None)
    dtype = dtype or functools.reduce(torch.promote_types, (v.dtype for v in leaves))
    return torch.stack([v.detach().reshape(()).to(dtype) for v in leaves]).reshape(shape)


def _filled(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Returns the tensor that `func` makes from a traced number, without a gradient; None if the number is not traced.

    Raises `TypeError` where PyTorch does, for a number that requires grad.
    """
    place = _FILLERS[func]
    name = next((n for n in _NAMES_OF_NUMBERS if n in kwargs), "")
    number = kwargs.get(name, args[place] if place < len(args) else None)
    if not isinstance(number, BridgeTensor) or number.dim():
        return None
    zero: Any = torch.zeros((), dtype=number.dtype, requires_grad=number.requires_grad)
    if not number.requires_grad:  # PyTorch infers a dtype from a Python number
        zero = zero.item()
    if name:
        made = func(*args, **(kwargs | {name: zero}))
    else:
        made = func(*args[:place], zero, *args[place + 1 :], **kwargs)
    return made.fill_(number.detach().to(made.dtype))


def _flat(data: Any) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    if type(data) in NUMBERS:
        return (), [as_tensor(data)]
    if isinstance(data, torch.Tensor):
        if data.numel() != 1:
            raise ValueError("only one element tensors can be converted to Python scalars")
        return (), [data]
    if not isinstance(data, (list, tuple)):
        return (), [torch.tensor(data)]
    parts = [_flat(v) for v in data]
    if any(shape != parts[0][0] for shape, _ in parts):
        raise ValueError("lists of different lengths make no tensor")
    return (len(parts), *parts[0][0]), [leaf for _, leaves in parts for leaf in leaves]
