"""Remedies of errors: each one is named by the error of one module and works in the next module."""

import sys

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, compare, raises, randn, verified
from torch import distributions as d
from torch import nn

import bridge

X, TARGET, WEIGHT = randn(4, 8), randn(4, 8, seed=2), randn(4, 8, seed=3).abs()


def queue(position, *shape):
    def forward(m, x):
        p = position(m.place)
        m.queue[p : p + 2] = x
        m.place.copy_((m.place + 2) % 8)
        return x @ m.queue.clone().T @ torch.eye(8, 3) @ m.w

    return Calls(forward, queue=nn.Buffer(randn(8, 3)), place=nn.Buffer(torch.zeros(shape, dtype=torch.long)))


def test_a_position_as_a_tensor():
    raises("a slice's bound without `int\\(\\)`", queue(int), randn(2, 3))
    verified(queue(lambda place: place.clamp(0, 6)), randn(2, 3), steps=2)
    raises("a tensor without dimensions works as", queue(lambda place: place, 1), randn(2, 3))
    verified(queue(lambda place: place[0].clamp(0, 6), 1), randn(2, 3), steps=2)


def test_numbers_drawn_before_the_call():
    draw = d.VonMises(0.5, 2.0)
    raises("draw the numbers before the call", lambda x: x * d.VonMises(x, 2.0).sample(), X, rng=jax.random.key(0))
    compare(lambda x, numbers: x * numbers, [X, draw.sample((8,))])


def test_a_branch_inside_a_library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    folder.joinpath("branching_library.py").write_text(
        "def cleaned(x):\n    if x.isnan().any():\n        x = x.nan_to_num()\n    return x\n\n\n"
        "def double(x):\n    return cleaned(x) * 2\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    import branching_library  # pyright: ignore[reportMissingImports]

    module = Call(lambda x: branching_library.double(x))
    raises(r'bridge.export\(module, functions={"branching_library:cleaned": replacement}\)', module, X)
    fn = bridge.export(module, functions={"branching_library:cleaned": lambda x: x})
    assert jnp.allclose(jax.jit(lambda x: fn({}, {}, x)[0])(X.numpy()), X.numpy() * 2)
    del sys.modules["branching_library"]


def test_batch_norm_with_a_number_as_its_momentum():
    unnumbered = nn.BatchNorm1d(8, momentum=None)
    raises("give the layer a number as its momentum", unnumbered, X, train=True)
    verified(nn.BatchNorm1d(8, momentum=0.2), X, train=True, steps=2)
    fn = bridge.export(unnumbered)
    jax.eval_shape(lambda b: fn(fn.params, b, X.numpy(), train=False), fn.buffers)


@pytest.mark.parametrize("lost", [
    lambda x, t, w: F.l1_loss(x, t, weight=w),
    lambda x, t, w: F.l1_loss(x, t, reduction="none", weight=w),
    lambda x, t, w: torch.chain_matmul(x, t.T, w[:, :4], out=torch.empty(4, 4)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arguments_that_pytorch_hands_to_no_mode(lost):
    raises("write the function in operations", lost, X, TARGET, WEIGHT)
    compare(lambda x, t, w: ((x - t).abs() * w).mean(), [X, TARGET, WEIGHT])


def test_a_distribution_that_checks_in_any_case():
    matrix = torch.eye(3)
    message = "write the formula in operations of PyTorch"
    raises(message, lambda x: d.Wishart(x.exp() + 2, matrix).log_prob(matrix), X)


def test_a_distribution_that_is_told_to_check():
    def likelihood(x):
        return d.Geometric(x.sigmoid(), validate_args=True).log_prob(torch.ones(4, 8))

    with pytest.warns(bridge.BridgeWarning, match="a check of traced values is not made"):
        compare(likelihood, [X], 5e-5)
