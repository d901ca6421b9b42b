"""Python code of PyTorch's that steers its engine or its dispatcher and that no mode sees, in a traced call."""

from __future__ import annotations

import traceback
from typing import Any

import torch
import torch.utils.dlpack
from torch.utils.flop_counter import FlopCounterMode

from bridge._compat.torch import DispatchMode, run_before, run_before_functional
from bridge.errors import WITHOUT_MEMORY, WITHOUT_MEMORY_REMEDY
from bridge.recording import GRAPH_FROM_INPUTS, Restart
from bridge.tensors import BridgeTensor
from bridge.tracing import active, turn_compiler_off


def _derivative(inputs: tuple, create_graph: bool) -> None:
    """`torch.autograd.functional`: of an input that requires no grad it gives a derivative that has none itself.

    The caller of the bridge may ask for that gradient. In PyTorch the input would then require grad.
    """
    dispatch = active()
    if dispatch is None or not create_graph or dispatch.recording == GRAPH_FROM_INPUTS:
        return
    if any(isinstance(t, BridgeTensor) and t.may_have_gradient and not t.requires_grad for t in inputs):
        raise Restart(GRAPH_FROM_INPUTS)


def _saved_tensors(hooks: Any) -> None:
    """What they give back instead of a saved tensor would change gradients; to save on the CPU changes no value.

    Where PyTorch records its own graph of the call, hooks would keep its tensors in a cycle that is never freed.
    """
    dispatch = active()
    if dispatch is not None and (dispatch.recording or type(hooks) is not torch.autograd.graph.save_on_cpu):
        raise dispatch.error(
            "`saved_tensors_hooks` act on what PyTorch's engine saves for its backward, which JAX does not call",
            "use torch.utils.checkpoint to save memory, or a torch.autograd.Function for another gradient",
        )


def _mode(mode: Any) -> None:
    """What it changes is below PyTorch's autograd: the gradient would stay that of the unchanged operation.

    PyTorch's own modes count and log, or belong to its compiler.
    """
    dispatch = active()
    if dispatch is not None and _records_a_graph(mode):
        raise dispatch.error(
            "`torch.func.linearize` and `make_fx` record a graph of PyTorch's, which has no place in a traced call",
            "use torch.func.jvp, once for each tangent",
        )
    if dispatch is not None and type(mode).__module__.partition(".")[0] not in ("torch", "bridge"):
        raise dispatch.error(
            f"`{type(mode).__name__}` is a TorchDispatchMode, which acts below PyTorch's autograd and changes values "
            "without their gradients",
            "use a TorchFunctionMode, or enter it around the module in PyTorch",
        )


def _records_a_graph(mode: Any) -> bool:
    """Whether it is the tracer of `make_fx`, entered by other code than that of `torch.cond` and its like."""
    if type(mode).__module__ != "torch.fx.experimental.proxy_tensor":
        return False
    return not any("_higher_order_ops" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))


def _flop_counter(_counter: Any) -> None:
    """Before it sets a hook on the gradient of each module's results."""
    dispatch = active()
    if dispatch is not None:
        raise dispatch.error(
            "`FlopCounterMode` is a TorchDispatchMode, which counts the operations of PyTorch's kernels and of its "
            "engine, and JAX runs neither",
            "enter it around the module in PyTorch; `python -m bridge inspect` prints the FLOPs of a compiled call",
        )


def _memory(tensor: Any, *_args: Any, **_kwargs: Any) -> None:
    """A capsule of DLPack would point to no memory."""
    dispatch = active()
    if dispatch is not None and isinstance(tensor, torch.Tensor) and dispatch.is_traced(tensor):
        raise dispatch.error(f"`to_dlpack()` {WITHOUT_MEMORY}", WITHOUT_MEMORY_REMEDY)


def install() -> None:
    """Take part in these; outside a traced call they are PyTorch's own."""
    run_before_functional(_derivative)
    run_before(torch, "compile", turn_compiler_off)
    run_before(torch.autograd.graph.saved_tensors_hooks, "__enter__", _saved_tensors)
    run_before(DispatchMode, "__enter__", _mode)
    run_before(FlopCounterMode, "__enter__", _flop_counter)
    for owner in (torch, torch.utils.dlpack):
        run_before(owner, "to_dlpack", _memory)
