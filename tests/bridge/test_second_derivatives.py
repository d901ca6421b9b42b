"""Gradients of gradients, and the transformations of `torch.func`, inside `forward` and around it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rows_gradients
import torch
import torch.nn.functional as F
from eager import Call, compare, differentiated, in_jax, raises, randn
from rows import ROWS
from side_by_side import inputs_of, objective_of, state_of
from support.markers import slow_unless
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from bridge.parity.report import compare as compared
from bridge.parity.report import named
from bridge.parity.sides import projection

# ---- The gradient of a gradient penalty, for every row about gradient mode and in-place writes, against PyTorch's

NAMES = [name for name, row in ROWS.items() if row.module.__module__ == rows_gradients.__name__]


def in_pytorch(row):
    module = row.build().train()
    args, kwargs = row.example()
    trained = {n: t for n, t in state_of(module).items() if t.requires_grad}
    out = getattr(module, row.method)(*args, **kwargs)
    objective = projection(out)
    leaves = list(trained.values())
    first = torch.autograd.grad(objective, leaves, create_graph=True, allow_unused=True)
    penalty = sum((g.square().sum() for g in first if g is not None), torch.zeros(()))
    if not penalty.requires_grad:  # every gradient is constant
        return {n: torch.zeros_like(t) for n, t in trained.items()}
    return dict(zip(trained, torch.autograd.grad(penalty, leaves, materialize_grads=True), strict=True))


def in_the_bridge(row):
    fn, objective = objective_of(row, True)
    inputs = [array[0] for array in inputs_of(row, range(1, 2))]

    def penalty(params):
        gradient = jax.grad(lambda p: objective(p, inputs, fn.buffers, [])[0])(params)
        return sum(jnp.square(g).sum() for g in gradient.values())

    return jax.grad(penalty)(fn.params)


@pytest.mark.parametrize("name", slow_unless(lambda name: NAMES.index(name) % 6 == 0, NAMES))
def test_gradient_of_gradient(name):
    theirs, ours = ({"gradient": named(side(ROWS[name]))} for side in (in_pytorch, in_the_bridge))
    for leaf in compared(0, theirs, ours, 10 * ROWS[name].tolerance):  # two differentiations have more rounding
        assert leaf.error <= leaf.tolerance, leaf


def slope(function, x):
    return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]


def second_in_jax(function, of_gradient):
    first = jax.grad(lambda x: in_jax(function, x).sum())
    return jax.jit(jax.grad(lambda x: of_gradient(first(x)).sum()))


NORMS = {
    "norm": lambda x: x.norm(),
    "norms of rows": lambda x: torch.linalg.vector_norm(x, 2, 1),
    "distance": lambda x: torch.dist(x, 2 * x.detach()),
    "distances": lambda x: F.pairwise_distance(x, 3 * x.detach(), eps=0),
    "normalized": lambda x: F.normalize(x, dim=1)[:, 1:] * x[:, :3],
    "complex": lambda x: torch.complex(x, x.roll(1, 1)).norm(dim=1),
}
"""A norm of order 2 is smooth beside a zero, though the absolute values are not."""
AT_ZERO = {
    "logsigmoid": F.logsigmoid,
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
    "multilabel": lambda x: F.multilabel_soft_margin_loss(x[:, None], torch.ones_like(x)[:, None], reduction="none"),
    "i0": torch.special.i0,
}
"""Points at which heads initialised with zeros start."""
WITH_ZEROS = torch.tensor([[0.0, 1.0, 2.0, 0.0], [3.0, 0.0, 0.0, -1.0]]), torch.tensor([0.0, -0.5, 0.7])


@pytest.mark.parametrize(
    ("name", "inside"), [*((name, False) for name in NORMS | AT_ZERO), *((name, True) for name in AT_ZERO)]
)
def test_second_derivative(name, inside):
    """`inside`: the first derivative is taken by the module."""
    function = (NORMS | AT_ZERO)[name]
    x = WITH_ZEROS[name in AT_ZERO].clone().requires_grad_()
    first = slope(function, x)
    (wanted,) = torch.autograd.grad((first.square() + first).sum(), x)
    second = second_in_jax(function, lambda g: g**2 + g)
    if inside:
        module = Call(lambda x: (first := slope(function, x.requires_grad_())).square() + first)
        second = jax.jit(jax.grad(lambda x: in_jax(module, x).sum()))
    np.testing.assert_allclose(second(jnp.asarray(x.detach().numpy())), wanted.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["norms of rows", "distance of equals"])
def test_at_a_norm_of_zero_it_is_zero_and_in_pytorch_nan(name):
    function = {"distance of equals": lambda x: torch.dist(x, x.detach())}.get(name) or NORMS[name]
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(2, 4, dtype=dtype, requires_grad=True)
        assert torch.autograd.grad(slope(lambda x: function(1 * x), x).square().sum(), x)[0].isnan().all()
    assert not second_in_jax(function, jnp.square)(jnp.zeros((2, 4))).any()


def test_weight_norm_against_finite_differences():
    """PyTorch's own second derivative of `_weight_norm` is another one, in float64 too."""
    v, g, x = (randn(*shape, seed=seed) for seed, shape in enumerate([(3, 4), (3, 1), (5, 4)]))

    def loss(v):
        return (x.to(v.dtype) @ torch._weight_norm(v, g.to(v.dtype)).T).tanh().square().sum()

    def penalty(v):
        v = v.clone().requires_grad_()
        return v, slope(loss, v).square().sum()

    differences = torch.zeros(v.numel(), dtype=torch.float64)
    for i, step in enumerate(1e-5 * torch.eye(v.numel(), dtype=torch.float64)):
        step = step.view(v.shape)
        differences[i] = (penalty(v.double() + step)[1] - penalty(v.double() - step)[1]) / 2e-5
    differences = differences.detach()
    leaf, total = penalty(v.double())
    assert (torch.autograd.grad(total, leaf)[0].view(-1) - differences).abs().max() > 0.1 * differences.abs().max()

    second = second_in_jax(loss, jnp.square)(jnp.asarray(v.numpy()))
    bound = 2e-5 * float(differences.abs().max())
    np.testing.assert_allclose(second.reshape(-1), differences.numpy(), rtol=0, atol=bound)


