"""A module through the bridge against PyTorch eager: outputs, and the gradients of parameters and inputs."""

import re
from collections import deque
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


def randn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Call(nn.Module):
    """`function(*inputs)`, or `function(module, *inputs)` with a submodule to use."""

    def __init__(self, function: Callable, module: nn.Module | None = None):
        super().__init__()
        self.function = function
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.function(*args) if self.module is None else self.function(self.module, *args)


class Calls(nn.Module):
    """`function(module, x)`, with a weight and attributes: buffers, modules, and what a module holds besides."""

    def __init__(self, function: Callable, **attributes: Any):
        super().__init__()
        self.w = nn.Parameter(torch.eye(3) * 0.5)
        for name, value in attributes.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


class Restored(nn.Module):
    """Starts each call with the same weights: PyTorch keeps what `forward` writes."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.state = {n: p.detach().clone() for n, p in module.named_parameters()}

    def forward(self, *args: Any) -> Any:
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                parameter.copy_(self.state[name])
        return self.module(*args)


class Doubled(torch.autograd.Function):
    """A function with a backward of its own, which is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


Module = nn.Module | Callable
"""A function is the forward of a module."""


def differentiated(
    forward: Callable, backward: Callable, name: str = "Differentiated", **members: Any
) -> type[torch.autograd.Function]:
    """Returns a `torch.autograd.Function` of these two, and of other methods and attributes."""
    members |= {"forward": forward, "backward": backward}
    methods = {key: staticmethod(value) if callable(value) else value for key, value in members.items()}
    return type(name, (torch.autograd.Function,), methods)


def compare(module: Module, inputs: Sequence[torch.Tensor], tolerance: float = 2e-5, **settings: Any) -> None:
    """Raise `AssertionError` unless all agree. JAX's gradient of a complex array is the conjugate of PyTorch's."""
    module = module_of(module)
    free = [i for i, x in enumerate(inputs) if x.dtype.is_floating_point or x.is_complex()]
    leaves = [x.clone().requires_grad_(i in free) for i, x in enumerate(inputs)]
    expected = _listed(module(*leaves))
    weights = [_weights(out) for out in expected]
    total: Any = sum(_total(out, w) for out, w in zip(expected, weights, strict=True))
    if total.requires_grad:
        total.backward()
    fn = bridge.export(module)
    arrays = [array(x) for x in inputs]

    def loss(params: dict, by_place: dict) -> tuple:
        given = [by_place.get(i, a) for i, a in enumerate(arrays)]
        outs = _listed(fn.run(params, fn.buffers, *given, **settings).outputs)
        return sum(_total(out, w.numpy()) for out, w in zip(outs, weights, strict=True)), outs

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    (by_params, by_inputs), results = gradient(fn.params, {i: arrays[i] for i in free})
    for result, out in zip(results, expected, strict=True):
        close(result, out.detach(), tolerance)
    for i in free:
        close(jnp.conj(by_inputs[i]), _gradient(leaves[i]), tolerance)
    for name, parameter in module.named_parameters():
        if name in by_params:
            close(jnp.conj(by_params[name]), _gradient(parameter), tolerance)
            parameter.grad = None


def verified(module: Module, *args: Any, **settings: Any) -> None:
    """Raise `AssertionError` unless `bridge.verify` is content."""
    report = bridge.verify(module_of(module), *args, **settings)
    assert report.ok, f"\n{report}"


def in_jax(module: Module, *inputs: Any, jit: bool = False, **settings: Any) -> Any:
    """Returns the exported module's result for arrays, or for tensors that become arrays."""
    fn = bridge.export(module_of(module))
    arrays = [array(x) for x in inputs]

    def call(params: dict, *arrays: Any) -> Any:
        return fn(params, fn.buffers, *arrays, **settings)[0]

    return (jax.jit(call) if jit else call)(fn.params, *arrays)


def same(module: Module, *inputs: torch.Tensor, jit: bool = True, rtol: float = 0, atol: float = 0) -> None:
    """Raise `AssertionError` unless results are PyTorch's, of its dtypes: bit for bit unless a tolerance is given."""
    expected = jax.tree.leaves(module(*inputs))
    for ours, theirs in zip(jax.tree.leaves(in_jax(module, *inputs, jit=jit)), expected, strict=True):
        assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.").replace("int64", "int32")
        wide = theirs.detach().to(torch.complex128 if theirs.is_complex() else torch.float64).numpy()
        np.testing.assert_allclose(np.asarray(ours, wide.dtype), wide, rtol=rtol, atol=atol)


def raises(message: str, module: Module, *inputs: Any, error: type = bridge.BridgeError, **settings: Any) -> str:
    """The text of the error of a traced call, with this message; the line of source that it quotes does not count."""
    fn = bridge.export(module_of(module))
    arrays = [array(x) for x in inputs]
    with pytest.raises(error) as caught:
        jax.eval_shape(lambda p, b, *arrays: fn(p, b, *arrays, **settings)[0], fn.params, fn.buffers, *arrays)
    text = re.sub(r"(:\d+): `.*`\. Remedy: ", r"\1. Remedy: ", str(caught.value), flags=re.DOTALL)
    assert re.search(message, text), text
    return text


