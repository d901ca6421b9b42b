"""Python functions of PyTorch that have to be caught before it breaks them up, or that never reach its dispatcher."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bridge import cumulative_average
from bridge._compat.jax import Tracer
from bridge._compat.torch import (
    GET_BASE,
    IS_VIEW,
    base_of,
    below_modes,
    casts_under_autocast,
    engine_requires_grad,
    in_transform,
    tree_map_only,
    wrapped_by_transform,
)
from bridge.arrays import tensor_of
from bridge.construction import CONSTRUCTORS, FILLERS, constructed, filled, holds_traced
from bridge.dispatch import Dispatch
from bridge.errors import WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY
from bridge.indexing import (
    conditions_among,
    is_traced_number,
    is_traced_place,
    is_whole,
    is_window,
    places_of,
    selected,
)
from bridge.lowerings import DECOMPOSITIONS, FUNCTIONS
from bridge.masked import MaskedRows, is_mask, rows_by_mask
from bridge.omitted_arguments import with_omitted
from bridge.prefixes import SIZED, Prefix, is_prefix, prefix, sized
from bridge.recording import ENGINE_CALLS, Restart, what_is_needed
from bridge.tensors import RECORDING, BridgeTensor

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
_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
"""Under autocast PyTorch would give the bridge the parts of it, whose products are in float32."""
_HOOK_REMEDY = "write what the hook does as the backward of a torch.autograd.Function, or leave it out"


class Functions(TorchFunctionMode):
    """The mode that is active beside `Dispatch`."""

    def __init__(self, dispatch: Dispatch):
        super().__init__()
        self._dispatch = dispatch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {k: self._traced(v) for k, v in (kwargs or {}).items()}
        args = tuple(self._traced(v) for v in args)
        if types and not all(issubclass(t, torch.Tensor) for t in types):
            return self._by_other_classes(func, types, args, kwargs)
        kwargs = {k: self._traced(v) for k, v in with_omitted(func, kwargs).items()}
        op = FUNCTIONS.get(func)
        if op is not None and not self._dispatch.is_off(op):
            return self._whole(func, op, types, args, kwargs)
        if func is F.dropout and any(isinstance(v, BridgeTensor) for v in (*args[1:], *kwargs.values())):
            return _dropout_by_traced_number(*args, **kwargs)
        if func in _OF_OUR_TENSORS and wrapped_by_transform(args[0]):
            return func(*args, **kwargs)
        if func in _OF_OUR_TENSORS and isinstance(args[0], BridgeTensor):
            return _OF_OUR_TENSORS[func](*args, **kwargs)
        if func in _MAKE_TRACED and not isinstance(args[0], BridgeTensor) and self._makes_traced(func, args, kwargs):
            twin = self._dispatch.take_over(args[0])
            return args[0] if _OF_OUR_TENSORS[func](twin, *args[1:], **kwargs) is twin else None
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        return self._plain(func, args, kwargs)

    def _by_other_classes(self, func: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """By a class that is no tensor and has a `__torch_function__`, or by PyTorch's error if none of them knows."""
        for cls in types:
            with self:
                result = cls.__torch_function__(func, types, args, kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _plain(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs.get("requires_grad") is True and func not in _MAKE_TRACED:  # `torch.zeros(3, requires_grad=True)`
            return self._dispatch.adopt(func(*args, **(kwargs | {"requires_grad": False}))).requires_grad_()
        return func(*args, **kwargs)

    def _whole(self, func: Any, op: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """A function of `FUNCTIONS`: the lowering of `op`, unless something of PyTorch's has to see it first."""
        if not args:  # the two names that PyTorch has for what operations call `self`
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

    def _batch_norm(self, func: Any, args: tuple, kwargs: dict) -> Any:
        averaged = cumulative_average.batch_norm(self._dispatch, args, kwargs)
        return self._plain(func, args, kwargs) if averaged is None else averaged

    def _hook(self, func: Any, args: tuple, kwargs: dict) -> Any:
        raise self._dispatch.error(f"`{func.__name__}` needs the gradients of PyTorch's engine", _HOOK_REMEDY)

    def _engine(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A gradient inside of the call, by PyTorch's own engine."""
        if in_transform() and (self._dispatch.recording or not _is_of_what_came_before(args, kwargs)):
            return func(*args, **kwargs)
        needed = what_is_needed(self._dispatch.recording, func, args, kwargs)
        if needed > self._dispatch.recording:
            raise Restart(needed)
        result = func(*args, **kwargs)
        if any(t.grad is not None for t in self._dispatch.state):
            raise self._dispatch.error(
                "`backward()` inside the call adds to the `grad` of a parameter or buffer, which is no result of it",
                "use torch.autograd.grad for the gradients that the call itself needs",
            )
        return result

    def _get_item(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """`x[i]`; PyTorch would ask `i` for its number, or a mask for its true elements."""
        tensor, index = args
        places = places_of(index)
        if any(map(is_mask, places)) and self._can_select():
            rows = rows_by_mask(tensor, index, self._dispatch.where())
            return func(*args, **kwargs) if rows is None else rows
        if not any(is_traced_number(i) or self._is_window(i) or is_prefix(i) for i in places):
            return func(*args, **kwargs)
        if not self._can_select():
            if self._dispatch.recording:
                raise self._dispatch.error(
                    "`x[i]` has a traced i in a call that asks PyTorch's engine for a gradient",
                    "x.index_select(0, i.view(1))[0]; or torch.func.grad in the place of torch.autograd.grad",
                )
            return func(*args, **kwargs)
        dispatch = self._dispatch
        if not isinstance(tensor, BridgeTensor):
            tensor = dispatch.take_over(tensor) if dispatch.may_write(tensor) else dispatch.adopt(tensor)
        if any(map(is_prefix, places)):
            made = prefix(tensor, places, dispatch.positions, dispatch.error, dispatch.where())
            return func(*args, **kwargs) if made is None else made
        view, rest = selected(tensor, places, dispatch.positions, dispatch.error)
        return func(view, rest) if rest else view

    def _masked_select(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """`x[mask]`, where both are broadcast."""
        tensor, mask = itertools.chain(args, (kwargs[name] for name in ("input", "mask") if name in kwargs))
        if not is_mask(mask) or not self._can_select() or "out" in kwargs:
            return func(*args, **kwargs)
        if tensor.shape != mask.shape:
            tensor, mask = torch.broadcast_tensors(tensor, mask)
        rows = rows_by_mask(tensor, mask, self._dispatch.where())
        return func(*args, **kwargs) if rows is None else rows

    def _is_window(self, place: Any) -> bool:
        return is_window(place, self._dispatch.positions)

    def _set_item(self, func: Any, args: tuple, kwargs: dict) -> None:
        """`x[i] = value`, likewise."""
        tensor, index, value = args
        places = places_of(index)
        conditions = conditions_among(places)
        if conditions and self._can_select():
            return self._set_if(func, tensor, places, conditions, value)
        if not any(is_traced_number(i) or self._is_window(i) for i in places):
            return func(*args, **kwargs)
        if not all(is_traced_place(i) or is_whole(i) for i in places):
            if not self._can_select():
                return func(*args, **kwargs)
            view, rest = selected(
                self._dispatch.take_over(tensor), places, self._dispatch.positions, self._dispatch.error
            )
            return func(view, rest, value)
        value = torch.as_tensor(value, dtype=tensor.dtype) if not isinstance(value, torch.Tensor) else value
        places = [None if is_whole(i) else i for i in places]
        torch.ops.aten.index_put_(tensor, places, value.to(tensor.dtype))

    def _set_if(self, func: Any, tensor: Any, places: tuple, conditions: list[BridgeTensor], value: Any) -> None:
        """`x[…, condition, …] = value`: the value where all conditions hold, otherwise what is there."""
        rest = tuple(i for i in places if all(i is not condition for condition in conditions))
        value = torch.as_tensor(value, dtype=tensor.dtype)
        before = None if any(map(is_mask, rest)) else self._get_item(torch.Tensor.__getitem__, (tensor, rest), {})
        if before is None or value.dim() > before.dim():
            return func(tensor, places, value)
        all_hold = functools.reduce(torch.logical_and, conditions)
        self._set_item(func, (tensor, rest, torch.where(all_hold, value, before)), {})

    def _can_select(self) -> bool:
        """Whether no layer of PyTorch's has to see the operation."""
        return not in_transform() and not self._dispatch.recording

    def _base(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """`x._base`. Operations see the stand-in of a real tensor; which tensor owns the memory, the real one knows."""
        (tensor,) = args
        base = func(tensor)
        real = self._dispatch.real_of(tensor if base is None else base)
        owner = base if real is None else base_of(real)
        if owner is None and base is not None:
            owner = real
        # The code holds constants themselves, and stand-ins of the state.
        return owner if owner is None or self._dispatch.may_write(owner) else self._dispatch.adopt(owner)

    def _is_view(self, func: Any, args: tuple, kwargs: dict) -> bool:
        return self._base(GET_BASE, args, kwargs) is not None

    def _istft(self, func: Any, args: tuple, kwargs: dict) -> Any:
        self._dispatch.is_istft = True
        try:
            return self._plain(func, args, kwargs)
        finally:
            self._dispatch.is_istft = False

    def _tensor_split(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Where to split may be a tensor, whose memory PyTorch reads."""
        others = args[1:], {name: value for name, value in kwargs.items() if name != "input"}
        more, named = tree_map_only(BridgeTensor, lambda places: torch.tensor(places.tolist()), others)
        return torch.tensor_split(args[0] if args else kwargs["input"], *more, **named)

    def _construct(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if not any(map(holds_traced, args)):
            return self._plain(func, args, kwargs)
        made = constructed(func, args, kwargs)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    def _sized(self, func: Any, args: tuple, kwargs: dict) -> Any:
        dispatch = self._dispatch
        made = sized(func, args, kwargs, dispatch.positions, dispatch.error, dispatch.where())
        return self._plain(func, args, kwargs) if made is None else made

    def _fill(self, func: Any, args: tuple, kwargs: dict) -> Any:
        made = filled(func, args, {k: v for k, v in kwargs.items() if k != "requires_grad"})
        if made is None:
            return self._plain(func, args, kwargs)
        return made.requires_grad_() if kwargs.get("requires_grad") else made

    def _memory(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What Python code that leaves PyTorch gets of a tensor."""
        tensor = args[0]
        if not isinstance(tensor, BridgeTensor):
            return func(*args, **kwargs)
        if func not in (torch.Tensor.numpy, torch.Tensor.__array__) or isinstance(tensor.value, Tracer):
            raise self._dispatch.error(f"`{func.__name__}()` {WITHOUT_MEMORY}", WITHOUT_MEMORY_REMEDY)
        if tensor.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with below_modes():
            return tensor_of(tensor.value).to(tensor.dtype).numpy()

    def _traced(self, value: Any) -> Any:
        """`value` with what stands for a real tensor whose memory the call has traced."""
        if type(value) in (list, tuple):
            return type(value)(self._traced(v) for v in value)
        if type(value) in (MaskedRows, Prefix) or not isinstance(value, torch.Tensor):
            return value
        if isinstance(value, BridgeTensor) or wrapped_by_transform(value):
            return value
        if self._dispatch.recording and self._dispatch.may_write(value) and engine_requires_grad(value):
            return value  # traced values were written into it, and PyTorch's graph has the real tensor
        return self._dispatch.adopt(value) if self._dispatch.is_traced(value) else value

    def _makes_traced(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Whether a constant cannot stay one: it becomes a leaf, or gets a traced value."""
        if func == _DATA_SET:  # each access makes another wrapper
            return isinstance(args[1], BridgeTensor)
        return bool(next(iter((*args[1:], *kwargs.values())), True))


def _is_of_what_came_before(args: tuple, kwargs: dict) -> bool:
    """Whether `torch.autograd.grad(y, x, …)` in a transformation is of tensors from outside of it."""
    outputs = args[0] if args else kwargs.get("outputs", kwargs.get("tensors"))
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return all(isinstance(t, BridgeTensor) for t in outputs)


def _under_autocast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The argument of an operation that autocast computes in `dtype`."""
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor


def _set_requires_grad(tensor: BridgeTensor, wanted: bool) -> None:
    tensor.requires_grad = wanted


def _set_data(tensor: BridgeTensor, other: torch.Tensor) -> None:
    tensor.data = other


def _detach_in_place(tensor: BridgeTensor) -> BridgeTensor:
    tensor.detach_in_place()
    if RECORDING.on:
        with below_modes():
            torch.detach_(tensor)  # PyTorch's own record
    return tensor


# Equal whenever they are looked up, but not identical.
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
    torch.Tensor.is_inference: lambda tensor: tensor._cell.storage.inference,
    torch.is_inference: lambda tensor: tensor._cell.storage.inference,
}
"""What PyTorch's engine or memory would answer by itself, wrongly."""
_SPECIAL: dict[Any, Callable[[Functions, Any, tuple, dict], Any]] = {
    **dict.fromkeys(_GRADIENT_HOOKS, Functions._hook),
    **dict.fromkeys(ENGINE_CALLS, Functions._engine),
    **dict.fromkeys(CONSTRUCTORS, Functions._construct),
    **dict.fromkeys(FILLERS, Functions._fill),
    **dict.fromkeys(SIZED, Functions._sized),
    **dict.fromkeys(_MEMORY, Functions._memory),
    **dict.fromkeys((torch.istft, torch.Tensor.istft), Functions._istft),
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), Functions._tensor_split),
    **dict.fromkeys((torch.masked_select, torch.Tensor.masked_select), Functions._masked_select),
    torch.Tensor.__getitem__: Functions._get_item,
    torch.Tensor.__setitem__: Functions._set_item,
    F.batch_norm: Functions._batch_norm,
    GET_BASE: Functions._base,
    IS_VIEW: Functions._is_view,
}
_MAKE_TRACED = (_DATA_SET, _SET_REQUIRES_GRAD, torch.Tensor.requires_grad_)


def _dropout_by_traced_number(x: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """PyTorch insists on a Python number for the probability, which an override is not."""
    if not training:
        return x
    kept = torch.where(torch.rand_like(x) < p, 0, x / (1 - p))  # a share of 1 drops the division by 0 with it
    return x.copy_(kept) if inplace else kept
