"""One step of a module in PyTorch, and the same step through the bridge: outputs, gradients, buffers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from bridge._compat.torch import DispatchMode, storage_id
from bridge.arrays import array_of
from bridge.attributes import arrays_in
from bridge.call import method_of, refuse_gradient_hooks
from bridge.errors import BridgeError
from bridge.export import Functional
from bridge.generators import WatchedGenerator, default_generator_as
from bridge.held_objects import WEAK
from bridge.memory import array_over, shares_memory
from bridge.operations import is_draw
from bridge.parity.leaves import Leaf, Leaves, is_array, leaf_of, named
from bridge.pytrees import convert, is_number
from bridge.shadow import with_copies
from bridge.written_arguments import SHARED


@dataclasses.dataclass(frozen=True)
class Call:
    """What both sides do."""

    train: bool | None
    method: str
    loss: Callable[[Any], Any] | None
    input_gradients: bool


class TorchSide:
    """Works on `module` itself: give it a copy."""

    def __init__(self, module: nn.Module, call: Call):
        self.module, self.call, self.draws = module, call, []
        if call.train is not None:
            module.train(call.train)
        # As they are before the first call: a buffer that is assigned a result requires grad after it.
        self._trained = {n: t for n, t in self._state().items() if t.requires_grad}

    def step(self, args: tuple, kwargs: dict, draws: list | None = None) -> tuple[Any, Leaves]:
        for tensor in self._trained.values():
            tensor.grad = None
        given = [t for t in jax.tree.leaves(named_inputs(args, kwargs)[1]) if torch.is_tensor(t)]
        args, kwargs, inputs = self._inputs(args, kwargs)
        copies = [(t, t._version) for t in jax.tree.leaves(named_inputs(args, kwargs)[1]) if torch.is_tensor(t)]
        before = snapshot(self._state())
        with drawing(draws) as self.draws:
            outputs = method_of(self.module, self.call.method)(*args, **kwargs)
        memory = [storage_id(t) for t in given if t.layout is torch.strided]
        if len(set(memory)) < len(memory) and any(t._version != version for t, version in copies):
            raise BridgeError(SHARED)
        # Before the backward pass, which adds to a `grad` that the module returns, or that a `backward()` in it left.
        detached = convert(outputs, lambda v: v.detach().clone() if torch.is_tensor(v) else v)
        loss = self.call.loss
        objective = loss(outputs) if loss else projection(outputs, torch.is_tensor, torch_weigh)
        for tensor in (*self._trained.values(), *inputs.values()):
            tensor.grad = None
        if torch.is_tensor(objective) and objective.requires_grad:
            objective.backward()
        state = self._state()  # after the call: a buffer may have been assigned anew
        leaves = {
            "output": named(detached),
            "gradient": {n: gradient_leaf(t) for n, t in self._trained.items()},
            "input gradient": {n: gradient_leaf(t) for n, t in inputs.items()},
            "buffer": {n: leaf_of(t, unwritten(t, before.get(n))) for n, t in state.items() if n not in self._trained},
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
        return *_ordered_as((args, kwargs), copies), leaves

    def _cut(self) -> None:
        """Gradients are those of one step: what a buffer holds goes on without the graph that made it."""
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.grad_fn is not None:
                    module._buffers[name] = buffer.detach()

    def _state(self) -> dict[str, torch.Tensor]:
        return dict(self.module.named_parameters()) | dict(self.module.named_buffers())


def gradient_leaf(tensor: torch.Tensor) -> Leaf:
    """What backward left at a leaf. Without any gradient it is zero in truth: JAX's has to be zero, too."""
    if tensor.grad is None:
        return leaf_of(torch.zeros_like(tensor), "no gradient in PyTorch")
    return leaf_of(tensor.grad)


Snapshot = tuple[torch.Tensor, int, torch.Tensor]
"""A tensor, its version, its values."""


def snapshot(state: dict[str, torch.Tensor]) -> dict[str, Snapshot]:
    return {name: (t, t._version, t.detach().clone()) for name, t in state.items()}


