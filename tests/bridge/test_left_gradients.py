"""`grad` of parameters: what the backward of a `torch.autograd.Function` adds to it is part of JAX's gradient."""

import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call, compare, randn
from torch import nn
from torch.autograd import Function

import bridge

X = randn(4, 6)


def detached(tensors):
    return [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in tensors]


class Checkpointed(Function):
    """A checkpoint as large-model code has it."""

    @staticmethod
    def forward(ctx, run, *args):
        ctx.run, ctx.state = run, torch.get_rng_state()
        with torch.no_grad():
            outputs = run(*args)
        ctx.save_for_backward(*args)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("use .backward()")
        inputs, before = detached(ctx.saved_tensors), torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            outputs = ctx.run(*inputs)
        torch.set_rng_state(before)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, gradients)
        return (None, *(x.grad for x in inputs))


class ReversibleBlocks(Function):
    """Keeps the last activation only, and finds those before it."""

    @staticmethod
    def forward(ctx, x, blocks):
        with torch.no_grad():
            for f, g in blocks:
                one, two = x.chunk(2, -1)
                one = one + f(two)
                x = torch.cat([one, two + g(one)], -1)
        ctx.y, ctx.blocks = x.detach(), blocks
        return x

    @staticmethod
    def backward(ctx, dy):
        y = ctx.y
        del ctx.y
        for f, g in reversed(ctx.blocks):
            (y1, y2), (d1, d2) = y.chunk(2, -1), dy.chunk(2, -1)
            assert not y1.requires_grad and not y2.requires_grad
            with torch.enable_grad():
                y1.requires_grad = True
                g_of_one = g(y1)
                torch.autograd.backward(g_of_one, d2)
            with torch.no_grad():
                x2 = y2 - g_of_one
                d1 = d1 + y1.grad
                y1.grad = None
            with torch.enable_grad():
                x2.requires_grad = True
                f_of_two = f(x2)
                f_of_two.backward(d1)
            with torch.no_grad():
                x1 = y1 - f_of_two
                d2 = d2 + x2.grad
                x2.grad = None
                y, dy = torch.cat([x1, x2.detach()], -1), torch.cat([d1, d2], -1)
        return dy, None


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([small(3), small(3)]) for _ in range(2))

    def forward(self, x):
        return ReversibleBlocks.apply(x, self.blocks)


class Accumulates(Function):
    """A linear layer whose backward adds to `grad` by itself, as fused accumulation does."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x, module.weight)
        ctx.bias = module.bias
        return x @ module.weight.T + module.bias

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        if weight.grad is None:
            weight.grad = 2 * g.T @ x
        else:
            weight.grad += 2 * g.T @ x
        ctx.bias.grad = g.sum(0) if ctx.bias.grad is None else ctx.bias.grad.add_(g.sum(0))
        return g @ weight, None


def small(n=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(n, 5), nn.Tanh(), nn.Linear(5, n))


def twice(module, x):
    """The same parameters in two blocks and outside of them."""
    h = Checkpointed.apply(module, x)
    return Checkpointed.apply(lambda a, b: module(a * b), h, x.sin()) + module(h) * module[0].weight.sum()


def nested(module, x):
    return Checkpointed.apply(lambda t: module[2](torch.tanh(module[0](t))).sin(), module(x))


CALLS = {
    "checkpoint of a module": lambda m, x: Checkpointed.apply(m, x),
    "checkpoints that share parameters": twice,
    "checkpoint of a lambda": nested,
    "checkpoint of a method": lambda m, x: Checkpointed.apply(m.forward, x) * x,
    "grad by hand": lambda m, x: Accumulates.apply(torch.tanh(Accumulates.apply(x, m[0])), m[2]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_backward_adds(name):
    compare(Call(CALLS[name], small()), [X], 1e-4)
    report = bridge.verify(Call(CALLS[name], small()), X.clone().requires_grad_())
    assert report.ok, report


def test_reversible_blocks():
    compare(Reversible(), [X], 1e-4)


@pytest.mark.parametrize("transform", ["jit", "vmap", "scan", "checkpoint"])
def test_it_composes(transform):
    module = Call(CALLS["checkpoint of a module"], small())
    fn, rows = bridge.export(module), jnp.asarray(X.numpy())

    def loss(params, x):
        return jnp.sin(fn(params, fn.buffers, x)[0]).sum()

    def total(params):
        if transform == "vmap":
            return jax.vmap(lambda x: loss(params, x[None]))(rows).sum()
        if transform == "scan":
            return jax.lax.scan(lambda s, x: (s + loss(params, x[None]), None), 0.0, rows)[0]
        return (jax.checkpoint(loss) if transform == "checkpoint" else loss)(params, rows)

    torch.sin(module(X.clone().requires_grad_())).sum().backward()
    for name, gradient in jax.jit(jax.grad(total))(fn.params).items():
        assert jnp.allclose(gradient, module.get_parameter(name).grad.numpy(), atol=1e-4), name


def test_without_an_input_that_requires_grad():
    """PyTorch does not run the backward then."""
    fn = bridge.export(Call(CALLS["checkpoint of a module"], small()))
    with pytest.warns(bridge.BridgeWarning, match="runs in PyTorch only if an input of it requires grad"):
        jax.grad(lambda p: fn(p, fn.buffers, X.numpy())[0].sum())(fn.params)


HIDDEN = []


class OfAGlobal(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return HIDDEN[0](x)

    @staticmethod
    def backward(ctx, g):
        (x,) = detached(ctx.saved_tensors)
        with torch.enable_grad():
            HIDDEN[0](x).backward(g)
        return x.grad


def test_a_module_that_is_a_global():
    module = Call(lambda m, x: OfAGlobal.apply(x), small())
    HIDDEN[:] = [module.module]
    compare(module, [X], 1e-4)


class OfAnIterator(OfAGlobal):
    @staticmethod
    def forward(ctx, x, slot):
        ctx.slot = slot
        ctx.save_for_backward(x)
        return next(slot)(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = detached(ctx.saved_tensors)
        with torch.enable_grad():
            next(ctx.slot)(x).backward(g)
        return x.grad, None


def test_parameters_that_the_context_does_not_show():
    text = "the backward of OfAnIterator reads a parameter or buffer that neither"
    fn = bridge.export(Call(lambda m, x: OfAnIterator.apply(m[0].weight * x, itertools.repeat(m)), small()))
    with pytest.raises(bridge.BridgeError, match=text):
        jax.grad(lambda p: fn(p, fn.buffers, X[:1].numpy())[0].sum())(fn.params)


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(6), None

    def run(self, x):
        self.last = self.norm(x)
        return self.last.sin()

    def forward(self, x):
        return Checkpointed.apply(self.run, x)


def test_buffers_that_a_second_run_writes():
    """PyTorch writes batch statistics again in its backward."""
    fn = bridge.export(Normalised())
    with pytest.warns(bridge.BridgeWarning, match="the backward of Checkpointed changes .* once more, which is lost"):
        jax.grad(lambda p: fn(p, fn.buffers, X.numpy(), train=True)[0].sum())(fn.params)
