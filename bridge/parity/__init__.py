"""Run a module in PyTorch and through the bridge, compare everything, name the worst leaf first."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from bridge.arrays import array_of
from bridge.cells import differentiable
from bridge.errors import BridgeError
from bridge.export import check_method, export
from bridge.parity.leaves import compare
from bridge.parity.report import Environment, ParityReport, Row
from bridge.parity.sides import Call, JaxSide, TorchSide, copied, named_inputs
from bridge.parity.sides import jitter as add_jitter
from bridge.pytrees import convert
from bridge.symbolic.int64 import Int64, check_values, checked

__all__ = ["Environment", "ParityReport", "Row", "verify"]

Advance = Callable[[Any, tuple, dict], tuple[tuple, dict]]
"""(outputs, args, kwargs) of one step -> args and kwargs of the next; written for either side's arrays."""


def verify(
    module: nn.Module,
    *args: Any,
    steps: int = 1,
    advance: Advance | None = None,
    loss: Callable[[Any], Any] | None = None,
    train: bool | None = None,
    method: str = "forward",
    tolerance: float = 1e-4,
    double: nn.Module | None = None,
    jit: bool = True,
    jitter: float = 0.0,
    known_zero: str = "",
    input_gradients: bool = True,
    int64: Int64 = "refuse",
    **kwargs: Any,
) -> ParityReport:
    """Compare outputs, the gradients of every parameter and input, every buffer, and their dtypes, over `steps` calls.

    `args` and `kwargs` hold torch tensors. The gradient is that of `loss(outputs)`, by default of a fixed random
    projection of all outputs that carry one. Buffers and written parameters go from step to step; `advance` makes
    the next step's inputs (a carry, say) from the outputs. Random draws are PyTorch's, replayed in JAX. With
    `double`, the same module in float64, which gets the inputs in float64, a leaf may differ by 8 times what
    PyTorch's own float32 differs from float64, where that is more than `tolerance`. The module itself is not
    changed.

    JAX runs on `jax.devices()[0]`, PyTorch on the host; the report names both. A float leaf that is zero on both sides
    is unproved and the report then not `ok`: `jitter` adds noise of this size to all parameters of both, and
    `known_zero`, a regular expression over names like `gradient layers.0.bias`, says which ones are zero in truth.
    A parameter to which PyTorch gives no gradient at all is proved by a zero. Floating inputs require grad in PyTorch,
    as they do in the bridge; `input_gradients=False` leaves their gradients out, for a module that takes none. Integers
    are PyTorch's own 64-bit ones on that side whatever `int64` (see `export`) makes of them in JAX.

    Raises `BridgeError` for what cannot be translated, and where PyTorch itself or the exported call fails.
    """
    _check(tolerance, steps, jitter, known_zero)
    check_method(module, method)
    call = Call(train, method, loss, input_gradients)
    original = copied(module)
    wide = None if double is None else copied(double)
    if jitter:
        add_jitter([original] if wide is None else [original, wide], jitter)
    torch_side = TorchSide(copied(original), call)
    wide_side = None if wide is None else TorchSide(wide, call)
    with _named_failure("the module cannot be exported"):
        jax_side = JaxSide(export(original, int64=int64), call, jit)
    torch_call = (args, kwargs)
    wide_call: tuple[tuple, dict] = convert(torch_call, _widened, objects=True)
    if checked(int64):
        for name, value in zip(*named_inputs(args, kwargs)[:2], strict=True):
            if torch.is_tensor(value):
                check_values(f"input {name}", value)
    jax_call: tuple[tuple, dict] = convert((args, kwargs), _to_jax, objects=True)
    rows: list[Row] = []
    for step in range(steps):
        # The reason may be that the inputs require grad here: a kept cache is written twice, say.
        remedy = "; input_gradients=False lets the inputs require none" if input_gradients else ""
        with _named_failure(f"PyTorch itself fails, in step {step}", remedy):
            outputs, ours = torch_side.step(*torch_call)
        with _named_failure(f"the exported call fails where PyTorch does not, in step {step}"):
            jax_outputs, theirs = jax_side.step(*jax_call, draws=torch_side.draws)
        exact = wide_outputs = None
        if wide_side is not None:
            with _named_failure(f"PyTorch fails in float64, in step {step}"):
                wide_outputs, exact = wide_side.step(*wide_call, draws=torch_side.draws)
        if advance is not None and step + 1 < steps:
            with _named_failure(f"`advance` fails, after step {step}"):
                torch_call, jax_call = advance(outputs, *torch_call), advance(jax_outputs, *jax_call)
                wide_call = wide_call if wide_side is None else advance(wide_outputs, *wide_call)
        rows += compare(step, ours, theirs, exact, tolerance, known_zero)
    return ParityReport.of(rows)


def _check(tolerance: float, steps: int, jitter: float, known_zero: str) -> None:
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise BridgeError(f"tolerance is {tolerance}; it must be a number above 0, such as 1e-4")
    if steps < 1:
        raise BridgeError(f"steps is {steps}; it must be at least 1")
    if not (math.isfinite(jitter) and jitter >= 0):
        raise BridgeError(f"jitter is {jitter}; it must be a number from 0 on, such as 0.1")
    try:
        re.compile(known_zero)
    except re.error as error:
        raise BridgeError(f"known_zero is {known_zero!r}, which is no regular expression: {error}") from error


def _widened(value: Any) -> Any:
    """A floating-point or complex input in double precision."""
    if not torch.is_tensor(value) or not differentiable(value.dtype):
        return value
    wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
    return wide.requires_grad_(value.requires_grad)


def _to_jax(value: Any) -> Any:
    return array_of(value) if torch.is_tensor(value) else value


@contextlib.contextmanager
def _named_failure(what: str, remedy: str = "") -> Iterator[None]:
    """Whatever is raised under it, as one error that says what failed."""
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise BridgeError(f"{what}: {type(error).__name__}: {lines[0]}{remedy}") from error
