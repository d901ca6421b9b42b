"""A case of the corpus in plain PyTorch and through `bridge.export` under `jit`: three calls, every leaf compared.

The PyTorch side is a loop of its own that shares no code with `bridge.verify`. Each call has other inputs; buffers and
written parameters go from one to the next. PyTorch's random draws are recorded and given to JAX in place of a key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bridge
from campaigns.bridge_corpus_numbers import Leaves, errors, flat, mapped, numbers, projection

CALLS = 3
TOLERANCE = 1e-4
"""Largest error of a leaf, relative to its largest entry. For a gradient, this entry counts as at least a thousandth of
the largest entry of all gradients.
"""
DOUBLE = 8
"""A leaf may also differ by this multiple of the difference between PyTorch's float32 and float64 results."""
GRADIENT = 0.1
"""A gradient may differ by this share of its largest entry if both sides agree in float64. It jumps where the input of
a ReLU is zero but for rounding, and one run in float32 says little about the rounding of a sum of one entry."""
EXACT = 1e-8
"""Largest error of a leaf, relative to its largest entry, at which both sides agree in float64."""

Inputs = tuple[tuple, dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A module and the inputs of its calls."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    """Returns the inputs of call 0, 1, 2."""
    train: bool | None = True
    method: str = "forward"
    loss: Callable[[Any], Any] | None = None
    """Maps outputs to the objective, by default a fixed random projection of all outputs."""
    advance: Callable[[Any, Inputs], Inputs] | None = None
    """Maps the outputs of the previous call and new inputs to the inputs of a call, on either side."""
    double: Callable[[], nn.Module] | None = None
    """Builds the module in float64, by default `build().double()`."""
    input_gradients: bool = True
    spans_calls: bool = False
    """True if the graph of a call continues in the next one: the calls are differentiated together."""
    tolerance: float = TOLERANCE
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of `bridge.export`."""


# ---- PyTorch


class Draws(TorchDispatchMode):
    """Records what PyTorch draws without a generator, or replays it."""

    def __init__(self, given: list[torch.Tensor] | None):
        super().__init__()
        self.made: list[torch.Tensor] = []
        self.given = None if given is None else iter(given)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        draws = torch.Tag.nondeterministic_seeded in func.tags and torch.is_tensor(out)  # attention has the tag, too
        if draws and (kwargs or {}).get("generator") is None:
            if self.given is not None:
                out.copy_(next(self.given))
            self.made.append(out.detach().clone())
        return out


@dataclasses.dataclass
class Reference:
    """The results of PyTorch."""

    leaves: list[Leaves]
    """Outputs, buffers and gradients of each call, by name."""
    draws: list[list[torch.Tensor]]


def in_pytorch(case: Case, draws: list[list[torch.Tensor]] | None = None) -> Reference:
    """Runs the calls, with these draws if any are given."""
    torch.manual_seed(0)
    module = case.build()
    if case.train is not None:
        module.train(case.train)
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    trained = {name: t for name, t in state.items() if t.requires_grad}
    result = Reference([], [])
    outputs = None
    total = torch.zeros(())
    everything: list[dict[str, torch.Tensor]] = []
    for call in range(CALLS):
        args, kwargs = case.inputs(call)
        if case.advance and call:
            args, kwargs = case.advance(mapped(outputs, torch.detach), (args, kwargs))
        args, kwargs = mapped((args, kwargs), lambda t: _leaf(t, case.input_gradients))
        free = {f"input gradient {path}": t for path, t in flat((args, kwargs)) if torch.is_tensor(t)}
        free = {name: t for name, t in free.items() if t.requires_grad}
        everything.append(free)
        torch.manual_seed(100 + call)
        with Draws(draws[call] if draws else None) as mode:
            outputs = getattr(module, case.method)(*args, **kwargs)
        result.draws.append(mode.made)
        leaves = {f"output {path}": numbers(leaf).copy() for path, leaf in flat(outputs)}
        value = case.loss(outputs) if case.loss else projection(outputs, torch.from_numpy)
        total = total + value if case.spans_calls else value
        if not case.spans_calls:
            _clear((*trained.values(), *free.values()))
            if torch.is_tensor(value) and value.requires_grad:
                value.backward()
            leaves |= _gradients(trained, free)
        now = dict(module.named_parameters()) | dict(module.named_buffers())
        for name in state:
            kind = "parameter" if name in trained else "buffer"
            leaves[f"{kind} {name}"] = numbers(now[name]).copy()
        result.leaves.append(leaves)
    if case.spans_calls:
        total.backward()
        for call, (leaves, free) in enumerate(zip(result.leaves, everything, strict=True)):
            leaves |= _gradients(trained if call == CALLS - 1 else {}, free)
    return result


def in_double(case: Case) -> Case:
    """Returns the same case in float64."""
    build = case.double or (lambda: case.build().double())
    return dataclasses.replace(case, build=build, inputs=lambda call: mapped(case.inputs(call), _widened))


@contextlib.contextmanager
def float_is_double() -> Iterator[None]:
    """Makes JAX keep float64, and `x.float()` return float64, inside the block."""
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), jax.enable_x64(True):
        yield