def module_of(module: Module) -> nn.Module:
    return module if isinstance(module, nn.Module) else Call(module)


def array(x: Any) -> Any:
    """Returns a tensor as an array, and anything else as it is.

    `jnp.asarray` without a dtype compiles a program for each shape.
    """
    if isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16:
        return jnp.asarray(x.float().numpy(), jnp.bfloat16)
    if isinstance(x, torch.Tensor):
        return jax.device_put(x.numpy().copy())
    return x


def gradients(module: Module, *inputs: Any, **settings: Any) -> dict[str, jax.Array]:
    """JAX's gradients of the sum of the output, by the names of the parameters."""
    fn = bridge.export(module)
    arrays = [array(x) for x in inputs]
    return jax.grad(lambda params: fn(params, fn.buffers, *arrays, **settings)[0].sum())(fn.params)


TRANSFORMS = {
    "vmap": lambda loss, params, rows: jax.vmap(loss, (None, 0))(params, rows).sum(),
    "scan": lambda loss, params, rows: jax.lax.scan(lambda s, x: (s + loss(params, x), None), 0.0, rows)[0],
    "checkpoint": lambda loss, params, rows: sum(jax.checkpoint(loss)(params, x) for x in rows),
}


def composes(transform: str, module: nn.Module, rows: torch.Tensor) -> None:
    """Raise `AssertionError` unless the gradient through calls for all rows under a transformation is PyTorch's."""
    fn = bridge.export(module)

    def loss(params: dict, x: Any) -> Any:
        return jnp.sin(fn(params, fn.buffers, x)[0]).sum()

    sum(torch.sin(module(row)).sum() for row in rows.clone().requires_grad_()).backward()
    ours = jax.jit(jax.grad(lambda params: TRANSFORMS[transform](loss, params, array(rows))))(fn.params)
    for name, gradient in ours.items():
        np.testing.assert_allclose(gradient, module.get_parameter(name).grad, rtol=1e-5, atol=1e-5, err_msg=name)


def agrees(make: Callable[[], nn.Module], *inputs: torch.Tensor, calls: int = 3) -> None:
    """Raise `AssertionError` unless compiled calls in a row return PyTorch's outputs and, at the end, its buffers."""
    module = make()
    fn = bridge.export(make())
    buffers = fn.buffers
    arrays = [array(x) for x in inputs]
    call = jax.jit(lambda buffers, *arrays: fn(fn.params, buffers, *arrays))
    for _ in range(calls):
        expected = module(*inputs)
        result, buffers = call(buffers, *arrays)
        np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5)
    for name, value in buffers.items():
        np.testing.assert_allclose(value, module.get_buffer(name).numpy(), rtol=1e-5)


def refused(make: Callable[[], nn.Module], message: str, *inputs: torch.Tensor, **settings: Any) -> None:
    """Raise `AssertionError` unless a call, compiled or not, is an error with this message and changes no module."""
    module = make()
    fn = bridge.export(module)
    before = snapshot(module)
    arrays = [array(x) for x in inputs]

    def call(params: dict, *arrays: Any) -> Any:
        return fn.run(params, fn.buffers, *arrays, **settings)

    for form in (jax.jit(call), call):
        with pytest.raises(bridge.BridgeError, match=message):
            form(fn.params, *arrays)
    assert snapshot(module) == before


def snapshot(value: Any) -> Any:
    """Returns the contents of a value in order."""
    if isinstance(value, torch.Tensor):
        return id(value), value.tolist(), snapshot(vars(value))
    if isinstance(value, dict):
        return [
            (id(key) if isinstance(key, (torch.Tensor, nn.Module)) else key, snapshot(v)) for key, v in value.items()
        ]
    if isinstance(value, (list, tuple, set, deque)):
        return [snapshot(v) for v in value]
    if hasattr(value, "__dict__") and not isinstance(value, (type, FunctionType)):
        return snapshot(vars(value))
    return value


def close(result: Any, expected: torch.Tensor, tolerance: float) -> None:
    """Asserts equality up to `tolerance` of the largest finite entry."""
    wanted = expected.resolve_conj().numpy()
    finite = np.abs(wanted[np.isfinite(wanted)]).max(initial=1e-3)
    np.testing.assert_allclose(result, wanted, rtol=0, atol=tolerance * finite)


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _listed(outputs: Any) -> list:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def _weights(out: torch.Tensor) -> torch.Tensor:
    return randn(*out.shape, 2, seed=9)


def _total(out: Any, weights: Any) -> Any:
    """Returns a real number with a gradient for every part of `out`."""
    if "complex" in str(out.dtype):
        return (out.real * weights[..., 0]).sum() + (out.imag * weights[..., 1]).sum()
    return (out * weights[..., 0]).sum()
