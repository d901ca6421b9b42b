"""One step of a module in PyTorch, and the same step through the bridge: inputs, outputs, gradients, buffers."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from bridge._compat.torch import DispatchMode
from bridge.dispatch.compute import is_draw, is_random
from bridge.dispatch.random import WatchedGenerator, watched_generator
from bridge.errors import is_framework, named_failure
from bridge.export import Functional
from bridge.lowerings import DECOMPOSITIONS
from bridge.module.call import method_of, refuse_gradient_hooks
from bridge.module.copy import independent
from bridge.parity.report import Leaf, Leaves, is_array, leaf_of, named
from bridge.tensor.arrays import array_of
from bridge.tensor.pytrees import convert, is_number
from bridge.tensor.tensor import BridgeTensor, differentiable

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


# ---- one step on either side


class Side:
    """One side, step after step."""

    def __init__(self, call: Call, convert_leaf: Callable[[Any], Any] | None):
        self.call, self._convert_leaf = call, convert_leaf
        self._next, self._outputs, self._given = 0, None, ((), {})

    def next(self, draws: list | None = None) -> Leaves:
        """Runs the next step, with these random draws if there are any."""
        self._given = self.call.inputs(self._next, self._outputs, self._given, self._convert_leaf)
        self._outputs, leaves = self.step(*self._given, draws)
        self._next += 1
        return leaves

    def step(self, args: tuple, kwargs: dict, draws: list | None) -> tuple[Any, Leaves]:
        raise NotImplementedError


class TorchSide(Side):
    """Works on `module` itself: give it a copy."""

    def __init__(self, module: nn.Module, call: Call, convert_leaf: Callable[[Any], Any] | None = None):
        super().__init__(call, convert_leaf)
        self.module, self.draws = module, []
        if call.train is not None:
            module.train(call.train)
        # As they are before the first call: a buffer that is assigned a result requires grad after it.
        self._trained = {n: t for n, t in self._state().items() if t.requires_grad}

    def step(self, args: tuple, kwargs: dict, draws: list | None) -> tuple[Any, Leaves]:
        for tensor in self._trained.values():
            tensor.grad = None
        given = {n: t for n, t in zip(*named_inputs(args, kwargs)[:2], strict=True) if torch.is_tensor(t)}
        args, kwargs, inputs = self._inputs(args, kwargs)
        with drawing(draws) as self.draws:
            outputs = method_of(self.module, self.call.method)(*args, **kwargs)
        # Before the backward pass, which adds to a `grad` that the module returns, or that a `backward()` in it left.
        detached = convert(outputs, lambda v: v.detach().clone() if torch.is_tensor(v) else v, objects=True)
        loss = self.call.loss
        objective = loss(outputs) if loss else projection(outputs)
        leaves = self._trained | {n: t for n, t in inputs.items() if given[n].requires_grad}
        left = {n: leaf_of(t.grad) for n, t in leaves.items() if t.grad is not None}
        for tensor in (*self._trained.values(), *inputs.values()):
            tensor.grad = None
        if torch.is_tensor(objective) and objective.requires_grad:
            objective.backward()
        state = self._state()  # after the call: a buffer may have been assigned anew
        leaves = {
            "output": named(detached),
            ".grad": left,
            "gradient": {n: gradient_leaf(t) for n, t in self._trained.items()},
            "input gradient": {n: gradient_leaf(t) for n, t in inputs.items()},
            "buffer": {n: leaf_of(t) for n, t in state.items() if n not in self._trained},
            "parameter": {n: leaf_of(t) for n, t in state.items() if n in self._trained},
        }
        self._cut()
        return detached, leaves

    def _inputs(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, dict[str, torch.Tensor]]:
        """Copies of the inputs, results of leaves, so that the module may write into them; and the leaves by name."""
        names, values, structure = named_inputs(args, kwargs)
        leaves: dict[str, torch.Tensor] = {}

        def given(name: str, value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            leaf = value.detach().clone()
            if not (self.call.input_gradients and (leaf.is_floating_point() or leaf.is_complex())):
                return leaf
            leaves[name] = leaf.requires_grad_()
            return leaf.clone()

        copies = jax.tree.unflatten(structure, [given(n, v) for n, v in zip(names, values, strict=True)])
        return *ordered_as((args, kwargs), copies), leaves

    def _cut(self) -> None:
        """Gradients are those of one step: what a buffer holds goes on without the graph that made it."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    module._buffers[name] = buffer.detach()

    def _state(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())


def gradient_leaf(tensor: torch.Tensor) -> Leaf:
    """The gradient that backward left at a leaf. Without one it is zero in truth: JAX's has to be zero, too."""
    if tensor.grad is None:
        return leaf_of(torch.zeros_like(tensor), "no gradient in PyTorch")
    return leaf_of(tensor.grad)