def test_corners_whose_second_derivative_is_that_of_one_side():
    """PyTorch's formulas give 0, 0.5 and nan."""
    for function, at, theirs, ours in (
        (lambda x: F.softplus(x, 1.0, 2.0), 2.0, 0.0, 0.10499),
        (lambda x: F.prelu(x, torch.tensor([0.25])) ** 2, 0.0, 0.5, 0.125),
        (torch.sinc, 0.0, float("nan"), -3.28987),
    ):
        x = torch.tensor([at], requires_grad=True)
        np.testing.assert_allclose(torch.autograd.grad(slope(function, x).sum(), x)[0].item(), theirs, rtol=1e-4)
        np.testing.assert_allclose(second_in_jax(function, lambda g: g)(jnp.array([at])), [ours], rtol=1e-3)


def test_mixed_second_derivative_of_polar():
    module = Call(lambda r, a: torch.polar(r, a).real * torch.polar(r, a).imag)
    inputs = torch.tensor([2.0, 1.5, 0.5]), torch.tensor([0.3, 1.0, -2.0])
    wanted = torch.autograd.functional.hessian(lambda r, a: (r**2 * a.cos() * a.sin()).sum(), inputs)
    hessian_in_jax = jax.jit(jax.hessian(lambda r, a: in_jax(module, r, a).sum(), (0, 1)))
    ours = hessian_in_jax(*(jnp.asarray(x.numpy()) for x in inputs))
    for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
        np.testing.assert_allclose(ours[i][j], wanted[i][j].numpy(), atol=1e-5)


# ---- Transformations of `torch.func` inside `forward`: their levels wrap tensors of the bridge and mean what they mean

X = randn(3, 4)
RUNNING = randn(3).abs()


