"""Branches on traced values: PyTorch's values and gradients on inputs that take each side, or a refusal by name."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import compare, randn
from torch import nn

import bridge
from bridge.symbolic import conversion
from tests.bridge.branch_cases import CASES, DOWN, UP, Base

QUICK = ("ForWithBreak", "BufferOnOneSide", "LayerDrop")


def _cases(quick: bool) -> list:
    marks = [] if quick else [pytest.mark.slow]
    return [pytest.param(name, marks=marks) for name in CASES if (name in QUICK) == quick]


@pytest.mark.parametrize("name", _cases(True) + _cases(False))
def test_a_branch_has_pytorchs_values_and_gradients_on_each_side(name):
    cls, inputs = CASES[name]
    for x in inputs:
        report = bridge.verify(cls(), x, steps=1, train=True)
        assert not report.count("beyond tolerance"), report


class _Squash(Base):
    """Takes a side by the sum, and has a NaN gradient on the other side at 0."""

    def forward(self, x):
        if x.sum() > 0:
            return self.a(x).sin()
        return (-x).sqrt() * self.b(x)


def _sides_of(module: nn.Module, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns PyTorch's result and the gradient of its sum by the input."""
    x = x.clone().requires_grad_()
    y = module(x)
    (g,) = torch.autograd.grad(y.sum(), x)
    return y.detach().numpy(), g.numpy()


def _summed(fn):
    def call(x):
        y = fn(fn.params, {}, x)[0]
        return y.sum(), y

    return jax.value_and_grad(call, has_aux=True)


INPUTS = (UP.abs(), DOWN - DOWN.max() - 1)


