"""Values and gradients at corners, boundaries, ties, infinities and nan, and of special functions: PyTorch's."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import array, compare, in_jax, randn, same
from special_points import BINARY, DIFFERS, ROW_VALUES, ROWS, UNARY
from torch import nn

import bridge

inf = math.inf
nan = math.nan
SIZES = (0.5, 1.0, 2.0, 3.0, 6.0, 20.0, 87.0, 100.0, 1e30, inf)
POINTS = torch.tensor([0.0, -0.0, *SIZES, *(-s for s in SIZES), nan])
PAIRS = torch.tensor([*itertools.product(POINTS.tolist(), repeat=2)]).T
ORDINARY = torch.tensor([-1.7, -0.45, 0.3, 0.85, 2.6])
ORDINARY_PAIRS = torch.tensor([*itertools.product(ORDINARY.tolist(), [-0.6, 0.4, 1.9])]).T


class Table(nn.Module):
    """Row i of every input goes to function i."""

    def __init__(self, functions, rest):
        super().__init__()
        self.functions = functions
        self.rest = rest

    def forward(self, *inputs):
        return [f(*(x[i] for x in inputs), *self.rest) for i, f in enumerate(self.functions)]


TABLES = {
    "unary": (UNARY, [POINTS], [ORDINARY]),
    "binary": (BINARY, list(PAIRS), list(ORDINARY_PAIRS)),
    "rows": (ROWS, [ROW_VALUES], None),
}
REST = {"rows": (1,)}


def inputs_of(functions, points):
    return [p.expand(len(functions), *p.shape).clone() for p in points]


def weight_of(table, shape):
    """PyTorch's backward is given ones for functions of elements, so that a product with it hides nothing."""
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape) / 8 if table == "rows" else torch.ones(shape)


def in_pytorch(table):
    """Returns value, gradients and, where PyTorch has them, second derivatives of each function."""
    functions, points, ordinary = TABLES[table]
    results = []
    for function in functions.values():
        leaves = [p.clone().requires_grad_() for p in points]
        out = function(*leaves, *REST.get(table, ()))
        gradients = torch.autograd.grad(out, leaves, weight_of(table, out.shape))
        second = second_in_pytorch(function, ordinary) if ordinary else None
        results.append((out.numpy(force=True), numpy_of(gradients), second))
    return results


def numpy_of(tensors):
    return [t.numpy(force=True) for t in tensors]


def second_in_pytorch(function, points):
    leaves = [p.clone().requires_grad_() for p in points]
    out = function(*leaves)
    first = torch.autograd.grad(out, leaves, torch.ones_like(out), create_graph=True)
    total = sum(g.sum() for g in first) + 0 * sum(p.sum() for p in leaves)
    try:
        return numpy_of(torch.autograd.grad(total, leaves))
    except RuntimeError as error:
        assert "derivative" in str(error) and "is not implemented" in str(error)
        return None


def in_the_bridge(table):
    functions, points, ordinary = TABLES[table]
    fn = bridge.export(Table(functions.values(), REST.get(table, ())))

    def call(*inputs):
        return fn({}, {}, *inputs)[0]

    def total(*inputs):
        outs = call(*inputs)
        return sum(jnp.sum(o * weight_of(table, o.shape).numpy()) for o in outs), outs

    @functools.partial(jax.jit, compiler_options={"xla_llvm_disable_expensive_passes": True})
    def program(inputs, at_ordinary):
        places = tuple(range(len(inputs)))
        gradients, outs = jax.grad(total, places, has_aux=True)(*inputs)
        if at_ordinary is None:
            return outs, gradients, (), ()
        forward = [
            jax.jvp(lambda x, i=i: call(*inputs[:i], x, *inputs[i + 1 :]), [x], [jnp.ones_like(x)])[1]
            for i, x in enumerate(inputs)
        ]
        first = jax.grad(lambda *xs: sum(jnp.sum(g) for g in jax.grad(lambda *ys: total(*ys)[0], places)(*xs)), places)
        return outs, gradients, forward, first(*at_ordinary)

    arrays = [[array(x) for x in inputs_of(functions, p)] if p else None for p in (points, ordinary)]
    return jax.device_get(program(*arrays))


