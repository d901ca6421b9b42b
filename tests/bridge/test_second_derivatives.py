"""The gradient of a gradient penalty, for every row about gradient mode and in-place writes, against PyTorch's.

PyTorch's is `torch.autograd.grad` with `create_graph=True`; the penalty is the sum of squares of the gradients of all
parameters, and what is compared is its gradient.
"""

import jax
import jax.numpy as jnp
import pytest
import rows_gradients
import torch
from rows import ROWS
from side_by_side import inputs_of, objective_of, state_of
from support.markers import slow_unless

from bridge import cells, tensors
from bridge.parity.leaves import compare as compared
from bridge.parity.leaves import named
from bridge.parity.sides import projection, torch_weigh

NAMES = [name for name, row in ROWS.items() if row.module.__module__ == rows_gradients.__name__]


def in_pytorch(row):
    module = row.build().train()
    args, kwargs = row.example()
    trained = {n: t for n, t in state_of(module).items() if t.requires_grad}
    out = getattr(module, row.method)(*args, **kwargs)
    objective = projection(out, torch.is_tensor, torch_weigh)
    leaves = list(trained.values())
    first = torch.autograd.grad(objective, leaves, create_graph=True, allow_unused=True)
    penalty = sum((g.square().sum() for g in first if g is not None), torch.zeros(()))
    if not penalty.requires_grad:  # every gradient is constant
        return {n: torch.zeros_like(t) for n, t in trained.items()}
    return dict(zip(trained, torch.autograd.grad(penalty, leaves, materialize_grads=True), strict=True))


def in_jax(row):
    fn, objective = objective_of(row, True)
    inputs = [array[0] for array in inputs_of(row, range(1, 2))]

    def penalty(params):
        gradient = jax.grad(lambda p: objective(p, inputs, fn.buffers, [])[0])(params)
        return sum(jnp.square(g).sum() for g in gradient.values())

    return jax.grad(penalty)(fn.params)


def compare(name):
    row = ROWS[name]
    return compared(
        0,
        {"gradient": named(in_pytorch(row))},
        {"gradient": named(in_jax(row))},
        None,
        10 * row.tolerance,  # of two differentiations
    )


@pytest.mark.parametrize("name", slow_unless(lambda name: NAMES.index(name) % 6 == 0, NAMES))
def test_gradient_of_gradient(name):
    for leaf in compare(name):
        assert leaf.error <= leaf.tolerance, leaf


@pytest.mark.parametrize("name", ["SetItemWithoutGrad", "CopyIntoTracked", "LeafFilledWithoutGrad", "DataAssigned"])
def test_is_red_where_a_regrafted_value_keeps_its_own_path(name, monkeypatch):
    """A rule of `custom_jvp` that returns the plain value is right once, and wrong when it is differentiated."""

    @jax.custom_jvp
    def regraft(value, path):
        return value

    regraft.defjvp(lambda primals, tangents: (primals[0], tangents[1]))
    for file in (cells, tensors):
        monkeypatch.setattr(file, "regraft", regraft)
    assert any(leaf.error > leaf.tolerance for leaf in compare(name))
