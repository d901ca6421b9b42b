"""The meaning of PyTorch, row by row: values, every gradient and every buffer against PyTorch eager, at 1e-5.

The rows are in `rows_*.py`. Here each runs alone, in both modes, under `jit` and without; a row has been seen to fail
without its rule of `rules.py`. `test_transforms.py` runs the rows under JAX's other transformations.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from rows import ROWS
from rules import RULES, SEEN
from torch import nn

import bridge


def parity(name, train=True, jit=True):
    row = ROWS[name]
    args, kwargs = row.example()
    module = row.build()
    torch.manual_seed(2)
    settings = {"tolerance": row.tolerance, "method": row.method, "steps": row.steps}
    return bridge.verify(module, *args, train=train, jit=jit, **settings, **kwargs)


@pytest.mark.parametrize(
    ("train", "jit"),
    [
        pytest.param(True, True, id="train"),
        pytest.param(False, True, id="eval"),
        pytest.param(True, False, id="without jit", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.parametrize("name", ROWS)
def test_meaning(name, train, jit):
    report = parity(name, train, jit)
    assert report.ok, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize(  # under `jit`, like `test_meaning`: without it, each operation is compiled by itself
    ("rule", "name"),
    [(rule, name) for rule, names in RULES.items() for name in names],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_is_red_without_its_rule(rule, name, monkeypatch):
    rule(monkeypatch)
    try:
        ok = all(parity(name, train).ok for train in (True, False))
    except SEEN:
        return
    assert not ok


# ---- what cannot be told by comparing with PyTorch


def test_names_are_sorted_into_params_and_buffers():
    for name, params, buffers in (
        ("LeafFilledWithoutGrad", {"leaf"}, {"table", "ids"}),
        ("Frozen", {"b"}, {"a"}),
        ("Tied", {"first.weight", "first.bias"}, set()),
    ):
        fn = bridge.export(ROWS[name].build())
        assert set(fn.params) == params and set(fn.buffers) == buffers


def test_written_parameters_come_back():
    module = ROWS["LeafFilledWithoutGrad"].build()
    fn = bridge.export(module)
    result = fn.run(fn.params, fn.buffers, jnp.ones((2, 4)))
    np.testing.assert_array_equal(result.params["leaf"], module.table[torch.tensor([3, 1])].numpy())


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_parameters_may_be_given_narrower_than_the_module_has_them(dtype, tolerance):
    """float32 masters, cast for the call: PyTorch's `functional_call` with the same cast, gradients of the masters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 2))
    x = torch.randn(5, 4)
    masters = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    narrow = {n: p.to(getattr(torch, dtype)) for n, p in masters.items()}
    expected = torch.func.functional_call(module, narrow, x.to(getattr(torch, dtype)))
    expected.float().square().sum().backward()
    fn = bridge.export(module)

    def objective(params):
        out, _ = fn({n: a.astype(dtype) for n, a in params.items()}, {}, jnp.asarray(x.numpy(), dtype))
        return (out.astype(jnp.float32) ** 2).sum(), out

    gradients, out = jax.jit(jax.grad(objective, has_aux=True))(fn.params)
    assert out.dtype == dtype
    for name, gradient in gradients.items():
        assert gradient.dtype == jnp.float32
        scale = masters[name].grad.abs().max().item()
        np.testing.assert_allclose(gradient, masters[name].grad.numpy(), rtol=0, atol=tolerance * scale)