def differences(ours, expected, point_of, what, name):
    """Returns a line for each point at which two results are not close."""
    ours = np.asarray(ours, np.float64)
    expected = np.asarray(expected, np.float64)
    same = (ours == expected) | (np.isnan(ours) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        near = np.isfinite(ours) & np.isfinite(expected) & (abs(ours - expected) <= 2e-5 * (1 + abs(expected)))
    differs, _ = DIFFERS.get(name, (lambda *point: False, ""))
    return [
        f"{name}: {what} at {point_of(place)}: {ours[tuple(place)]}, PyTorch {expected[tuple(place)]}"
        for place in np.argwhere(~(same | near))
        if not differs(*point_of(place))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_special_points(table):
    """One test for each program: several would be run by several processes, which would all compile it."""
    functions, points, ordinary = TABLES[table]
    ours, reverse, forward, our_second = in_the_bridge(table)

    def at(points):
        return lambda place: tuple(
            points[0][place[0]].tolist() if table == "rows" else (float(p[*place]) for p in points)
        )

    found = []
    for i, (name, (out, gradients, second)) in enumerate(zip(functions, in_pytorch(table), strict=True)):
        found += differences(ours[i], out, at(points), "value", name)
        for k, gradient in enumerate(gradients):
            found += differences(reverse[k][i], gradient, at(points), f"gradient {k}", name)
            if ordinary:
                found += differences(forward[k][i], gradient, at(points), f"forward gradient {k}", name)
            if second is not None:
                found += differences(our_second[k][i], second[k], at(ordinary), f"second derivative {k}", name)
    assert not found, "\n".join(found)


def test_differences_are_those_of_functions_in_the_tables():
    assert DIFFERS.keys() <= {name for functions, _, _ in TABLES.values() for name in functions}


# ---- Special functions over the range in which PyTorch computes them

NEGATIVE = -torch.arange(0.05, 7, 0.19)
NEGATIVE = NEGATIVE[(NEGATIVE - NEGATIVE.round()).abs() > 0.03]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_polygamma_of_negative_numbers(n):
    """Against float64; below -7 JAX has another number, and the bridge nan, except for n = 1."""
    far = torch.tensor([-7.5, -100.25])
    ours = in_jax(lambda x: torch.polygamma(n, x), torch.cat([NEGATIVE, far]))
    np.testing.assert_allclose(ours[:-2], torch.polygamma(n, NEGATIVE.double()), rtol=2e-5, atol=2e-5)
    expected = torch.polygamma(1, far.double()) if n == 1 else torch.full((2,), math.nan)
    np.testing.assert_allclose(ours[-2:], expected, rtol=2e-5)


def test_incomplete_gamma_functions():
    a, x = (t.flatten() for t in torch.meshgrid(*[torch.tensor([0.3, 1.0, 2.5, 40.0])] * 2, indexing="ij"))
    same(lambda a, x: (torch.igamma(a, x), torch.igammac(a, x)), a, x, atol=2e-6)
    compare(lambda x: torch.igamma(torch.tensor(2.5), x.exp()), [randn(4)])


# ---- `logcumsumexp` of rows with infinities and nan at every place: values and gradients are those of PyTorch


def rows(values, dtype):
    return torch.tensor([*itertools.product(values, repeat=3)], dtype=dtype)


REAL = rows([4.0, 1.0, 2.0, -3.0, 0.5], torch.float32)
COMPLEX = rows([1j, -1, 1 + 1j, 2 - 0.5j], torch.complex64)
SCANS = {
    "rows": (REAL, 1),
    "columns": (REAL.T.contiguous(), 0),
    "the middle one of three dimensions": (REAL.reshape(5, 25, 3).transpose(1, 2).contiguous(), 1),
    "complex": (COMPLEX, 1),
}


@pytest.mark.parametrize(("x", "dim"), SCANS.values(), ids=SCANS)
def test_logcumsumexp(x, dim):
    leaf = x.clone().requires_grad_()
    expected = leaf.logcumsumexp(dim)
    weight = (torch.arange(x.numel()).view(x.shape) % 4 / 4).to(x.dtype)  # zeros among them
    (wanted,) = torch.autograd.grad(expected, leaf, weight)

    @jax.jit
    def both(x, weight):
        out, pull = jax.vjp(lambda x: in_jax(lambda x: x.logcumsumexp(dim), x), x)
        return out, pull(weight)[0]

    out, gradient = both(array(x), array(weight))
    np.testing.assert_allclose(out, expected.numpy(force=True), rtol=1e-5)
    np.testing.assert_allclose(gradient.conj(), wanted.resolve_conj().numpy(), rtol=1e-5, atol=1e-6)