def _widened(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _leaf(value: torch.Tensor, input_gradients: bool) -> torch.Tensor:
    floating = value.is_floating_point() or value.is_complex()
    return value.detach().clone().requires_grad_(input_gradients and floating)


def _clear(tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _gradients(trained: dict[str, torch.Tensor], free: dict[str, torch.Tensor]) -> Leaves:
    named = {f"gradient {name}": t for name, t in trained.items()} | free
    return {name: numbers(torch.zeros_like(t) if t.grad is None else t.grad).copy() for name, t in named.items()}


# ---- JAX


@dataclasses.dataclass
class Translated:
    """The results of JAX."""

    leaves: list[Leaves]
    program: str
    """SHA-256 of the texts of the lowered programs."""
    texts: list[str]


def in_jax(case: Case, draws: list[list[torch.Tensor]]) -> Translated:
    torch.manual_seed(0)
    fn = bridge.export(case.build(), **case.options)
    calls: list[tuple[list, Any]] = []
    for call in range(CALLS):
        leaves, rebuild = _parts(case.inputs(call))
        calls.append(([_array(v) if torch.is_tensor(v) else v for v in leaves], rebuild))
    keys = [[_array(d) for d in each] for each in draws]
    if case.spans_calls:
        return _together(case, fn, calls, keys)
    result = Translated([], "", [])
    known = {}
    params = fn.params
    buffers = fn.buffers
    outputs = None
    for call, (leaves, rebuild) in enumerate(calls):
        if case.advance and call:
            leaves, rebuild = _parts(case.advance(outputs, rebuild(leaves)))
        free = {i: v for i, v in enumerate(leaves) if _is_free(v, case)}
        bound = {i: v for i, v in enumerate(leaves) if i not in free}
        given = params, free, buffers, bound, keys[call]
        others = [(path, v) for path, v in flat(rebuild(leaves)) if not isinstance(v, jax.Array)]
        kind = str((others, jax.tree.map(lambda a: (a.shape, a.dtype), given)))
        if kind not in known:
            names: dict[str, Any] = {}
            value_and_grad = jax.value_and_grad(_objective(case, fn, rebuild, names), argnums=(0, 1), has_aux=True)
            lowered = jax.jit(value_and_grad).lower(*given)
            result.texts.append(lowered.as_text())
            known[kind] = lowered.compile(), names
        compiled, names = known[kind]
        (_, (numbered, buffers, params, outputs)), gradients = compiled(*given)
        result.leaves.append(_named(numbered, names, buffers, params, gradients, rebuild, leaves))
    result.program = hashlib.sha256("\n".join(result.texts).encode()).hexdigest()
    return result


def _objective(case: Case, fn: bridge.Functional, rebuild: Callable, names: dict) -> Callable:
    def objective(params, free, buffers, bound, draws):
        leaves = free | bound
        args, kwargs = rebuild([leaves[i] for i in range(len(leaves))])
        result = fn.run(params, buffers, *args, rng=draws, train=case.train, method=case.method, **kwargs)
        value = case.loss(result.outputs) if case.loss else projection(result.outputs, jnp.asarray)
        listed = list(flat(result.outputs))
        names["outputs"] = [path for path, _ in listed]
        carried = result.outputs if case.advance else None
        return jnp.asarray(value, jnp.float32), ([leaf for _, leaf in listed], result.buffers, result.params, carried)

    return objective


def _named(numbered, names, buffers, params, gradients, rebuild, leaves) -> Leaves:
    paths = [path for path, leaf in flat(rebuild(leaves)) if isinstance(leaf, (jax.Array, np.ndarray))]
    named = {f"output {path}": leaf for path, leaf in zip(names["outputs"], numbered, strict=True)}
    named |= {f"gradient {name}": jnp.conj(g) for name, g in gradients[0].items()}
    named |= {f"input gradient {paths[i]}": jnp.conj(g) for i, g in gradients[1].items()}
    named |= {f"buffer {name}": a for name, a in buffers.items()} | {f"parameter {n}": a for n, a in params.items()}
    return {name: numbers(leaf) for name, leaf in named.items()}


def _together(case: Case, fn: bridge.Functional, calls: list, keys: list) -> Translated:
    """Compiles all calls as one program: the gradient of the sum of their objectives."""
    names: list[dict[str, Any]] = [{} for _ in calls]

    def total(params, inputs, buffers, draws):
        value = jnp.zeros(())
        made = []
        for call, (_, rebuild) in enumerate(calls):
            objective = _objective(case, fn, rebuild, names[call])
            each, (numbered, buffers, params, _) = objective(params, inputs[call], buffers, {}, draws[call])
            value = value + each
            made = [*made, (numbered, buffers, params)]
        return value, made

    inputs = [dict(enumerate(leaves)) for leaves, _ in calls]
    given = fn.params, inputs, fn.buffers, keys
    lowered = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True)).lower(*given)
    text = lowered.as_text()
    (_, made), gradients = lowered.compile()(*given)
    result = Translated([], hashlib.sha256(text.encode()).hexdigest(), [text])
    for call, ((numbered, buffers, params), (leaves, rebuild)) in enumerate(zip(made, calls, strict=True)):
        slopes = (gradients[0] if call == CALLS - 1 else {}), gradients[1][call]
        result.leaves.append(_named(numbered, names[call], buffers, params, slopes, rebuild, leaves))
    return result


