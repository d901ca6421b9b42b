"""`torch.autograd.grad`, `backward()` and `grad` in a call: PyTorch's own engine on the tensors of the bridge.

A call is traced without PyTorch's graph, which costs time and is rarely asked for. Where the code asks its engine for a
gradient, the trace is thrown away and made again with the graph: PyTorch then records every operation and
differentiates it by its own rules, whose operations are operations of the trace like all others. With `create_graph`
JAX differentiates through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

from bridge._compat.torch import (
    DispatchMode,
    ProxyMode,
    UncompiledDispatchMode,
    before,
    before_functional,
    engine_gradient,
    engine_leaf,
    engine_requires_grad,
    in_transform,
)
from bridge.context import CallState, current
from bridge.errors import BridgeError
from bridge.tensor.tensor import DIFFERENTIABLE, BridgeTensor, View

NO_GRAPH, GRAPH, GRAPH_FROM_INPUTS = range(3)
"""What PyTorch records: nothing; operations on parameters; also those on inputs, which then require grad."""

T = TypeVar("T")


class Restart(BaseException):
    """The trace needs a graph. It is not an `Exception`, which the module's code might catch."""

    def __init__(self, recording: int):
        self.recording = recording


def restarted(trace: Callable[[int], T]) -> T:
    """Returns `trace(recording)` with as large a graph as the trace turns out to need."""
    recording = NO_GRAPH
    while True:
        try:
            return trace(recording)
        except Restart as needs:
            recording = needs.recording


def start_graph(tensor: BridgeTensor, recording: int) -> BridgeTensor:
    """Returns the tensor; PyTorch's graph starts at it, if there is a graph and the tensor requires grad."""
    if recording and tensor.requires_grad:
        engine_leaf(tensor, True)
    return tensor


def run_engine(call: CallState, func: Any, args: tuple, kwargs: dict) -> Any:
    """Differentiates, once PyTorch records the operations that it needs."""
    outputs = _listed(args[0] if args else kwargs.get("outputs", kwargs.get("tensors")))
    if in_transform() and not all(isinstance(t, BridgeTensor) for t in outputs):
        return func(*args, **kwargs)  # called by a transformation itself, or for values computed inside one
    inputs = _listed(kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else None))
    free = [t for t in inputs if isinstance(t, BridgeTensor) and t.dtype in DIFFERENTIABLE]
    missing = call.recording and not all(map(engine_requires_grad, free))
    needed = GRAPH_FROM_INPUTS if missing else max(call.recording, GRAPH)
    if needed > call.recording:
        raise Restart(needed)
    result = func(*args, **kwargs)
    if not call.is_backward and any(engine_gradient(t) is not None for t in call.state):
        if call.truths:
            raise call.error(_ADDS, _ADDS_REMEDY)
        call.left_gradients = call.left_gradients or call.where()
    return result


_ADDS = "`backward()` inside the call adds to the `grad` of a parameter or buffer, which is no result of it"
_ADDS_REMEDY = (
    "call zero_grad(), which sets them to None, before the call ends; or use torch.autograd.grad for the gradients "
    "that the call itself needs"
)


def check_left_gradients(call: CallState) -> None:
    """Raises `BridgeError` if the call leaves a gradient of its own, to which PyTorch would add the next one."""
    if call.left_gradients and any(engine_gradient(t) is not None for t in call.state):
        raise BridgeError(f"{_ADDS} {call.left_gradients}. Remedy: {_ADDS_REMEDY}.")


def _listed(tensors: Any) -> Sequence[Any]:
    if isinstance(tensors, (list, tuple)):
        return tensors
    return [tensors]