def test_under_vmap_no_nan_comes_from_the_side_not_taken():
    module = _Squash()
    fn = bridge.export(module)
    xs = torch.stack([INPUTS[0], INPUTS[1], torch.ones(2, 3)])
    (_, y), g = jax.vmap(_summed(fn))(xs.numpy())
    for i, x in enumerate(xs):
        expected, gradient = _sides_of(module, x)
        np.testing.assert_allclose(y[i], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(g[i], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["jit", "scan", "checkpoint"])
def test_a_branch_under_a_transformation(transform):
    module = _Squash()
    call = _summed(bridge.export(module))
    if transform == "jit":
        run = jax.jit(call)
    elif transform == "checkpoint":
        run = jax.checkpoint(call)
    else:

        def run(x):
            return jax.tree.map(lambda v: v[0], jax.lax.scan(lambda c, x: (c, call(x)), 0, x[None])[1])

    for x in INPUTS:
        (_, y), g = run(jnp.asarray(x.numpy()))
        expected, gradient = _sides_of(module, x)
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(g, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_second_derivatives_on_each_side():
    module = _Squash()
    fn = bridge.export(module)
    hessian = jax.jit(jax.hessian(lambda x: fn(fn.params, {}, x)[0].sum()))
    for x in INPUTS:
        expected = torch.autograd.functional.hessian(lambda x: module(x).sum(), x)
        np.testing.assert_allclose(hessian(x.numpy()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_gradient_inside_of_the_call_is_refused_by_name():
    class Module(Base):
        def forward(self, x):
            x = x.requires_grad_()
            y = self.a(x)
            if x.sum() > 0:
                y = y.sin()
            return torch.autograd.grad(y.sum(), x)[0]

    with pytest.raises(bridge.BridgeError, match="a branch on a traced value in a call that asks PyTorch's engine"):
        bridge.verify(Module(), UP, steps=1)


def test_sides_that_disagree_are_refused_where_the_name_is_used():
    class Module(Base):
        def __init__(self, uses: bool):
            super().__init__()
            self.uses = uses

        def forward(self, x):
            mask = None
            if x.sum() > 0:
                mask = x > 0
            h = self.a(x)
            if self.uses and mask is not None:
                h = h * mask
            return h

    assert bridge.verify(Module(False), UP, steps=1).count("beyond tolerance") == 0
    with pytest.raises(bridge.BridgeError, match=r"give torch.bool of shape .* and None"):
        bridge.verify(Module(True), UP, steps=1)


def test_an_entry_that_one_side_adds_is_refused():
    class Module(Base):
        def forward(self, x):
            outs = [x]
            if x.sum() > 0:
                outs.append(self.a(x))
            return outs

    with pytest.raises(bridge.BridgeError, match=r"one side of a branch .* adds, removes or exchanges 1 in a list"):
        bridge.verify(Module(), UP, steps=1)


@pytest.mark.slow
def test_a_write_into_memory_that_may_be_shared_is_refused():
    class Module(Base):
        def forward(self, x):
            y = self.a(x)
            h = y
            if x.sum() > 0:
                h = y * 2
            h += 1
            return h + y

    with pytest.raises(bridge.BridgeError, match="share memory"):
        bridge.verify(Module(), UP, steps=1)


def test_a_while_loop_that_ends_by_a_traced_value_is_refused():
    class Module(Base):
        def forward(self, x):
            while True:
                x = self.a(x)
                if x.sum() < 1:
                    break
            return x

    with pytest.raises(bridge.BridgeError, match="a `while` loop ends by a traced value"):
        bridge.verify(Module(), UP, steps=1)


def test_a_while_loop_without_another_end_is_refused():
    class Module(Base):
        def forward(self, x):
            while x.sum() > 1:
                x = self.a(x) * 0.5
            return x

    with pytest.raises(bridge.BridgeError, match=r"a `while` loop ends by a traced value.*`while i < n and"):
        bridge.verify(Module(), UP, steps=1)


@pytest.mark.slow
def test_the_report_names_a_side_that_was_not_taken():
    report = bridge.verify(CASES["OneSided"][0](), UP, steps=1)
    assert any(
        "side not compared, where this is False" in line and "if x.sum() > 0:" in line for line in report.granted
    )
    both = bridge.verify(CASES["LayerDrop"][0](), UP, steps=4, train=True)
    assert not both.granted


def test_a_key_draws_each_layer_and_a_function_stays_as_it_was():
    module = CASES["LayerDrop"][0]()
    code = type(module).forward.__code__
    fn = bridge.export(module)
    call = jax.jit(lambda key, x: fn(fn.params, {}, x, rng=key, train=True)[0])
    results = {np.asarray(call(jax.random.key(i), UP.numpy())).tobytes() for i in range(40)}
    assert 4 < len(results) <= 16
    assert type(module).forward.__code__ is code
    program = jax.make_jaxpr(call)(jax.random.key(0), UP.numpy())
    assert str(program).count("cond[") == 4


def _converted_module(name: str) -> tuple[types.ModuleType, types.ModuleType]:
    """Returns a module of Python's library, and the same with all its functions converted."""
    original = importlib.import_module(name)
    tree = ast.parse(inspect.getsource(original))
    for holder in [node for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.Module))]:
        for function in holder.body:
            if isinstance(function, ast.FunctionDef):
                with contextlib.suppress(ValueError):
                    conversion._Converter(function).run()
    code = compile(ast.fix_missing_locations(tree), name, "exec")
    made = types.ModuleType(f"{name}_converted")
    exec(conversion._linked(code), vars(made))
    return original, made


@pytest.mark.slow
def test_converted_code_does_the_same_with_known_values():
    text = inspect.getsource(conversion)
    lines = text[:3000].split("\n")
    others = text[500:3500].split("\n")
    for module in _converted_module("textwrap"):
        assert module.fill(text[:2000], 30) == textwrap.fill(text[:2000], 30)
        assert module.shorten(text, 50) == textwrap.shorten(text, 50)
        assert module.dedent("  a\n   b\n\n  c") == "a\n b\n\nc"
    plain, converted = _converted_module("difflib")
    assert list(plain.ndiff(lines, others)) == list(converted.ndiff(lines, others))
    words = ["ape", "apple", "peach", "puppy"]
    assert plain.get_close_matches("appel", words) == converted.get_close_matches("appel", words)
    plain, converted = _converted_module("shlex")
    assert plain.split("a 'b c' \"d e\" f\\ g # h") == converted.split("a 'b c' \"d e\" f\\ g # h")
    plain, converted = _converted_module("statistics")
    numbers = [0.5, 0.25, 0.5, 4.0, 8.0]
    for name in ("mean", "median", "mode", "stdev", "quantiles", "harmonic_mean", "median_grouped"):
        assert getattr(plain, name)(numbers) == getattr(converted, name)(numbers)


# ---- tensors of known numbers that one side writes


def accumulated(x, w):
    out = torch.zeros_like(x)
    flat = out.view(-1)
    for i in range(2):
        if x[i, 0] > 0:
            out += x * w
        elif x[i, 1] > 0:
            flat[3:] = x.flatten()[3:] * 2
    return out, flat * 1


@pytest.mark.parametrize("embedded", [0, 2**16])
@pytest.mark.parametrize("sign", [1, -1])
def test_one_side_writes_a_tensor_of_known_numbers(monkeypatch, embedded, sign):
    """`embedded`: above so many elements, a tensor of known numbers is computed by the program."""
    monkeypatch.setattr("bridge.dispatch.constants.EMBEDDED", embedded)
    compare(accumulated, [sign * randn(3, 4, seed=1), randn(4, seed=2)])