def saved(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.save_for_forward(output)


def by_the_saved(ctx, gradient):
    return gradient * ctx.saved_tensors[0]


Cubed = differentiated(
    lambda x: x**3,
    lambda ctx, gradient: gradient * ctx.saved_tensors[0] * 5,  # not the function's own derivative
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    generate_vmap_rule=True,
)
Exponential = differentiated(lambda x: x.exp(), by_the_saved, "Exponential", setup_context=saved, jvp=by_the_saved)
"""A function with derivatives of its own result, for both modes."""


def attention(x, **settings):
    return F.scaled_dot_product_attention(x, x * 0.5, torch.sin(x), **settings)


def parameters(module):
    return dict(module.named_parameters())


def squared(module):
    return lambda p, x: functional_call(module, p, (x,)).square().sum()


def ensemble(module, x):
    """Calls two copies with other weights at once."""
    stacked = {name: torch.stack([p, p * 2]) for name, p in module.named_parameters()}
    return vmap(lambda p: functional_call(module, p, (x,)))(stacked)


def inner_step(module, x):
    """MAML: the loss after one step of gradient descent on the module's own parameters."""
    slopes = grad(squared(module))(parameters(module), x)
    stepped = {name: p - 0.1 * slopes[name] for name, p in module.named_parameters()}
    return squared(module)(stepped, x)


def in_place(x):
    y = x.clone()
    y[0] += 1
    y.mul_(x)
    return y


def with_detach(x):
    return (x * x.detach() + x.data).sum()


def without_grad(x):
    with torch.no_grad():
        scale = x.square()
    return (x * scale).sum()


LINEAR = {
    "vmap": lambda m, x: vmap(m)(x),
    "vmap over weights": lambda m, x: vmap(lambda w: F.linear(x, w))(torch.stack([m.weight, m.weight * 2])),
    "vmap over vmap": lambda m, x: vmap(vmap(m))(x.expand(2, 3, 4)),
    "grad": lambda m, x: grad(lambda x: m(x).sin().sum())(x),
    "gradient for each example": lambda m, x: vmap(grad(squared(m)), (None, 0))(parameters(m), x)["weight"],
    "jvp": lambda m, x: jvp(lambda x: m(x).sin(), (x,), (torch.ones_like(x),)),
    "jvp along an expanded tangent": lambda m, x: jvp(lambda x: m(x).sin(), (x,), (x[:, :1].expand_as(x),)),
    "jvp of vectors": lambda m, x: jvp(lambda x: m(x).outer(x @ m.weight.T), (x[1],), (m.weight[0],)),
    "jacfwd of a column": lambda m, x: jacfwd(lambda z: m(z).outer(z) @ z)(x.T.contiguous()[:, 1]),
    "vjp": lambda m, x: vjp(m, x)[1](torch.sin(x))[0],
    "jacrev": lambda m, x: jacrev(lambda x: m(x).tanh())(x[0]),
    "jacfwd": lambda m, x: jacfwd(lambda x: m(x).tanh())(x[0]),
    "hessian": lambda m, x: hessian(lambda x: m(x).tanh().sum())(x[0]),
    "ensemble": ensemble,
    "inner step": inner_step,
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name):
    torch.manual_seed(0)
    compare(Call(LINEAR[name], nn.Linear(4, 4)), [X])


FUNCTIONS = {
    "attention under vmap": lambda x: vmap(attention)(x.reshape(2, 1, 3, 4)),
    "attention under grad": lambda x: grad(lambda x: attention(x).sin().sum())(x.reshape(1, 2, 3, 4)),
    "quantile under jvp": lambda x: jvp(lambda x: x.quantile(0.3), (x.detach(),), (x.cos(),)),
    "attention under jvp": lambda x: jvp(attention, (x.reshape(1, 2, 3, 4),), (torch.ones(1, 2, 3, 4),)),
    "layer norm": lambda x: vmap(grad(lambda x: F.layer_norm(x, (3, 4)).sin().sum()))(x),
    "softmax": lambda x: vmap(jacrev(lambda x: x.softmax(-1)))(x.reshape(6, 4)),
    "convolution": lambda x: vmap(grad(lambda x: F.conv1d(x, torch.ones(2, 3, 2)).sin().sum()))(x[:, None]),
    "group norm": lambda x: grad(lambda x: F.group_norm(x, 3).sin().sum())(x.repeat(1, 2, 1)),
    "batch norm in evaluation": lambda x: grad(lambda x: F.batch_norm(x, RUNNING, RUNNING + 1).sin().sum())(x),
    "batch norm": lambda x: grad(lambda x: F.batch_norm(x, None, None, training=True).sin().sum())(x),
    "average pooling": lambda x: grad(lambda x: F.avg_pool2d(x, 2, 1).sin().sum())(x),
    "adaptive pooling": lambda x: grad(lambda x: F.adaptive_avg_pool2d(x, (2, 3)).sin().sum())(x),
    "bilinear": lambda x: grad(lambda x: F.interpolate(x[None], (5, 7), mode="bilinear").sin().sum())(x),
    "replication": lambda x: grad(lambda x: F.pad(x, (1, 2), mode="replicate").sin().sum())(x),
    "max pooling": lambda x: grad(lambda x: F.max_pool2d(x, 2, 1).sin().sum())(x),
    "embedding": lambda x: grad(lambda x: F.embedding(torch.tensor([0, 1, 1]), x[0]).sin().sum())(x),
    "in place": lambda x: vmap(in_place)(x),
    "detach": lambda x: vmap(grad(with_detach))(x),
    "no_grad": lambda x: vmap(grad(without_grad))(x),
    "custom function under grad": lambda x: grad(lambda x: Cubed.apply(x).sum())(x),
    "custom function under vmap": lambda x: vmap(Cubed.apply)(x),
    "custom function under jvp": lambda x: jvp(Exponential.apply, (x,), (x.cos(),)),
    "custom function under jvp of grad": lambda x: jvp(
        grad(lambda x: Exponential.apply(x).sum()), (x,), (torch.ones_like(x),)
    ),
    "take_along_dim": lambda x: vmap(lambda x: torch.take_along_dim(x, x.argsort(-1), -1))(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused kernel has no second derivative
        compare(FUNCTIONS[name], [randn(2, 3, 4)])


def test_one_hot():
    """PyTorch's own insists on knowing the number of classes under `vmap`, and has it here."""
    compare(lambda i: vmap(lambda i: F.one_hot(i, 5).float())(i), [torch.tensor([[1, 2], [0, 4]])])


def test_an_ensemble_by_stack_module_state():
    """`export` does not see the modules: their weights are constants."""
    torch.manual_seed(0)
    params, buffers = stack_module_state([nn.Linear(4, 2), nn.Linear(4, 2)])
    params = {name: p.detach() for name, p in params.items()}
    template = nn.Linear(4, 2)
    compare(lambda x: vmap(lambda p, b: functional_call(template, (p, b), (x,)))(params, buffers), [X])


@pytest.fixture
def restored_validation():
    """PyTorch's compiler, which `linearize` imports, turns the checks of distributions off."""
    yield
    torch.distributions.Distribution.set_default_validate_args(True)


def test_linearize_is_refused(restored_validation):
    module = Call(lambda m, x: torch.func.linearize(m, x)[1](x), nn.Linear(4, 4))
    raises(r"`torch.func.linearize` and .* record a graph.*Remedy: ", module, X)


def test_dual_tensors():
    """Takes forward-mode derivatives by `torch.autograd.forward_ad`, and their gradient."""
    layer = nn.Linear(4, 3)

    def tangent(layer, x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(torch.tanh(layer(forward_ad.make_dual(x, x * 0.5)))).tangent

    compare(Call(tangent, layer), [randn(2, 4)])


def test_a_function_of_a_dual_tensor_is_refused():
    def forward(x):
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(Exponential.apply(forward_ad.make_dual(x, torch.ones_like(x)))))

    raises(r"Exponential is applied to a dual tensor.*torch\.func\.jvp", forward, X)