def _parts(inputs: Inputs) -> tuple[list, Callable[[list], Inputs]]:
    """Returns the tensors, arrays and numbers of the inputs in the order of `flat`, and a function to replace them."""
    leaves = [leaf for _, leaf in flat(inputs) if torch.is_tensor(leaf) or isinstance(leaf, (jax.Array, np.ndarray))]

    def rebuild(values: list) -> Inputs:
        remaining = iter(values)
        return mapped(inputs, lambda _: next(remaining))

    return leaves, rebuild


def _is_free(value: Any, case: Case) -> bool:
    return case.input_gradients and isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.inexact)


def _array(tensor: torch.Tensor) -> jax.Array:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.float().numpy(), jnp.bfloat16)
    return jnp.array(tensor.numpy())


# ---- the comparison


def compared(case: Case, reference: Reference, translated: Translated) -> tuple[bool, float, float, str]:
    """Returns whether the case is right, its largest error, its largest error as a share of the bound, and the leaf
    with that share.

    Either side runs in float64 only if a leaf differs by more than is allowed without it.
    """
    measured = [errors(ours, theirs) for ours, theirs in zip(reference.leaves, translated.leaves, strict=True)]
    allowed: list[dict[str, float]] = [{} for _ in measured]
    if any(error > case.tolerance for each in measured for error in each.values()):
        try:
            with float_is_double():
                exact = in_pytorch(in_double(case), reference.draws)
        except Exception:  # a module that does not run in float64 has only the fixed tolerance
            exact = reference
        allowed = [errors(ours, wide) for ours, wide in zip(reference.leaves, exact.leaves, strict=True)]
    largest = 0.0
    share = 0.0
    leaf = ""
    beyond = []
    for call, each in enumerate(measured):
        for name, error in each.items():
            limit = max(case.tolerance, DOUBLE * allowed[call].get(name, 0.0))
            part = 0.0 if not error else error / limit if np.isfinite(error) else float("inf")
            largest = max(largest, error)
            if part > 1:
                beyond.append(error if "gradient" in name else float("inf"))
            if part > share:
                share = part
                leaf = f"call {call}: {name}"
    right = not beyond or (max(beyond) <= GRADIENT and _agree_in_double(case, reference.draws))
    return right, largest, share, leaf


def _agree_in_double(case: Case, draws: list[list[torch.Tensor]]) -> bool:
    """Returns True if PyTorch and JAX agree on every leaf in float64."""
    wide = in_double(case)
    try:
        with float_is_double():
            exact = in_pytorch(wide, draws)
            translated = in_jax(wide, [[*map(_widened, each)] for each in draws])
    except Exception:
        return False
    pairs = zip(exact.leaves, translated.leaves, strict=True)
    return all(error <= EXACT for ours, theirs in pairs for error in errors(ours, theirs).values())
