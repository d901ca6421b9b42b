"""Runs a module in PyTorch and through the bridge, compares all results, and lists the worst leaf first.

Where a leaf is beyond the tolerance, the steps run in PyTorch again in float64, and the leaf may differ by 8 times what
PyTorch's own float32 differs from that, where this is small enough to be rounding, or what noise of 1e-6 in the
parameters moves it, where JAX agrees in float64. The note of a row that still is beyond says which side is right in
float64, if that is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bridge.dispatch.branches import Unrecorded
from bridge.errors import BridgeError, BridgeWarning, named_failure
from bridge.functional import check_method, export
from bridge.module.state import state_of
from bridge.parity.arbiter import Arbiter
from bridge.parity.report import Environment, ParityReport, Row, compare, proved
from bridge.parity.sides import (
    Advance,
    JaxSide,
    Steps,
    TorchSide,
    copied,
    in_double,
    projection,
    widened,
)
from bridge.symbolic.constants import check_expression
from bridge.symbolic.ranges import Int64, check_integers
from bridge.tensor.arrays import check_kinds
from bridge.tensor.pytrees import named_inputs

__all__ = ["Environment", "ParityReport", "Row", "verify"]


def verify(
    module: nn.Module,
    *args: Any,
    steps: int = 2,
    advance: Advance | None = None,
    loss: Callable[[Any], Any] | None = None,
    train: bool | None = None,
    method: str = "forward",
    tolerance: float = 1e-4,
    double: nn.Module | None = None,
    jit: bool = True,
    jitter: float = 0.0,
    input_gradients: bool = True,
    known_inputs: str = "",
    int64: Int64 = "refuse",
    static: str = "",
    module_kwargs: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> ParityReport:
    """Compares outputs, the gradients of every parameter and input, every buffer, and their dtypes, over `steps` calls.

    `args` and `kwargs` hold torch tensors, as do `module_kwargs`, keyword arguments of the module that may have names
    of options. The gradient is that of `loss(outputs)`, by default of a fixed random projection of all outputs that
    carry one. Buffers and written parameters go from step to step. In each further step, floating inputs are drawn
    between the least and the largest given number, integers and masks are rolled along their first axis; or `advance`
    makes the inputs from the outputs (of a carry, for instance). JAX replays PyTorch's random draws. The module itself
    is not changed. JAX runs on `jax.devices()[0]`, PyTorch on the host; the report names both.

    A leaf beyond `tolerance` is judged by float64, as `bridge.parity` explains; `double` is the module in float64, for
    one that `.double()` does not make so.

    Where a lost gradient is zero, the right one may be zero as well, behind a gate that starts at zero, say. So a
    float leaf that is zero on both sides is compared again at perturbed parameters; where these cannot be run it is
    unproved, and the report is not `ok`. `jitter` adds noise of this relative size to all parameters at first.
    Floating inputs require grad unless `input_gradients` is False. `known_inputs` is a regular expression over
    names of inputs, as for `export`, which stay the same in each call. `int64` and `static` are those of `export`;
    PyTorch's integers have 64 bits in any case. The report names constant buffers and checks not made.

    Raises `BridgeError` if something cannot be translated, or if PyTorch itself or the exported call fails.
    """
    check_method(module, method, verify, locals())
    _check(tolerance, steps, jitter, known_inputs)
    kwargs |= module_kwargs or {}
    call = Steps(args, kwargs, advance, train, method, loss or projection, input_gradients, known_inputs)
    wide = None if double is None else copied(double, jitter)
    options = {"int64": int64, "static": static, "known_inputs": known_inputs}
    return _Comparison(call, copied(module, jitter), wide, tolerance, jit, options).report(steps)


_ROUNDING = 1e-3
"""A leaf of float32 that differs more from float64 may be another computation."""
_NOISES = (0.1, 0.1, 0.01)  # of the parameters at which leaves that are zero are compared again


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """The calls of a module on both sides."""

    call: Steps
    module: nn.Module
    double: nn.Module | None
    tolerance: float
    jit: bool
    options: dict[str, Any]
    """The options of `export`."""

    def report(self, steps: int) -> ParityReport:
        try:
            return self._compared(steps)
        except Unrecorded:
            again = dataclasses.replace(self, call=dataclasses.replace(self.call, branches=True))
            return again.report(steps)

    def _compared(self, steps: int) -> ParityReport:
        inputs, _ = named_inputs(self.call.args, self.call.kwargs)
        known = self.call.known_inputs
        if known and not any(map(self.call.knows, inputs)):
            raise BridgeError(f"known_inputs {known!r} matches no input; inputs here are {', '.join(inputs)}")
        torch_side = TorchSide(copied(self.module), self.call)
        with named_failure("the module cannot be exported"):
            check_kinds(state_of(self.module))
            fn = export(self.module, **self.options)
        jax_side = JaxSide(fn, self.call, self.jit)
        integers = {f"input {name}": value for name, value in inputs.items() if torch.is_tensor(value)}
        check_integers(integers, fn.options.int64)
        arbiter = self._arbiter_at(self.module, self.double)
        for step in range(steps):
            with named_failure(f"PyTorch itself fails, in step {step}", _remedy(self.call, step)):
                ours = torch_side.next()
            with named_failure(f"the exported call fails where PyTorch does not, in step {step}"):
                theirs = jax_side.next(torch_side.draws)
            arbiter.add(torch_side, ours, theirs)
        rows = [row for step, sides in enumerate(arbiter.leaves) for row in compare(step, *sides, self.tolerance)]
        rows = proved(arbiter.decide(rows))
        _warn_of_questions(jax_side.asked, rows)
        granted = [f"constant: {name}" for name in fn.options.static]
        granted += [f"check not made: {place}" for place in fn.options.assumed]
        for branch, place in fn.options.branches.items():
            taken = {side for draws in arbiter.draws for side in draws.answers.get(branch, ())}
            granted += [
                f"side not compared, where this is {side}: {place}" for side in (True, False) if side not in taken
            ]
        wanted = {(row.kind, row.name) for row in rows if row.zero}
        if wanted:
            rows += self._perturbed(wanted, jax_side)
        return ParityReport.of(rows, granted)

    def _arbiter_at(self, state: nn.Module, double: nn.Module | None) -> Arbiter:
        """Returns an arbiter for steps that start from the parameters and buffers of `state`."""

        def wide() -> nn.Module:
            if double is None:
                return in_double(state, self.call.method)
            return copied(double)

        return Arbiter(
            lambda: TorchSide(wide(), self.call, widened),
            lambda: JaxSide(export(wide(), **self.options), self.call, self.jit, widened),
            lambda: TorchSide(copied(state)._apply(torch.clone), self.call),
            _ROUNDING if double is None else math.inf,
        )

    def _perturbed(self, wanted: set[Any], jax_side: JaxSide) -> list[Row]:
        """Returns a row for each wanted leaf, (kind, name), at the first perturbed parameters where it is not zero.

        A leaf without such parameters is zero in truth. There are no rows where a side fails at all of them.
        """
        found = dict[Any, Row]()
        zero = list[Row]()
        for seed, noise in enumerate(_NOISES, 1):
            if wanted <= found.keys():
                break
            with contextlib.suppress(Exception):  # as where the noise makes a matrix singular
                state = copied(self.module, noise, seed)
                side = TorchSide(copied(state), self.call)
                ours = side.next()
                theirs = jax_side.at(state).next(side.draws)
                arbiter = self._arbiter_at(state, None if self.double is None else copied(self.double, noise, seed))
                arbiter.add(side, ours, theirs)
                rows = compare(0, ours, theirs, self.tolerance)
                for row in arbiter.decide([r for r in rows if (r.kind, r.name) in wanted and not r.zero]):
                    remark = "; ".join(filter(None, (f"at parameters with noise of {noise}", row.note)))
                    found.setdefault((row.kind, row.name), dataclasses.replace(row, note=remark))
                note = "zero at perturbed parameters, too"
                zero = [Row(kind, name, 0, 0.0, 0.0, self.tolerance, note=note) for kind, name in wanted]
        return [*found.values(), *(row for row in zero if (row.kind, row.name) not in found)]


def _warn_of_questions(asked: list[str], rows: list[Row]) -> None:
    """Warns if gradients differ and code asks an input whether it requires grad."""
    if asked and any("gradient" in row.kind and row.verdict == "beyond tolerance" for row in rows):
        text = (
            f"{asked[0]} asks an input whether it requires grad: it does in PyTorch here, and does not in the "
            "bridge, as in training; input_gradients=False compares with inputs that require none"
        )
        warnings.warn(BridgeWarning(text), stacklevel=4)


def _remedy(call: Steps, step: int) -> str:
    if step and not call.advance:
        other = "; a further call gets other numbers of the same shapes: if the module cannot take them, "
        return f"{other}steps=1 compares one call, and `advance` makes the inputs of the next one"
    # The reason may be that the inputs require grad here: a kept cache is written twice, say.
    if call.input_gradients:
        return "; input_gradients=False lets the inputs require none"
    return ""


def _check(tolerance: float, steps: int, jitter: float, known_inputs: str) -> None:
    for option, right, wanted in (
        (f"tolerance is {tolerance}", 0 < tolerance < math.inf, "a number above 0, such as 1e-4"),
        (f"steps is {steps}", steps >= 1, "at least 1"),
        (f"jitter is {jitter}", 0 <= jitter < math.inf, "a number from 0 on, such as 0.1"),
    ):
        if not right:
            raise BridgeError(f"{option}; it must be {wanted}")
    check_expression(known_inputs)