def unwritten(tensor: torch.Tensor, before: Snapshot | None) -> str:
    """Why a buffer may be zero: nobody wrote it, or it was something else before."""
    if before is None:
        return ""
    same, version, values = before
    if tensor is same and tensor._version == version:
        return "not written"
    return "cleared" if values.any() else ""


def named_inputs(args: tuple, kwargs: dict) -> tuple[list[str], list[Any], Any]:
    """Every leaf of a call's inputs: its name (`0`, `carry.inner.z_H`), itself, and the structure."""
    tree = convert((args, kwargs), lambda v: v)
    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [
        f"{getattr(path[1], 'idx', getattr(path[1], 'key', ''))}{jax.tree_util.keystr(path[2:])}" for path, _ in flat
    ]
    return names, [value for _, value in flat], structure


def _ordered_as(given: Any, rebuilt: Any) -> Any:
    """`rebuilt`, its dicts in the order of `given`: JAX sorts their keys, and a module may go through them in turn."""
    if type(given) is dict:
        return {key: _ordered_as(value, rebuilt[key]) for key, value in given.items()}
    if type(given) in (list, tuple):
        return type(given)(_ordered_as(a, b) for a, b in zip(given, rebuilt, strict=True))
    return rebuilt


class JaxSide:
    def __init__(self, fn: Functional, call: Call, jit: bool):
        self.fn, self.call, self.jit = fn, call, jit
        self.params, self.buffers = fn.params, fn.buffers
        self._known: tuple[Any, Callable] | None = None

    def step(self, args: tuple, kwargs: dict, draws: list) -> tuple[Any, Leaves]:
        names, values, structure = named_inputs(args, kwargs)
        free = {n: v for n, v in zip(names, values, strict=True) if self._is_free(v)}
        bound = {n: v for n, v in zip(names, values, strict=True) if is_array(v) and n not in free}
        fixed = {n: (type(v), v) for n, v in zip(names, values, strict=True) if not is_array(v)}
        if self._known is None or self._known[0] != (structure, fixed):
            # Compiled again only where something else than the arrays has changed.
            self._known = (structure, fixed), self._gradient(names, values, structure)
        draws = [array_of(draw) for draw in draws]
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
            result = self.fn.run(params, buffers, *args, rng=draws, train=call.train, method=call.method, **kwargs)
            value = call.loss(result.outputs) if call.loss else projection(result.outputs, is_array, jax_weigh)
            numbers = jax.tree.map(lambda v: v if is_number(v) else None, result.outputs)  # no text, which JAX refuses
            return jnp.asarray(value, jnp.result_type(float)), result._replace(outputs=numbers)

        gradient = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
        return jax.jit(gradient) if self.jit else gradient


def _as_pytorch(gradient: jax.Array) -> jax.Array:
    """The gradient of a real objective by a complex number is, in PyTorch, the conjugate of JAX's."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


@contextlib.contextmanager
def drawing(given: list[torch.Tensor] | None) -> Iterator[list[torch.Tensor]]:
    """Record what PyTorch draws, or replay `given`."""
    with default_generator_as(WatchedGenerator()) as default, _Draws(given, default) as mode:
        yield mode.draws


class _Draws(DispatchMode):
    def __init__(self, given: list[torch.Tensor] | None, default: WatchedGenerator):
        super().__init__()
        self._default = default
        self.draws = [] if given is None else list(given)
        self._replay = None if given is None else iter(given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seeded = self._default.seeded or (kwargs or {}).get("generator") is not None
        if func in _RRELU and args[4:] == (True,) and not seeded:
            with self:  # for a draw that can be recorded
                return _rrelu(func, *args)
        out = func(*args, **(kwargs or {}))
        if is_draw(func) and not seeded:  # numbers of a seeded generator are the same on both sides
            if self._replay is None:
                self.draws.append(out.detach().clone())
            else:
                out.copy_(next(self._replay))
        return out


_RRELU = (torch.ops.aten.rrelu_with_noise.default, torch.ops.aten.rrelu_with_noise_.default)


def _rrelu(func: Any, x: torch.Tensor, noise: torch.Tensor, lower: float, upper: float, _training: bool) -> Any:
    """PyTorch's operation in training mode, with a slope drawn for every entry."""
    noise.copy_(torch.where(x <= 0, torch.empty_like(x).uniform_(lower, upper), 1))
    return x.mul_(noise) if func is _RRELU[1] else x * noise


