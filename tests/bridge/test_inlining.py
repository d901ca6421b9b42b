"""Lowerings that JAX traces once: the program is the same, and so is what tells one call from another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge
from bridge.lowerings import LOWERINGS
from bridge.lowerings.cache import inlined


def counted(function):
    """`function`, with the number of times that its code runs."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        call.count += 1
        return function(*args, **kwargs)

    call.count = 0
    return call


def traced(function, *arguments):
    return jax.make_jaxpr(lambda *arrays: function(*arrays))(*arguments)


def test_code_runs_once_for_equal_shapes():
    code = counted(lambda x, y, scale=1.0: (x @ y) * scale)
    function = inlined(code)

    def layers(x):
        for _ in range(5):
            x = function(x, x)
        return x.sum()

    program = traced(jax.grad(layers), jnp.ones((3, 3)))
    assert code.count == 1 and "jit" not in str(program)
    traced(layers, jnp.ones((2, 2)))
    assert code.count == 2, "another shape"


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (True, 1), (0.0, -0.0), (None, 0), ([1, 2], (1, 2)), ("a", "b"), (torch.float32, torch.float64)],
)
def test_other_values_are_other_traces(one, other):
    seen = []
    function = inlined(lambda x, setting: seen.append(setting) or x)
    for setting in (one, other, one):
        traced(lambda x, setting=setting: function(x, setting), 1.0)
    assert list(map(repr, seen)) == list(map(repr, [one, other]))


def test_nan_and_numbers_that_change_keep_no_more_than_a_share():
    function = inlined(counted(lambda x, number: x * number))
    for _ in range(3):
        traced(lambda x: function(x, float("nan")), 1.0)
    assert function.__wrapped__.count == 1


def test_arrays_without_a_trace_are_computed_at_once():
    function = inlined(lambda x: np.asarray(x) + 1)  # a trace has no numbers
    assert function(jnp.ones(2)).tolist() == [2, 2]


def test_precision_in_force_belongs_to_the_trace():
    function = inlined(lambda x: x @ x)
    programs = []
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            programs.append(str(traced(lambda x: function(x), jnp.ones((2, 2)))))
    assert "HIGHEST" in programs[0] and "HIGHEST" not in programs[1]


class Layers(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * 0.5


@pytest.mark.slow
def test_program_is_the_one_without_it(monkeypatch):
    x = np.ones((2, 3, 8), np.float32)

    def program():
        fn = bridge.export(Layers(2))
        loss = jax.value_and_grad(lambda params: fn(params, fn.buffers, x)[0].sum())
        compiled = jax.jit(loss).lower(fn.params).compile()
        (figures,) = [compiled.cost_analysis()]
        return figures["flops"], figures["bytes accessed"]

    with_it = program()
    for op, lowering in LOWERINGS.items():
        monkeypatch.setitem(LOWERINGS, op, getattr(lowering, "__wrapped__", lowering))
    assert program() == pytest.approx(with_it, rel=1e-3)


def test_another_layer_is_not_traced_again(monkeypatch):
    """Its operations are copied: lowerings run as often for six layers as for two."""
    runs = []
    for op, lowering in list(LOWERINGS.items()):
        if hasattr(lowering, "__wrapped__"):
            code = lowering.__wrapped__

            def recorded(*args, code=code, op=op, **kwargs):
                runs.append(op)
                return code(*args, **kwargs)

            monkeypatch.setitem(LOWERINGS, op, inlined(functools.wraps(code)(recorded)))
    counts = []
    for count in (2, 6):
        runs.clear()
        fn, x = bridge.export(Layers(count)), np.ones((count, 3, 8), np.float32)  # a shape of its own
        jax.make_jaxpr(jax.grad(lambda params, fn=fn, x=x: fn(params, fn.buffers, x)[0].sum()))(fn.params)
        counts.append(len(runs))
    assert counts[0] == counts[1] > 5


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("of", [lambda x: x * 0.1, lambda x: 0.1 * x, lambda x: x / 0.3, lambda x: x.mul(0.7)])
def test_a_number_is_not_rounded_before_the_result(name, of):
    """0.1 is 0.1001 in bfloat16: all results would be too large by 0.1 %."""

    class Module(nn.Module):
        def forward(self, x):
            return of(x)

    x = torch.linspace(-3, 3, 999).to(getattr(torch, name))
    fn = bridge.export(Module())
    out, _ = jax.jit(lambda x: fn({}, {}, x))(jnp.asarray(x.float().numpy()).astype(name))
    different = np.asarray(out.astype(jnp.float32)) != of(x).float().numpy()
    assert different.mean() < 0.02, "XLA multiplies by the reciprocal, another float32"