class JaxSide(Side):
    def __init__(self, fn: Functional, call: Call, jit: bool):
        super().__init__(call, _to_jax)
        self.fn, self.jit = fn, jit
        self.asked: list[str] = []
        """Where the module asks an input whether it requires grad: it does in PyTorch, and does not in the bridge."""
        self.params, self.buffers = fn.params, fn.buffers
        self._known: tuple[Any, Callable] | None = None

    def step(self, args: tuple, kwargs: dict, draws: list | None) -> tuple[Any, Leaves]:
        names, values, structure = named_inputs(args, kwargs)
        free = {n: v for n, v in zip(names, values, strict=True) if self._is_free(v)}
        bound = {n: v for n, v in zip(names, values, strict=True) if is_array(v) and n not in free}
        fixed = {n: (type(v), v) for n, v in zip(names, values, strict=True) if not is_array(v)}
        if self._known is None or self._known[0] != (structure, fixed):
            # Compiled again only where something else than the arrays has changed.
            self._known = (structure, fixed), self._gradient(names, values, structure)
        draws = [array_of(draw) for draw in draws or []]
        (_, result), gradients = self._known[1](self.params, free, bound, self.buffers, draws)
        outputs, self.buffers, self.params = result
        return outputs, {
            "output": named(outputs),
            "gradient": {n: leaf_of(_as_pytorch(g)) for n, g in gradients[0].items()},
            "input gradient": {n: leaf_of(_as_pytorch(g)) for n, g in gradients[1].items()},
            "buffer": {n: leaf_of(a) for n, a in self.buffers.items()},
            "parameter": {n: leaf_of(a) for n, a in self.params.items()},
        }

    def _is_free(self, value: Any) -> bool:
        return self.call.input_gradients and is_array(value) and jnp.issubdtype(value.dtype, jnp.inexact)

    def _gradient(self, names: list[str], values: list, structure: Any) -> Callable:
        call = self.call

        def objective(params, free, bound, buffers, draws):
            arrays = free | bound
            given = [arrays.get(name, value) for name, value in zip(names, values, strict=True)]
            args, kwargs = jax.tree.unflatten(structure, given)
            with _noting_who_asks_inputs(self.asked):
                result = self.fn.run(params, buffers, *args, rng=draws, train=call.train, method=call.method, **kwargs)
            value = call.loss(result.outputs) if call.loss else projection(result.outputs)
            numbers = jax.tree.map(lambda v: v if is_number(v) else None, result.outputs)  # no text, which JAX refuses
            return jnp.asarray(value, jnp.result_type(float)), result._replace(outputs=numbers)

        gradient = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        return jax.jit(gradient) if self.jit else gradient


@contextlib.contextmanager
def _noting_who_asks_inputs(places: list[str]) -> Iterator[None]:
    """Add to `places` each line of the user's code that reads `requires_grad` of an input, or of a result of inputs."""
    known: Any = vars(BridgeTensor)["requires_grad"]

    def read(tensor: BridgeTensor) -> bool:
        code, line = sys._getframe(1).f_code, sys._getframe(1).f_lineno
        if tensor.may_have_gradient and not known.fget(tensor) and not is_framework(code.co_filename):
            places.append(f"{code.co_filename}:{line}")
        return known.fget(tensor)

    type.__setattr__(BridgeTensor, "requires_grad", property(read, known.fset))
    try:
        yield
    finally:
        type.__setattr__(BridgeTensor, "requires_grad", known)


def _to_jax(value: Any) -> Any:
    return array_of(value) if torch.is_tensor(value) else value


def _as_pytorch(gradient: jax.Array) -> jax.Array:
    """The gradient of a real objective by a complex number is, in PyTorch, the conjugate of JAX's."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


@contextlib.contextmanager
def drawing(given: list[torch.Tensor] | None) -> Iterator[list[torch.Tensor]]:
    """Record what PyTorch draws, or replay `given`."""
    with watched_generator() as default, _Draws(given, default) as mode:
        yield mode.draws


class _Draws(DispatchMode):
    def __init__(self, given: list[torch.Tensor] | None, default: WatchedGenerator):
        super().__init__()
        self._default = default
        self.draws = [] if given is None else list(given)
        self._replay = None if given is None else iter(given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seeded = self._default.seeded or (kwargs or {}).get("generator") is not None
        if func in DECOMPOSITIONS and is_random(func) and not is_draw(func) and not seeded:
            with self:  # for a draw that can be recorded, as the other side makes it
                return DECOMPOSITIONS[func](*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if is_draw(func) and not seeded:  # numbers of a seeded generator are the same on both sides
            if self._replay is None:
                self.draws.append(out.detach().clone())
            else:
                out.copy_(next(self._replay))
        return out


def projection(outputs: Any) -> Any:
    """A real number that feels every element of every output of either side: the default objective."""
    rng = np.random.default_rng(0)
    total: Any = 0.0
    leaves: list[Any] = jax.tree.leaves(convert(outputs, lambda v: v, objects=True))
    for leaf in leaves:
        if not (torch.is_tensor(leaf) or is_array(leaf)):
            continue
        shape = tuple(leaf.shape)
        weights: Any = rng.normal(size=shape) / max(math.prod(shape), 1) ** 0.5
        if leaf.dtype.is_complex if torch.is_tensor(leaf) else jnp.iscomplexobj(leaf):
            weights = weights + 1j * rng.normal(size=shape) / max(math.prod(shape), 1) ** 0.5
        if torch.is_tensor(leaf):
            if leaf.requires_grad:
                total = total + (leaf * torch.as_tensor(weights, dtype=leaf.dtype)).sum().real
        elif jnp.issubdtype(leaf.dtype, jnp.inexact):
            total = total + (leaf * jnp.asarray(weights, leaf.dtype)).sum().real
    return total


def copied(module: nn.Module) -> nn.Module:
    """A copy to work on. Raises `BridgeError` for a module with hooks of gradients."""
    refuse_gradient_hooks(module)  # a copy would not have them
    return independent(module)


def jitter(modules: list[nn.Module], scale: float) -> None:
    """Add noise of this size to every parameter, the same in each module: a leaf that starts at zero then speaks."""
    generator = torch.Generator().manual_seed(0)
    named = [dict(m.named_parameters()) for m in modules]
    with torch.no_grad():
        for name, parameter in named[0].items():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            wide = torch.complex128 if parameter.is_complex() else torch.float64
            noise = scale * torch.randn(parameter.shape, generator=generator, dtype=wide)
            for parameters in named:
                parameters[name].add_(noise.to(parameters[name].dtype))