def projection(outputs: Any, is_leaf: Callable[[Any], bool], weigh: Callable) -> Any:
    """A real number that feels every element of every output: the default objective."""
    leaves = [leaf for leaf in jax.tree.leaves(convert(outputs, lambda v: v)) if is_leaf(leaf)]
    rng = np.random.default_rng(0)
    total: Any = 0.0
    for leaf in leaves:
        shape = tuple(leaf.shape)
        weights: Any = rng.normal(size=shape) / max(leaf.size if is_array(leaf) else leaf.numel(), 1) ** 0.5
        if leaf.dtype.is_complex if torch.is_tensor(leaf) else jnp.iscomplexobj(leaf):
            weights = weights + 1j * rng.normal(size=shape) / max(weights.size, 1) ** 0.5
        total = total + weigh(leaf, weights)
    return total


def torch_weigh(leaf: torch.Tensor, weights: np.ndarray) -> Any:
    if not leaf.requires_grad:
        return 0.0
    total = (leaf * torch.as_tensor(weights, dtype=leaf.dtype)).sum()
    return total.real if total.is_complex() else total


def jax_weigh(leaf: jax.Array, weights: np.ndarray) -> Any:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return 0.0
    return (leaf * jnp.asarray(weights, leaf.dtype)).sum().real


def copied(module: nn.Module) -> nn.Module:
    """A copy to work on. Raises `BridgeError` for a module that has none.

    A tensor that a hook made of parameters (pruning, weight norm) is copied as its values: PyTorch copies no results.
    """
    refuse_gradient_hooks(module)  # a copy would not have them
    results = [v for m in module.modules() for v in vars(m).values() if torch.is_tensor(v) and not v.is_leaf]
    known: dict[int, Any] = {id(t): t.detach().clone() for t in results}
    try:
        _copy_parameters(module, known)
        _copy_arrays(module, known)
        twin = copy.deepcopy(module, known)
        _refer_to_copies(twin, known)
        return twin
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise BridgeError(
            f"the module cannot be copied ({text}); verify works on a copy, so that yours stays"
        ) from error


def _refer_to_copies(module: nn.Module, copies: dict[int, Any]) -> None:
    """In hooks and attributes, let functions that enclose what was copied enclose the copy: `deepcopy` shares them."""
    for each in module.modules():
        for contents in (vars(each), *[v for v in vars(each).values() if isinstance(v, dict)]):
            contents.update({k: with_copies(copies, v) for k, v in contents.items() if isinstance(v, _FUNCTIONS)})
            contents.update({k: _weak_copy(copies, v) for k, v in contents.items() if isinstance(v, WEAK)})


def _weak_copy(copies: dict[int, Any], value: Any) -> Any:
    """The dict with what was copied in the places of the originals, which `deepcopy` keeps in it."""
    return type(value)({copies.get(id(k), k): copies.get(id(v), v) for k, v in value.items()})


_FUNCTIONS = (types.FunctionType, functools.partial)


def _copy_parameters(module: nn.Module, known: dict[int, Any]) -> None:
    """Put copies of parameters into the memo: `deepcopy` leaves their attributes out, and parts what shares memory."""
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and id(parameter) not in known:
            values = copy.deepcopy(parameter.detach(), known)
            known[id(parameter)] = twin = nn.Parameter(values, parameter.requires_grad)
            vars(twin).update(copy.deepcopy(vars(parameter), known))


def _copy_arrays(module: nn.Module, known: dict[int, Any]) -> None:
    """Put copies of NumPy arrays over the memory of parameters and buffers into the memo: these share memory, too."""
    for array in arrays_in(module):
        for tensor in [*module.parameters(), *module.buffers()]:
            if shares_memory(array, tensor):
                twin = array_over(copy.deepcopy(tensor, known), array, tensor)
                known |= {} if twin is None else {id(array): twin}


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
