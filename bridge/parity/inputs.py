"""The inputs of each call: their names, other numbers of the same shapes for further calls, double precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import torch

from bridge.errors import named_failure
from bridge.tensor.pytrees import convert
from bridge.tensor.storage import differentiable

Advance = Callable[[Any, tuple, dict], tuple[tuple, dict]]
"""(outputs, args, kwargs) of one step -> args and kwargs of the next; written for either side's arrays."""


@dataclasses.dataclass(frozen=True)
class Call:
    """The call that both sides make, step after step."""

    args: tuple
    kwargs: dict[str, Any]
    advance: Advance | None
    train: bool | None
    method: str
    loss: Callable[[Any], Any] | None
    input_gradients: bool

    def inputs(
        self, step: int, outputs: Any, previous: tuple[tuple, dict], convert_leaf: Callable[[Any], Any] | None
    ) -> tuple[tuple, dict]:
        """Returns args and kwargs of a step. `outputs` and `previous`: the outputs and inputs of the one before.

        `convert_leaf` makes a side's own arrays of the tensors that were given.
        """
        if step and self.advance:
            with named_failure(f"`advance` fails, after step {step - 1}"):
                return self.advance(outputs, *previous)
        given = (self.args, self.kwargs)
        numbers = other_numbers(given, step) if step else given
        return convert(numbers, convert_leaf, objects=True) if convert_leaf else numbers


def named_inputs(args: tuple, kwargs: dict) -> tuple[list[str], list[Any], Any]:
    """Every leaf of a call's inputs: its name (`0`, `carry.inner.z_H`), itself, and the structure."""
    tree = convert((args, kwargs), lambda v: v, objects=True)
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [
        f"{getattr(path[1], 'idx', getattr(path[1], 'key', ''))}{jax.tree_util.keystr(path[2:])}" for path, _ in flat
    ]
    return names, [value for _, value in flat], structure


def ordered_as(given: Any, rebuilt: Any) -> Any:
    """`rebuilt`, its dicts in the order of `given`: JAX sorts their keys, and a module may go through them in turn."""
    if type(given) is dict:
        return {key: ordered_as(value, rebuilt[key]) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(ordered_as(a, b) for a, b in zip(given, rebuilt, strict=True))
    return rebuilt


def other_numbers(inputs: Any, step: int) -> Any:
    """Inputs for a further call: tensors of the same shapes, types and kind of content, with other numbers in them.

    Floats are drawn between the least and the largest given one, from a fixed seed. Integers, booleans and floats that
    look like a mask, which are whole or not finite, are rolled along the first axis that has several entries.
    """
    generator = torch.Generator().manual_seed(step)
    known: dict[int, Any] = {}  # an input that is given twice stays one

    def other(value: Any) -> Any:
        if not torch.is_tensor(value) or value.layout is not torch.strided or not value.numel():
            return value
        if id(value) not in known:
            known[id(value)] = _other(value.detach(), step, generator).requires_grad_(value.requires_grad)
        return known[id(value)]

    return convert(inputs, other, objects=True)


def _other(tensor: torch.Tensor, step: int, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        return torch.view_as_complex(_other(parts.contiguous(), step, generator))
    wide = tensor.double()
    low, high = wide.aminmax()
    if not tensor.is_floating_point() or (low < high and (wide == wide.round()).all()) or not wide.isfinite().all():
        axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
        return tensor.roll(step, axes[0]) if axes else tensor.clone()
    low = low / 2 if low == high else low
    drawn = low + (high - low) * torch.rand(wide.shape, dtype=wide.dtype, generator=generator)
    return tensor.clone().copy_(drawn)


def widened(value: Any) -> Any:
    """A floating-point or complex tensor in double precision, anything else as it is."""
    if not torch.is_tensor(value) or not differentiable(value.dtype):
        return value
    wide = value.detach().to(torch.complex128 if value.is_complex() else torch.float64)
    return wide.requires_grad_(value.requires_grad)