def set_gradient(call: CallState, func: Any, args: tuple, kwargs: dict) -> None:
    """Sets `tensor.grad`. Raises `BridgeError` where the gradient would outlive the call."""
    tensor, gradient = args
    if gradient is not None and not call.is_backward and any(tensor is t for t in (*call.state, *call.inputs)):
        raise call.error(
            "`.grad` of a parameter, a buffer or an input is assigned in the call, and is no result of it",
            "keep the tensor as an attribute or a buffer of the module, or write a gradient of its own as the backward "
            "of a torch.autograd.Function",
        )
    func(*args, **kwargs)


def get_gradient(call: CallState, func: Any, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Returns `tensor.grad`. Code may compare a `grad` from before the call with None or set it to None, not use it."""
    (tensor,) = args
    gradient = func(*args, **kwargs)
    if gradient is not None or call.is_backward or not isinstance(tensor, BridgeTensor):
        return gradient
    real = call.constants.real_of(tensor)
    if real is None or real is tensor or engine_gradient(real) is None:
        return None

    def refuse(*_: Any) -> Any:
        raise call.error(
            "the call uses the `.grad` that PyTorch's engine has left on a parameter or buffer, and no input of it",
            "pass the gradient as an argument, or leave it out",
        )

    return BridgeTensor(tensor._handle.detached(), tensor._meta, (View(refuse, refuse),))


ENGINE_CALLS: dict[Any, Callable[[CallState, Any, tuple, dict], Any]] = {
    **dict.fromkeys((torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward), run_engine),
    torch.Tensor.grad.__get__: get_gradient,  # pyright: ignore
    torch.Tensor.grad.__set__: set_gradient,  # pyright: ignore
}


# Functions that control PyTorch's engine or dispatcher and that no mode sees.


def _before_derivative(inputs: tuple, create_graph: bool) -> None:
    """Restarts the call for `torch.autograd.functional`, whose derivative by an input without grad has no gradient.

    The caller of the bridge may ask for that gradient. In PyTorch the input would then require grad.
    """
    call = current()
    if call is None or not create_graph or call.recording == GRAPH_FROM_INPUTS:
        return
    if any(isinstance(t, BridgeTensor) and t.may_have_gradient and not t.requires_grad for t in inputs):
        raise Restart(GRAPH_FROM_INPUTS)


def _before_saved_tensors_hooks(hooks: Any) -> None:
    """Refuses hooks, which would change gradients by another saved tensor; saving on the CPU changes no value.

    Where PyTorch records its own graph of the call, hooks would keep its tensors in a cycle that is never freed.
    """
    call = current()
    if call is not None and (call.recording or type(hooks) is not torch.autograd.graph.save_on_cpu):
        raise call.error(
            "`saved_tensors_hooks` act on what PyTorch's engine saves for its backward, which JAX does not call",
            "use torch.utils.checkpoint to save memory, or a torch.autograd.Function for another gradient",
        )


def _before_mode(mode: Any) -> None:
    """Refuses modes that change values below PyTorch's autograd, where gradients stay those of the unchanged operation.

    The modes of PyTorch's compiler change nothing.
    """
    call = current()
    if call is None or isinstance(mode, UncompiledDispatchMode):
        return
    if isinstance(mode, ProxyMode):
        raise call.error(
            "`torch.func.linearize` and `make_fx`, which `torch.cond` and its like call, record a graph of PyTorch's, "
            "which has no place in a traced call",
            "use torch.func.jvp, once for each tangent; torch.where in the place of torch.cond",
        )
    if isinstance(mode, FlopCounterMode) or not mode.is_infra_mode():
        raise call.error(
            f"`{type(mode).__name__}` is a TorchDispatchMode, which acts below PyTorch's autograd and changes values "
            "without their gradients",
            "use a TorchFunctionMode, or enter it around the module in PyTorch",
        )


REPLACED = (
    before(FlopCounterMode, "__enter__", _before_mode),  # it first sets hooks on all modules
    before_functional(_before_derivative),
    before(torch.autograd.graph.saved_tensors_hooks, "__enter__", _before_saved_tensors_hooks),
    before(DispatchMode, "__enter__", _before_mode),
)
