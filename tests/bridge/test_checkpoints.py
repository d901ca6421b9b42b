"""Code that PyTorch runs again in its backward: checkpoints, reversible blocks, and what they leave in `grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import TRANSFORMS, Call, Calls, compare, composes, differentiated, gradients, in_jax, raises, randn, verified
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import bridge
from bridge.autograd import checkpoint as checkpoint_file
from bridge.tensor.tensor import Region

# ---- `torch.utils.checkpoint`: the same values, gradients and writes, and less is kept for the backward pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 64)
        self.down = nn.Linear(64, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(torch.sin(self.up(x)))))


class Model(nn.Module):
    """Blocks in checkpoints; one of them counts its calls, notes its last result and changes its input in place."""

    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.calls = nn.Buffer(torch.zeros(()))
        self.mean = nn.Buffer(torch.zeros(4))
        self.reentrant = reentrant
        self.aside = None

    def middle(self, x, scale):
        # A recomputation in PyTorch would count twice, so what is noted does not depend on the count.
        self.calls.fill_(1)
        with torch.no_grad():
            self.mean.copy_(x.mean(0))
        self.aside = x * 2
        return self.blocks[1](x) * scale, {"twice": self.aside}

    def forward(self, x):
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        if self.reentrant:
            x, more = self.middle(x, 0.5)
        else:
            x, more = checkpoint(self.middle, x, scale=0.5, use_reentrant=False)
        x = checkpoint_sequential([self.blocks[2]], 1, x, use_reentrant=self.reentrant)
        return x * self.aside + more["twice"] + self.calls


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_values_gradients_and_writes_are_pytorchs(train, reentrant):
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    verified(Model(reentrant).train(train), x, tolerance=1e-5)


def residuals(model, recompute=""):
    fn = bridge.export(model, recompute=recompute)
    x = jnp.ones((3, 4))

    def loss(params):
        return fn(params, fn.buffers, x, rng=jax.random.key(0))[0].sum()

    _, pull = jax.vjp(loss, fn.params)
    params = sum(p.size for p in fn.params.values())
    return sum(leaf.size for leaf in jax.tree.leaves(pull)) - params


class Plain(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def test_less_is_kept():
    kept = residuals(Plain(recompute=False))
    assert residuals(Plain(recompute=True)) < kept / 4
    assert residuals(Plain(recompute=False), r"blocks\.\d") < kept / 4
    assert residuals(Plain(recompute=False), r"blocks\.0") < kept
    with pytest.raises(bridge.BridgeError, match=r"'block' matches no submodule; names here are blocks"):
        bridge.export(Plain(recompute=False), recompute="block")


def test_gradients_are_the_same_with_it():
    module = Plain(recompute=False).eval()
    fns = [bridge.export(module, recompute=recompute) for recompute in ("", r"blocks\.\d")]
    found = [jax.jit(jax.grad(lambda p, fn=fn: fn(p, {}, jnp.ones((3, 4)))[0].sum()))(fn.params) for fn in fns]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), *found)


def test_inside_another_and_under_no_grad():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block().eval()
            self.seen = nn.Buffer(torch.zeros(()))

        def inner(self, x):
            self.seen.fill_(2.0)
            return self.block(x)

        def outer(self, x):
            return checkpoint(self.inner, x * 2, use_reentrant=False) + self.seen

        def forward(self, x):
            with torch.no_grad():
                before = checkpoint(self.inner, x, use_reentrant=False)
            return checkpoint(self.outer, x, use_reentrant=False) * before * self.seen

    verified(Nested(), torch.ones(2, 4, requires_grad=True), tolerance=1e-5)


def test_without_a_trace_python_may_look_at_values():
    def asks(x):
        return checkpoint(lambda x: x * 2 if x.sum() > 0 else x, x, use_reentrant=False)

    assert in_jax(asks, jnp.ones(2)).tolist() == [2.0, 2.0]


def test_the_rules_are_needed(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(checkpoint_file, "recomputed", lambda function, *args, **kwargs: function(*args, **kwargs))
        assert residuals(Plain(recompute=True)) == residuals(Plain(recompute=False))
    monkeypatch.setattr(Region, "note", lambda self, holder, new=False: None)
    with pytest.raises(bridge.BridgeError, match=r"UnexpectedTracerError|changes `aside`"):
        bridge.verify(Model(reentrant=False), torch.ones(3, 4, requires_grad=True))


def test_a_reentrant_checkpoint_without_an_input_that_requires_grad():
    """PyTorch gives its parameters no gradient; an input of the call may require grad, which only the caller knows."""
    detached = Call(lambda m, x: checkpoint(m, x.detach(), use_reentrant=True), nn.Linear(3, 3))
    raises("gives parameters no gradient in PyTorch", detached, jnp.ones((2, 3)))
    with pytest.warns(bridge.BridgeWarning, match="here they have one"):
        in_jax(Call(lambda m, x: checkpoint(m, x, use_reentrant=True), nn.Linear(3, 3)), jnp.ones((2, 3)))


def test_a_tensor_that_is_written_before_the_second_run():
    """docs/bridge.md lists this: PyTorch's gradient is that of sin(x * 0.75), the bridge has that of the result."""

    def late(m, x):
        y = checkpoint(lambda x: torch.sin(x * m.scale), x, use_reentrant=False)
        m.scale.add_(0.25)
        return y

    x = torch.ones((), requires_grad=True)
    Calls(late, scale=nn.Buffer(torch.tensor(0.5)))(x).backward()
    fn = bridge.export(Calls(late, scale=nn.Buffer(torch.tensor(0.5))))
    ours = jax.grad(lambda x: fn(fn.params, fn.buffers, x)[0])(jnp.ones(()))
    np.testing.assert_allclose([x.grad, ours], [0.75 * np.cos(0.75), 0.5 * np.cos(0.5)], rtol=1e-6)


