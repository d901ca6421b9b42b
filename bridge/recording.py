"""`torch.autograd.grad` and `backward()` inside `forward`: PyTorch's own engine on the tensors of the bridge.

A call is traced without PyTorch's graph, which costs time and is rarely asked for. Where the code asks its engine for a
gradient, the trace is thrown away and made again with the graph: PyTorch then records every operation and
differentiates it by its own rules, whose operations are operations of the trace like all others. With `create_graph`
JAX differentiates through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from bridge._compat.torch import engine_leaf, engine_requires_grad
from bridge.cells import differentiable
from bridge.tensors import BridgeTensor

ENGINE_CALLS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
NO_GRAPH, GRAPH, GRAPH_FROM_INPUTS = range(3)
"""What PyTorch records: nothing; what comes of parameters; also of inputs, which then require grad."""

T = TypeVar("T")


class Restart(BaseException):
    """The trace needs a graph. No `Exception`, which the code under it might catch."""

    def __init__(self, recording: int):
        self.recording = recording


def restarted(trace: Callable[[int], T]) -> T:
    """`trace(recording)` with as much recording as it turns out to need."""
    recording = NO_GRAPH
    while True:
        try:
            return trace(recording)
        except Restart as needs:
            recording = needs.recording


def start_graph(tensor: BridgeTensor, recording: int) -> BridgeTensor:
    """The tensor; PyTorch's graph starts there, if there is one and the tensor requires grad."""
    if recording and tensor.requires_grad:
        engine_leaf(tensor, True)
    return tensor


def recorded(tensors: Iterable[Any]) -> bool:
    """Whether an operation on these would become part of PyTorch's graph."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and engine_requires_grad(t) for t in tensors)


def what_is_needed(recording: int, func: Any, args: tuple, kwargs: dict) -> int:
    """How much has to be recorded for this call of the engine."""
    inputs = kwargs.get("inputs", args[1] if func is torch.autograd.grad and len(args) > 1 else None)
    inputs = inputs if isinstance(inputs, (list, tuple)) else [inputs]
    free = [t for t in inputs if isinstance(t, BridgeTensor) and differentiable(t.dtype)]
    missing = recording != NO_GRAPH and any(not engine_requires_grad(t) for t in free)
    return GRAPH_FROM_INPUTS if missing else max(recording, GRAPH)
