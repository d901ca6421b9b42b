"""Functions that PyTorch does not differentiate: no gradient where it has none, an error where it raises one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn

import bridge
from bridge.autograd.nondifferentiable import without_derivative

X, Y = randn(3), randn(3, seed=2).abs() + 0.5
PLACES = torch.tensor([0, 1, 2])

REFUSED = {
    "heaviside": torch.heaviside,
    "heaviside in place": lambda x, y: (x * 1).heaviside_(y),
    "floor division": lambda x, y: x // y,
    "floor division by a number": lambda x, y: x // 2 + y,
    "floor division in place": lambda x, y: (x * 1).floor_divide_(y),
    "product scattered": lambda x, y: x.scatter(0, PLACES, y, reduce="multiply"),
    "soft_margin_loss": F.soft_margin_loss,
    "zeta": lambda x, y: torch.special.zeta(x + 3, y + 3),
    "gammainc": lambda x, y: torch.special.gammainc(x + 3, y + 3),
    "gammaincc": lambda x, y: torch.special.gammaincc(x + 3, y + 3),
    "weight of binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), PLACES.clamp(max=1).float(), y),
    "weight of nll_loss": lambda x, y: F.nll_loss(x[None], PLACES[:1], y),
}
SILENT = {
    "histc": lambda x, y: torch.histc(x.detach(), 3) + y,
    "floor division, compared": lambda x, y: torch.where(x // y > 0, x, y),
    "floor division, as an index": lambda x, y: y[(x // 9).long().abs()] * x,
    "floor division, detached": lambda x, y: (x // y).detach() * x,
    "heaviside without gradients": lambda x, y: no_grad(torch.heaviside, x, y) * x,
    "gammainc by its second": lambda x, y: torch.special.gammainc(torch.ones(3), y) + x,
    "soft_margin_loss by its first": lambda x, y: F.soft_margin_loss(x, torch.ones(3)) + y,
    "nextafter": torch.nextafter,
}


def no_grad(function, *args):
    with torch.no_grad():
        return function(*args)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_pytorch_has_no_derivative(name):
    with pytest.raises((RuntimeError, NotImplementedError), match=r"not implemented|not differentiable"):
        REFUSED[name](X.clone().requires_grad_(), Y.clone().requires_grad_()).sum().backward()
    fn = bridge.export(Call(REFUSED[name]))

    def call(x, y):
        return fn({}, {}, x, y)[0]

    def beside(x, y):
        return (x * y).sum(), call(x, y)

    arrays = X.numpy(), Y.numpy()
    with pytest.raises(bridge.BridgeError, match=r"has no derivative of `\w+`.* in the module itself"):
        jax.eval_shape(jax.grad(lambda x, y: call(x, y).sum(), (0, 1)), *arrays)
    with pytest.raises(bridge.BridgeError, match="has no derivative"):
        jax.jit(lambda *tangents: jax.jvp(call, arrays, tangents)).lower(*arrays)
    jax.eval_shape(jax.grad(beside, (0, 1), has_aux=True), *arrays)
    np.testing.assert_allclose(call(*arrays), REFUSED[name](X, Y), rtol=2e-5)


@pytest.mark.parametrize("name", SILENT)
def test_no_gradient_where_pytorch_has_none(name):
    compare(Call(SILENT[name]), [X, Y])


def test_requires_grad_is_that_of_pytorch():
    def function(linear, x):
        made = torch.histc(linear.weight), linear.weight // 2, torch.heaviside(linear.weight, x)
        return [t.requires_grad for t in made]

    module = Call(function, torch.nn.Linear(1, 3))
    fn = bridge.export(module)
    assert module(torch.ones(3, 1)) == fn(fn.params, fn.buffers, jnp.ones((3, 1)))[0] == [False, True, True]


def test_a_target_that_requires_grad_is_refused_at_once():
    def function(margin, x):
        return F.soft_margin_loss(x, margin.weight)

    module = Call(function, torch.nn.Linear(3, 1, bias=False))
    with pytest.raises(RuntimeError) as expected:
        module(X[None])
    fn = bridge.export(module)
    with pytest.raises(RuntimeError) as ours:
        fn(fn.params, fn.buffers, X[None].numpy())
    assert str(ours.value) == str(expected.value)


def rounded(x):
    return without_derivative(jnp.floor(x), [x], "there is none")


def test_the_error_comes_only_where_a_cotangent_does():
    x = jnp.ones(3)

    def scanned(x):
        return jax.lax.scan(lambda c, _: ((c[0] * x, rounded(c[0])), None), (x, x), None, length=2)[0][0].sum()

    def beside(x):
        return (x * x).sum(), rounded(x)

    for function in (beside, jax.jit(beside), jax.checkpoint(beside)):
        assert (jax.grad(function, has_aux=True)(x)[0] == 2).all()
    assert (jax.grad(scanned)(x) == 3).all()
    assert (jax.vmap(jax.grad(beside, has_aux=True))(x)[0] == 2).all()
    with pytest.raises(bridge.BridgeError, match="there is none"):
        jax.vmap(jax.grad(lambda x: rounded(x) * x))(x)
    with pytest.raises(bridge.BridgeError, match="there is none"):
        jax.hessian(lambda x: (rounded(x * x)).sum())(x)
