"""Runs one ATen operation in PyTorch and, through the bridge, in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from lowering_cases import WORKSPACE, numbers
from torch import nn

import bridge
from bridge.lowerings import FUNCTIONS, LOWERINGS

aten = torch.ops.aten
TOLERANCE = 1e-5
"""Tolerance for one operation in float32."""


class Op(nn.Module):
    """One call of one op; the floating-point arguments are arguments of `forward`."""

    def __init__(self, op, args, kwargs):
        super().__init__()
        self.op = op
        self.args = args
        self.kwargs = kwargs

    def forward(self, *tensors):
        rest = iter(tensors)
        args = [next(rest) if is_free(a) else a for a in self.args]
        out = FUNCTIONAL.get(self.op, self.op)(*args, **self.kwargs)
        out = tuple(out)[: WORKSPACE.get(self.op, 9)] if isinstance(out, (tuple, list)) else (out,)
        # The sign of an eigenvector is arbitrary.
        return tuple(map(abs, out)) if self.op is aten._linalg_eigh.default else out


FUNCTIONAL = {op: function for function, op in FUNCTIONS.items() if op in LOWERINGS}


def is_free(value):
    return torch.is_tensor(value) and value.is_floating_point()


def in_pytorch(op, args, kwargs):
    """Returns outputs and the gradients of every floating-point argument, in float64."""
    leaves = [a.clone().requires_grad_() for a in args if is_free(a)]
    outputs = Op(op, args, kwargs)(*leaves)
    total = sum((o * weights(o.shape)).sum() for o in outputs if o.requires_grad)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if torch.is_tensor(total) else [None] * len(leaves)
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    return outputs, [zero if grad is None else grad + zero for zero, grad in zip(zeros, grads, strict=True)]


def in_jax(op, args, kwargs, off=()):
    fn = bridge.export(Op(op, args, kwargs), lowerings=dict.fromkeys(off))
    leaves = [to_jax(a, jnp.float32) for a in args if is_free(a)]

    def objective(leaves):
        outputs, _ = fn({}, {}, *leaves)
        floats = [o for o in outputs if jnp.issubdtype(o.dtype, jnp.floating)]
        return sum((jnp.sum(o * jnp.asarray(weights(o.shape).numpy(), jnp.float32)) for o in floats), 0.0), outputs

    (_, outputs), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(leaves)
    return outputs, grads


def weights(shape):
    return numbers(*shape, seed=7)


def assert_close(actual, expected, tolerance=TOLERANCE):
    assert len(actual) == len(expected)
    for ours, truth in zip(actual, expected, strict=True):
        truth = truth.detach().double().numpy()
        assert ours.shape == truth.shape
        scale = max(np.abs(truth).max(initial=0), 1e-3)
        np.testing.assert_allclose(np.asarray(ours, np.float64), truth, rtol=0, atol=tolerance * scale)


def to_jax(tensor, dtype):
    """Converts in NumPy: JAX would compile a program for each shape."""
    wide = tensor.double().numpy().astype(np.float64 if jax.config.jax_enable_x64 else np.float32)
    return jax.device_put(wide.astype(dtype))