# ---- `grad` of parameters: what the backward of a `torch.autograd.Function` adds to it is part of JAX's gradient

X = randn(4, 6)


def detached(tensors):
    return [t.detach().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in tensors]


class Checkpointed(Function):
    """A checkpoint as large-model code has it."""

    @staticmethod
    def forward(ctx, run, *args):
        ctx.run = run
        ctx.state = torch.get_rng_state()
        with torch.no_grad():
            outputs = run(*args)
        ctx.save_for_backward(*args)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("use .backward()")
        inputs = detached(ctx.saved_tensors)
        before = torch.get_rng_state()
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
        ctx.y = x.detach()
        ctx.blocks = blocks
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
                y = torch.cat([x1, x2.detach()], -1)
                dy = torch.cat([d1, d2], -1)
        return dy, None


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
    """Uses the same parameters in two blocks and outside of them."""
    h = Checkpointed.apply(module, x)
    return Checkpointed.apply(lambda a, b: module(a * b), h, x.sin()) + module(h) * module[0].weight.sum()


def nested(module, x):
    return Checkpointed.apply(lambda t: module[2](torch.tanh(module[0](t))).sin(), module(x))


CALLS = {
    "checkpoint of a module": lambda m, x: Checkpointed.apply(m, x),
    "checkpoints that share parameters": twice,
    "checkpoint of a lambda": nested,
    "grad by hand": lambda m, x: Accumulates.apply(torch.tanh(Accumulates.apply(x, m[0])), m[2]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_backward_adds(name):
    compare(Call(CALLS[name], small()), [X], 1e-4)
    verified(Call(CALLS[name], small()), X.clone().requires_grad_())


def test_reversible_blocks():
    blocks = nn.ModuleList(nn.ModuleList([small(3), small(3)]) for _ in range(2))
    compare(Call(lambda blocks, x: ReversibleBlocks.apply(x, blocks), blocks), [X], 1e-4)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_composes(transform):
    composes(transform, Call(CALLS["checkpoint of a module"], small()), X[:, None])


def test_without_an_input_that_requires_grad():
    """PyTorch does not run the backward then."""
    with pytest.warns(bridge.BridgeWarning, match="runs in PyTorch only if an input of it requires grad"):
        gradients(Call(CALLS["checkpoint of a module"], small()), X)


HIDDEN = []


def through_a_global(ctx, x):
    ctx.save_for_backward(x)
    return HIDDEN[0](x)


def back_through_a_global(ctx, g):
    (x,) = detached(ctx.saved_tensors)
    with torch.enable_grad():
        HIDDEN[0](x).backward(g)
    return x.grad


def test_a_module_that_is_a_global():
    HIDDEN[:] = [small()]
    function = differentiated(through_a_global, back_through_a_global)
    compare(Call(lambda m, x: function.apply(x), HIDDEN[0]), [X], 1e-4)


def test_buffers_that_a_second_run_writes():
    """PyTorch writes batch statistics again in its backward."""

    def run(m, x):
        m.last = m.norm(x)
        return m.last.sin()

    module = Calls(lambda m, x: Checkpointed.apply(lambda x: run(m, x), x), norm=nn.BatchNorm1d(6), last=None)
    with pytest.warns(bridge.BridgeWarning, match="the backward of Checkpointed changes .* once more, which is lost"):
        gradients(module, X, train=True)
