"""`torch.autograd.grad` and `backward()` inside `forward` and inside a backward, against PyTorch eager."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Doubled, compare, randn
from torch import nn

import bridge


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 4))


def forces(module, x):
    """A potential and minus its slope, trained on both."""
    x.requires_grad_()
    energy = module(x).square().sum()
    (slope,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy, -slope


def forces_of_an_input(module, x):
    """As code that expects its caller to have asked for the gradient."""
    energy = module(x).square().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def penalty(module, x):
    """Of a Wasserstein critic."""
    mixed = (x * 0.3 + x.flip(0) * 0.7).detach().requires_grad_(True)
    score = module(mixed)
    (slope,) = torch.autograd.grad(score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean() + score.mean()


def inner_loop(module, x):
    """MAML, two steps."""
    weights = {name: p for name, p in module.named_parameters()}
    for _ in range(2):
        loss = torch.func.functional_call(module, weights, (x,)).square().mean()
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(module, weights, (x,))


def first_order(module, x):
    """Without `create_graph` the slope is a constant."""
    h = module(x)
    (slope,) = torch.autograd.grad(h.exp().sum(), h, retain_graph=True)
    return h * slope


def adversarial(module, x):
    stepped = x.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(module(stepped).square().sum(), stepped)
    return module(x + 0.1 * slope.sign())


def saved_results(module, x):
    """Operations whose backward needs what they gave."""
    h = module(x)
    y = h.exp() + h.tanh() + h.softmax(-1) + h.sigmoid() + (h**2 + 1).sqrt()
    return torch.autograd.grad(y.sum(), h, create_graph=True)[0]


def in_place_and_views(module, x):
    h = module(x)
    y = h * 2
    y[0] = y[1].exp()
    y.mul_(h)
    y.t()[1].add_(h[:, 0].sum())
    return torch.autograd.grad((y * y).sum(), [h, module[0].weight], create_graph=True)


def convolution(module, x):
    image = module(x).reshape(1, 1, 3, 4).requires_grad_()
    kernel = torch.ones(2, 1, 2, 2, requires_grad=True)
    y = F.avg_pool2d(F.conv2d(image, kernel, padding=1), 2, 1)
    y = F.interpolate(y, scale_factor=2.0, mode="bilinear")
    return torch.autograd.grad(y.square().sum(), [image, kernel], create_graph=True)


def attention(module, x):
    h = module(x).reshape(1, 1, 3, 4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        y = F.scaled_dot_product_attention(h, h * 2, h.sin(), is_causal=True)
    return torch.autograd.grad(y.square().sum(), h, create_graph=True)[0]


def unused(module, x):
    h = module(x)
    y = x.clone().requires_grad_()
    first, second = torch.autograd.grad(h.sum() * 2, [h, y], allow_unused=True)
    assert second is None
    return h * first


def leaf_backward(module, x):
    leaf = module(x).detach().requires_grad_()
    (leaf**3).sum().backward()
    return module(x) * leaf.grad


def under_checkpoint(module, x):
    h = torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)
    return torch.autograd.grad(h.square().sum(), module[0].weight, create_graph=True)[0] * h.mean()


def detached(module, x):
    h = module(x)
    y = h * h.detach() + h.data * 3
    z = (h * 5).detach_()
    return torch.autograd.grad((y * z).sum(), h, create_graph=True)[0]


def forward_mode(module, x):
    jacobian = torch.autograd.functional.jacobian
    return jacobian(lambda x: module(x).sum(0), x, strategy="forward-mode", vectorize=True)


def vmapped(module, x):
    """A known recipe for Jacobians."""
    y = module(x)[0]
    rows = torch.vmap(lambda v: torch.autograd.grad(y, module[0].weight, v, retain_graph=True)[0])(torch.eye(len(y)))
    return module(x).sum() * rows


CALLS = [
    forces, forces_of_an_input, penalty, inner_loop, first_order, adversarial, saved_results, in_place_and_views,
    convolution, attention, unused, leaf_backward, under_checkpoint, detached, vmapped, forward_mode,
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_inside_forward(call):
    compare(Call(call, small()), [randn(3, 4)], 1e-4)


class Checkpoint(torch.autograd.Function):
    """Recomputation as diffusion models have it: parameters are inputs, and the backward runs the function again."""

    @staticmethod
    def forward(ctx, run, length, *args):
        ctx.run = run
        ctx.tensors, ctx.parameters = list(args[:length]), list(args[length:])
        with torch.no_grad():
            return ctx.run(*ctx.tensors)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.tensors = [x.detach().requires_grad_(True) for x in ctx.tensors]
        with torch.enable_grad():
            out = ctx.run(*[x.view_as(x) for x in ctx.tensors])
        slopes = torch.autograd.grad(out, ctx.tensors + ctx.parameters, gradients, allow_unused=True)
        del ctx.tensors, ctx.parameters, out
        return (None, None, *slopes)


class Diffusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = small(), small()

    def forward(self, x):
        for block in (self.first, self.second):
            x = Checkpoint.apply(block.forward, 1, x, *block.parameters())
        return x


class FixedPoint(nn.Module):
    """A deep equilibrium: its backward solves with vector-Jacobian products of a function that it closes over."""

    def __init__(self):
        super().__init__()
        self.inner, self.inject = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        nn.init.normal_(self.inner.weight, std=0.2, generator=torch.Generator().manual_seed(1))

    def forward(self, x):
        def step(z):
            return torch.tanh(self.inner(z) + self.inject(x))

        class Solve(torch.autograd.Function):
            @staticmethod
            def forward(ctx, z):
                ctx.save_for_backward(z)
                return z.clone()

            @staticmethod
            def backward(ctx, gradient):
                (z,) = ctx.saved_tensors
                with torch.enable_grad():
                    z = z.detach().requires_grad_()
                    inner = torch.tanh(self.inner(z))
                total = gradient
                for _ in range(4):
                    total = gradient + torch.autograd.grad(inner, z, total, retain_graph=True)[0]
                return total

        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = step(z)
        return Solve.apply(step(z))


@pytest.mark.parametrize("module", [Diffusion, FixedPoint])
def test_inside_a_backward(module):
    torch.manual_seed(0)
    compare(module(), [randn(3, 4)], 1e-4)


@pytest.mark.parametrize("transform", ["vmap", "scan", "checkpoint"])
def test_it_composes(transform):
    module, x = Call(penalty, small()), randn(5, 3, 4)
    fn = bridge.export(module)

    def loss(params, x):
        return fn(params, fn.buffers, x)[0]

    def total(params):
        rows = jnp.asarray(x.numpy())
        if transform == "vmap":
            return jax.vmap(lambda x: loss(params, x))(rows).sum()
        if transform == "scan":
            return jax.lax.scan(lambda s, x: (s + jax.checkpoint(loss)(params, x), None), 0.0, rows)[0]
        return sum(jax.checkpoint(loss)(params, x) for x in rows)

    sum(module(row) for row in x).backward()
    for name, slope in jax.jit(jax.grad(total))(fn.params).items():
        expected = module.get_parameter(name).grad
        assert jnp.allclose(slope, expected.numpy(), atol=1e-4), name


def test_a_parameter_s_grad_is_no_result():
    """As reversible networks have it: each backward adds to `grad` by the way."""
    fn = bridge.export(Call(lambda m, x: (m(x).sum().backward(), m(x))[1], small()))
    with pytest.raises(
        bridge.BridgeError, match=r"`backward\(\)` inside.*`grad` of a parameter.*torch\.autograd\.grad"
    ):
        fn(fn.params, fn.buffers, jnp.ones((3, 4)))


def test_a_custom_function_in_the_graph_is_refused():
    def call(module, x):
        h = module(x)
        return torch.autograd.grad(Doubled.apply(h).sum(), h)[0]

    fn = bridge.export(Call(call, small()))
    with pytest.raises(bridge.BridgeError, match=r"Doubled may be part of its graph.*jax\.grad"):
        fn(fn.params, fn.buffers, jnp.ones((3, 4)))


def test_the_gradient_that_asks_the_engine_is_named():
    """What `torch.func.vjp` returns does; `torch.func.grad` and `jacrev` of the same do not, and are PyTorch's."""

    def by_vjp(module, x):
        return torch.func.vjp(torch.tanh, Doubled.apply(module(x)))[1](torch.ones(3, 4))[0]

    fn = bridge.export(Call(by_vjp, small()))
    message = r"torch\.func\.vjp returns\), and Doubled may be part of its graph.*Remedy: .*torch\.func\.grad"
    with pytest.raises(bridge.BridgeError, match=message):
        fn(fn.params, fn.buffers, jnp.ones((3, 4)))

    def by_grad(module, x):
        return torch.func.grad(lambda z: torch.tanh(z).sum())(Doubled.apply(module(x)))

    compare(Call(by_grad, small()), [randn(3, 4)])


def test_pytorch_s_own_errors_stay():
    """A result that a later write has changed cannot be differentiated."""

    def call(module, x):
        h = module(x)
        y = h.exp()
        z = y.sum()
        y.mul_(2)
        return torch.autograd.grad(z + y.sum(), h)[0]

    module = Call(call, small())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        module(torch.ones(3, 4))
    fn = bridge.export(module)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fn(fn.params, fn.buffers, jnp.ones((3, 4)))
