"""Python functions of PyTorch that have to be caught before it breaks them up, or that never reach its dispatcher."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from bridge.arrays import tensor_of
from bridge.construction import CONSTRUCTORS, constructed, holds_traced
from bridge.dispatch import Dispatch
from bridge.internals import Tracer, below_modes, casts_under_autocast, in_transform, wrapped_by_transform
from bridge.lowerings import DECOMPOSITIONS, FUNCTIONS
from bridge.recording import ENGINE_CALLS, Restart, what_is_needed
from bridge.tensors import BridgeTensor

_GRADIENT_HOOKS = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)
_HOOK_REMEDY = "write what the hook does as the backward of a torch.autograd.Function, or leave it out"
_MEMORY = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.data_ptr)
_DETACH_IN_PLACE = (torch.Tensor.detach_, torch.detach_)
_REQUIRES_GRAD = (torch.Tensor.requires_grad_,)
_DATA_GET = torch.Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]


class Functions(TorchFunctionMode):
    """The mode that is active beside `Dispatch`."""

    def __init__(self, dispatch: Dispatch):
        super().__init__()
        self._dispatch = dispatch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        op = FUNCTIONS.get(func)
        if op is not None and not self._dispatch.is_off(op):
            return self._whole(func, op, types, args, kwargs)
        if func is F.dropout and any(isinstance(v, BridgeTensor) for v in (*args[1:], *kwargs.values())):
            return _dropout_by_traced_number(*args, **kwargs)
        if (func is _DATA_GET or func in _DETACH_IN_PLACE) and wrapped_by_transform(args[0]):
            return func(*args, **kwargs)
        if func is _DATA_GET and not isinstance(args[0], BridgeTensor):
            return self._dispatch.adopt(args[0]).detach()  # C++ would hand out the real memory
        if func in ENGINE_CALLS and not in_transform():
            return self._engine(func, args, kwargs)
        if func in _GRADIENT_HOOKS:
            raise self._dispatch.error(f"`{func.__name__}` asks PyTorch's engine for a gradient", _HOOK_REMEDY)
        if func in _DETACH_IN_PLACE:  # PyTorch's autograd layer would answer it by itself
            tensor = self._dispatch.adopt(args[0])
            tensor.detach_in_place()
            if self._dispatch.recording:
                with below_modes():
                    func(tensor)
            return tensor
        if func in CONSTRUCTORS and any(map(holds_traced, args)):
            made = constructed(func, args, kwargs)
            return made.requires_grad_() if kwargs.get("requires_grad") else made
        if func in _MEMORY and isinstance(args[0], BridgeTensor):
            return self._memory(func, args[0])
        if kwargs.get("requires_grad") is True and func not in _REQUIRES_GRAD:  # `torch.zeros(3, requires_grad=True)`
            return self._dispatch.adopt(func(*args, **(kwargs | {"requires_grad": False}))).requires_grad_()
        return func(*args, **kwargs)

    def _whole(self, func: Any, op: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """A function of `FUNCTIONS`: the lowering of `op`, unless something of PyTorch's has to see it first."""
        if not args:  # the two names that PyTorch has for what operations call `self`
            name = next((n for n in ("input", "tensor") if n in kwargs), None)
            args = () if name is None else (kwargs[name],)
            kwargs = {k: v for k, v in kwargs.items() if k != name}
        if torch.is_autocast_enabled("cpu") and casts_under_autocast(op):
            return func(*args, **kwargs)
        if in_transform() or self._dispatch.recording:
            return (DECOMPOSITIONS.get(op) or func)(*args, **kwargs)
        return self._dispatch.__torch_dispatch__(op, types, args, kwargs)

    def _engine(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A gradient inside of the call, by PyTorch's own engine."""
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

    def _memory(self, func: Any, tensor: BridgeTensor) -> Any:
        """What Python code that leaves PyTorch gets of a tensor."""
        if func is torch.Tensor.data_ptr or isinstance(tensor.value, Tracer):
            raise self._dispatch.error(
                f"`{func.__name__}()` asks for the memory of a traced tensor",
                "write what is done with it in operations of PyTorch, or compute it before the call and pass it in",
            )
        if tensor.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        with below_modes():
            return tensor_of(tensor.value).to(tensor.dtype).numpy()


def _dropout_by_traced_number(x: torch.Tensor, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """PyTorch insists on a Python number for the probability, which an override is not."""
    if not training:
        return x
    kept = torch.where(torch.rand_like(x) < p, 0, x / (1 - p))  # a share of 1 drops the division by 0 with it
    return x.copy_(kept) if inplace else kept
