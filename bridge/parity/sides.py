"""One step of a module in PyTorch, and the same step through the bridge: inputs, outputs, gradients, buffers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bridge._compat.flex import FLEX_ATTENTION, as_operations, sdpa_dense
from bridge._compat.torch import DispatchMode, lazy_conjugates
from bridge.dispatch.branches import Answers, answering
from bridge.dispatch.random import WatchedGenerator, is_draw, watched_generator
from bridge.dispatch.schemas import is_random
from bridge.errors import is_framework, named_failure
from bridge.functional import Functional
from bridge.lowerings import DECOMPOSITIONS
from bridge.module.call import method_of, refuse_gradient_hooks
from bridge.module.copying import independent
from bridge.module.state import state_of, trained_in
from bridge.parity.report import ARRAYS, Leaf, Leaves, leaf_of, named
from bridge.symbolic.conversion import FUNCTIONS, converted
from bridge.tensor.arrays import array_of
from bridge.tensor.pytrees import convert, is_number, named_inputs
from bridge.tensor.tensor import DIFFERENTIABLE, BridgeTensor

Advance = Callable[[Any, tuple, dict], tuple[tuple, dict]]
"""(outputs, args, kwargs) of one step -> args and kwargs of the next; written for either side's arrays."""


Shifts = Mapping[tuple[str, str], torch.Tensor]
"""(kind of gradient, name) of a parameter or input -> the shift added to it."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """The call that both sides make, step after step."""

    args: tuple
    kwargs: dict[str, Any]
    advance: Advance | None
    train: bool | None
    method: str
    loss: Callable[[Any], Any]
    input_gradients: bool
    known_inputs: str = ""
    """A regular expression over names of inputs that the JAX side knows while tracing, and that stay the same."""
    branches: bool = False
    """True if the code branches on traced values, so that the sides that PyTorch takes have to be found."""

    def knows(self, name: str) -> bool:
        return bool(self.known_inputs) and re.fullmatch(self.known_inputs, name) is not None


def other_numbers(inputs: Any, step: int, kept: Container[int] = ()) -> Any:
    """Returns inputs for a further call: tensors of the same shapes, types and kind of content, with other numbers.

    Floats are drawn between the least and the largest given one, from a fixed seed. Integers, booleans and floats that
    look like a mask, which are whole or not finite, are rolled along the first axis that has several entries. `kept`
    has the ids of tensors that stay as they are.
    """
    generator = torch.Generator().manual_seed(step)

    def other(value: Any) -> Any:
        if not torch.is_tensor(value) or value.layout is not torch.strided or not value.numel() or id(value) in kept:
            return value
        return _other(value.detach(), step, generator).requires_grad_(value.requires_grad)

    return convert(inputs, other, objects=True)


def _other(tensor: torch.Tensor, step: int, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        return torch.view_as_complex(_other(parts.contiguous(), step, generator))
    wide = tensor.double()
    low, high = wide.aminmax()
    if not tensor.is_floating_point() or (low < high and (wide == wide.round()).all()) or not wide.isfinite().all():
        axes = [axis for axis, size in enumerate(tensor.shape) if size > 1]
        if axes:
            return tensor.roll(step, axes[0])
        return tensor.clone()
    if low == high:
        low = low / 2
    drawn = low + (high - low) * torch.rand(wide.shape, dtype=wide.dtype, generator=generator)
    return tensor.clone().copy_(drawn)


def widened(value: Any) -> Any:
    """Returns a floating-point or complex tensor in double precision, and anything else unchanged."""
    if not torch.is_tensor(value) or value.dtype not in DIFFERENTIABLE:
        return value
    return value.detach().to(torch.promote_types(value.dtype, torch.float64)).requires_grad_(value.requires_grad)


class wide_casts(TorchFunctionMode):  # noqa: N801 (a context)
    """Casts to floating-point types of fewer bits than float64 give float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _CASTS:
            return args[0].double()
        if func is not torch.Tensor.view:  # which reads the bits of a type
            args = tuple(map(_wide_dtype, args))
            kwargs = {name: _wide_dtype(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


_CASTS = (torch.Tensor.bfloat16, torch.Tensor.half, torch.Tensor.float)


def _wide_dtype(value: Any) -> Any:
    is_float = isinstance(value, torch.dtype) and value in DIFFERENTIABLE
    if is_float:
        return torch.promote_types(value, torch.float64)
    return value


def in_double(module: nn.Module, method: str) -> nn.Module:
    """Returns a copy of the module in float64, whose `method` casts to no narrower floating-point type."""
    copy = copied(module)._apply(widened)
    narrow = getattr(copy, method)

    @functools.wraps(narrow)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with wide_casts():  # inside of the call, where it precedes the modes of the bridge
            return narrow(*args, **kwargs)

    vars(copy)[method] = wide
    return copy


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Tensors that the module makes are in float64, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def to_jax(value: Any) -> Any:
    if torch.is_tensor(value):
        return array_of(value)
    return value


def inputs_of(call: Steps, convert_leaf: Callable[[Any], Any]) -> Generator[tuple[tuple, dict], Any, None]:
    """Yields args and kwargs of each step. The caller sends the outputs of each step to get the inputs of the next one.

    `convert_leaf` converts the given tensors to the side's own arrays.
    """
    given = (call.args, call.kwargs)
    kept = {id(value) for name, value in named_inputs(*given)[0].items() if call.knows(name)}
    inputs: Any = convert(given, convert_leaf, objects=True)
    for step in itertools.count(1):
        outputs = yield inputs
        if call.advance:
            with named_failure(f"`advance` fails, after step {step - 1}"):
                inputs = call.advance(outputs, *inputs)
        else:
            inputs = convert(other_numbers(given, step, kept), convert_leaf, objects=True)


# ---- one step on either side


class Draws(list[torch.Tensor]):
    """The random draws of a step, and the sides of branches that it took."""

    answers: Answers


class TorchSide:
    """The steps in PyTorch. The side works on `module` itself: give it a copy."""

    def __init__(self, module: nn.Module, call: Steps, convert_leaf: Callable[[Any], Any] = lambda value: value):
        self._module = module
        self._call = call
        self._inputs = inputs_of(call, convert_leaf)
        self._outputs = None
        self.draws = Draws()
        """The draws of the last step."""
        self.objective = 0.0
        """The objective of the last step."""
        self.epsilon = 0.0
        """The distance from 1 to the next number in the narrowest floating-point type that the steps had."""
        self.cuts_gradients = False
        """True if a step used a tensor that requires grad in a way that autograd does not see: its gradient may be
        another one than the derivative."""
        if call.train is not None:
            module.train(call.train)
        self._first = state_of(module).keys()
        # The state before the first call: a buffer to which a result is assigned requires grad after it.
        self.trained = trained_in(module)

    def next(self, draws: list[torch.Tensor] | None = None, shifts: Shifts | None = None) -> Leaves:
        """Runs the next step, with these random draws if any are given, at shifted parameters and inputs."""
        for tensor in self.trained.values():
            tensor.grad = None
        given = self._inputs.send(self._outputs)
        args, kwargs, inputs = self._copies(*given)
        for (kind, name), shift in (shifts or {}).items():
            if kind == "gradient":
                leaf = self.trained[name]
            else:
                leaf = named_inputs(args, kwargs)[0][name]
            leaf.data += shift
        asked = {name for name, t in named_inputs(*given)[0].items() if torch.is_tensor(t) and t.requires_grad}
        before = copied(self._module) if self._call.branches else None
        with watching(draws) as watch:
            outputs = method_of(self._module, self._call.method)(*args, **kwargs)
        self.draws = watch.draws
        if before is not None:
            self.draws.answers = self._answers(before, given)
        self.epsilon = max(self.epsilon, watch.epsilon)
        self.cuts_gradients |= watch.cuts_gradients
        # Copied before the backward pass, which adds to a `grad` that the module returns or that its `backward()` left.
        self._outputs = convert(outputs, lambda v: v.detach().clone() if torch.is_tensor(v) else v, objects=True)
        leaves = self.trained | {name: leaf for name, leaf in inputs.items() if name in asked}
        left = {name: leaf_of(leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None}
        for tensor in (*self.trained.values(), *inputs.values()):
            tensor.grad = None
        objective = self._call.loss(outputs)
        self.objective = float(objective.detach() if torch.is_tensor(objective) else objective)
        if torch.is_tensor(objective) and objective.requires_grad:
            objective.backward()
        # Read after the call, since it may have assigned a buffer anew.
        state = {n: t for n, t in state_of(self._module).items() if not self._is_table(n)}
        leaves = {
            "output": named(self._outputs),
            ".grad": left,
            "gradient": {n: gradient_leaf(t) for n, t in self.trained.items()},
            "input gradient": {n: gradient_leaf(t) for n, t in inputs.items()},
            "buffer": {n: leaf_of(t) for n, t in state.items() if n not in self.trained},
            "parameter": {n: leaf_of(t) for n, t in state.items() if n in self.trained},
        }
        detached: dict[int, torch.Tensor] = {}
        for module in self._module.modules():  # a buffer goes on without the graph that made it
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    base = buffer if buffer._base is None else buffer._base
                    root = detached.setdefault(id(base), base.detach())
                    view = (buffer.shape, buffer.stride(), buffer.storage_offset())
                    module._buffers[name] = root if buffer is base else root.as_strided(*view)
        return leaves

    def _answers(self, module: nn.Module, given: Any) -> Answers:
        """Returns the sides that the module takes, by its converted code with the draws of the last step."""
        args, kwargs, _ = self._copies(*given)
        answers = Answers()
        answers.functions = len(FUNCTIONS)
        with watching(self.draws), converted(), answering(answers):
            method_of(module, self._call.method)(*args, **kwargs)
        return answers

    def _copies(self, args: tuple, kwargs: dict) -> tuple[tuple, dict, dict[str, torch.Tensor]]:
        """Returns copies of the inputs, as results of leaves so that the module may write into them, and the leaves."""
        leaves: dict[int, torch.Tensor] = {}

        def copy_of(value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            leaf = value.detach().clone()
            if not (self._call.input_gradients and leaf.dtype in DIFFERENTIABLE):
                return leaf
            copy = leaf.requires_grad_().clone()
            leaves[id(copy)] = leaf
            return copy

        args, kwargs = convert((args, kwargs), copy_of, objects=True)
        copies, _ = named_inputs(args, kwargs)
        return args, kwargs, {name: leaves[id(copy)] for name, copy in copies.items() if id(copy) in leaves}

    def _is_table(self, name: str) -> bool:
        """True for a buffer that a call has made and that no state dict has."""
        owner, _, key = name.rpartition(".")
        return name not in self._first and key in self._module.get_submodule(owner)._non_persistent_buffers_set


def gradient_leaf(tensor: torch.Tensor) -> Leaf:
    """Returns the gradient that backward left at a leaf. Without one it is truly zero: JAX's has to be zero, too."""
    if tensor.grad is None:
        return leaf_of(torch.zeros_like(tensor), "no gradient in PyTorch")
    return leaf_of(tensor.grad)


class JaxSide:
    """The steps through the bridge."""

    def __init__(
        self, fn: Functional, call: Steps, jit: bool, convert_leaf: Callable[[Any], Any] = lambda value: value
    ):
        self._fn = fn
        self._call = call
        self._jit = jit
        self._inputs = inputs_of(call, lambda value: to_jax(convert_leaf(value)))
        self._outputs = None
        self._params = fn.params
        self._buffers = fn.buffers
        self._compiled: tuple[Any, Callable] | None = None
        self.asked: list[str] = []
        """Places that ask an input whether it requires grad: it does in PyTorch, and does not in the bridge."""

    def next(self, draws: Draws) -> Leaves:
        """Runs the next step, with these random draws."""
        args, kwargs = self._inputs.send(self._outputs)
        inputs, structure = named_inputs(args, kwargs)
        first: dict[int, str] = {}
        twins = {n: first.setdefault(id(v), n) for n, v in inputs.items()}  # an input may be given twice
        known = {twins[n] for n, v in inputs.items() if isinstance(v, ARRAYS) and self._call.knows(n)}
        arrays: dict[str, Any] = {}
        rest: dict[str, Any] = {}
        for name, value in inputs.items():
            if isinstance(value, ARRAYS) and twins[name] not in known:
                arrays[twins[name]] = value
                value = None
            elif name in known:
                value = np.asarray(value)
            rest[name] = value
        free = {n: v for n, v in arrays.items() if self._call.input_gradients and jnp.issubdtype(v.dtype, jnp.inexact)}
        unknown = {n: v for n, v in rest.items() if twins[n] not in known}
        others = structure, unknown, [type(v) for v in rest.values()], twins, draws.answers
        if self._compiled is None or self._compiled[0] != others:
            # Compile again only if something besides the arrays has changed; known inputs do not change.
            self._compiled = others, self._gradient(structure, rest, twins, draws.answers)
        drawn = [array_of(draw) for draw in draws]
        (_, result), gradients = self._compiled[1](self._params, free, arrays, self._buffers, drawn)
        self._outputs, self._buffers, self._params = result
        return {
            "output": named(self._outputs),
            "gradient": {n: _gradient_leaf(g) for n, g in gradients[0].items()},
            "input gradient": {n: _gradient_leaf(gradients[1][of]) for n, of in twins.items() if of in free},
            "buffer": {n: leaf_of(a) for n, a in (self._buffers | self._fn.options.static).items()},
            "parameter": {n: leaf_of(a) for n, a in self._params.items()},
        }

    def at(self, module: nn.Module) -> JaxSide:
        """Returns a side with the state of `module` and the program of this one, before its first step."""
        side = copy.copy(self)
        state = {name: to_jax(tensor) for name, tensor in state_of(module).items()}
        side._inputs = inputs_of(self._call, to_jax)
        side._outputs = None
        side._params, side._buffers = ({n: state[n] for n in each} for each in (self._fn.params, self._fn.buffers))
        return side

    def _gradient(self, structure: Any, rest: dict[str, Any], twins: dict[str, str], answers: Answers) -> Callable:
        """Returns the gradient of one call by its parameters and `free`.

        `rest` holds inputs that are not arrays, `twins` the name under which each input is given.
        """
        call = self._call

        def objective(params, free, arrays, buffers, draws):
            values = rest | arrays | free
            args, kwargs = jax.tree.unflatten(structure, [values[name] for name in twins.values()])
            with _noting_who_asks_inputs(self.asked), answering(answers):
                result = self._fn.run(
                    params, buffers, *args, rng=draws, train=call.train, method=call.method, module_kwargs=kwargs
                )
            numbers = jax.tree.map(lambda v: v if is_number(v) else None, result.outputs)  # JAX refuses text
            return jnp.asarray(call.loss(result.outputs), jnp.result_type(float)), result._replace(outputs=numbers)

        gradient = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        if self._jit:
            return jax.jit(gradient)
        return gradient


def _gradient_leaf(gradient: jax.Array) -> Leaf:
    """Returns the gradient as PyTorch has it: by a complex number, it is the conjugate of JAX's."""
    if jnp.iscomplexobj(gradient):  # `conj` compiles a program for each shape, also of real numbers
        gradient = gradient.conj()
    return leaf_of(gradient)


@contextlib.contextmanager
def _noting_who_asks_inputs(places: list[str]) -> Iterator[None]:
    """Adds to `places` each line of the user's code that reads `requires_grad` of an input, or of a result of one."""
    known: Any = vars(BridgeTensor)["requires_grad"]

    def read(tensor: BridgeTensor) -> bool:
        code = sys._getframe(1).f_code
        line = sys._getframe(1).f_lineno
        if tensor.may_have_gradient and not known.fget(tensor) and not is_framework(code.co_filename):
            places.append(f"{code.co_filename}:{line}")
        return known.fget(tensor)

    type.__setattr__(BridgeTensor, "requires_grad", property(read, known.fset))
    try:
        yield
    finally:
        type.__setattr__(BridgeTensor, "requires_grad", known)


@contextlib.contextmanager
def watching(given: list[torch.Tensor] | None) -> Iterator[Watch]:
    """Records what PyTorch draws, or replays `given`."""
    with as_operations(), watched_generator() as default, Watch(given, default) as watch, _NotingDetached(watch):
        yield watch


class _NotingDetached(TorchFunctionMode):
    """Notes what the module detaches; PyTorch's own operations detach where the derivative stays the same."""

    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _DETACHING:
            self._watch.note_cut(args)
        if func is FLEX_ATTENTION:  # PyTorch's own form in operations: the other one has no gradient on a CPU
            return sdpa_dense(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_DETACHING = (torch.detach, torch.Tensor.detach, torch.Tensor.detach_, torch.Tensor.data.__get__)  # pyright: ignore


class Watch(DispatchMode):
    """Records what PyTorch draws, or replays `given`, and notes what the verdict on its results depends on."""

    def __init__(self, given: list[torch.Tensor] | None, default: WatchedGenerator):
        super().__init__()
        self._default = default
        self._replay = None if given is None else iter(given)
        self.draws = Draws()
        self.draws.answers = Answers()
        self.epsilon = 0.0
        self.cuts_gradients = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        for result in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(result) and result.dtype in DIFFERENTIABLE:
                self.epsilon = max(self.epsilon, torch.finfo(result.dtype).eps)
        if not torch.is_grad_enabled():  # as in a custom Function, too
            self.note_cut(args)
        return out

    def note_cut(self, tensors: Iterable[Any]) -> None:
        self.cuts_gradients |= any(torch.is_tensor(tensor) and tensor.requires_grad for tensor in tensors)

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if self._default.seeded or kwargs.get("generator") is not None or not is_random(func):
            with lazy_conjugates():
                return func(*args, **kwargs)  # a seeded generator gives both sides the same numbers
        if func in DECOMPOSITIONS and not is_draw(func):
            with self:  # for a draw that can be recorded, in the form that the other side uses
                return DECOMPOSITIONS[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if is_draw(func):
            if self._replay is not None:
                out.copy_(next(self._replay))
            self.draws.append(out.detach().clone())
        return out


def projection(outputs: Any) -> Any:
    """Returns a real number that depends on every element of every output of either side: the default objective."""
    total: Any = 0.0
    leaves: list[Any] = jax.tree.leaves(convert(outputs, lambda v: v, objects=True))
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, (torch.Tensor, *ARRAYS)):
            continue
        rng = np.random.default_rng(place)  # a number of Python's may be an array on the other side
        weights: Any = np.asarray(rng.normal(size=leaf.shape))
        if "complex" in str(leaf.dtype):
            weights = weights + 1j * rng.normal(size=leaf.shape)
        weights = weights / max(weights.size, 1) ** 0.5
        if torch.is_tensor(leaf) and leaf.requires_grad:
            total = total + (leaf * torch.as_tensor(weights, dtype=leaf.dtype)).sum().real
        elif not torch.is_tensor(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact):
            total = total + (leaf * jnp.asarray(weights, leaf.dtype)).sum().real
    return total


def copied(module: nn.Module, noise: float = 0.0, seed: int = 0) -> nn.Module:
    """A copy to work on, with noise of this size, relative to each parameter that is not zero, the same for each seed.

    Raises `BridgeError` for a module with gradient hooks, which a copy would not have.
    """
    refuse_gradient_hooks(module)
    copy = independent(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(state_of(copy).items()) if noise else ():
            if isinstance(parameter, nn.Parameter) and parameter.dtype in DIFFERENTIABLE:
                wide = torch.promote_types(parameter.dtype, torch.float64)
                drawn = torch.randn(parameter.shape, generator=generator, dtype=wide)
                size = parameter.to(wide).abs().square().mean().sqrt().item() or 1.0
                parameter.add_((noise * size * drawn).to(parameter.dtype))
    return copy
