"""`torch.utils.checkpoint`: the same values, gradients and writes, and less is kept for the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import bridge
from bridge.autograd import checkpoint as checkpoint_file
from bridge.tensor.storage import Region


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)
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
    report = bridge.verify(Model(reentrant).train(train), x, tolerance=1e-5)
    assert report.ok, report


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
    assert residuals(Plain(recompute=True)) < residuals(Plain(recompute=False)) / 4


def test_a_module_need_not_ask_for_it():
    kept = residuals(Plain(recompute=False))
    assert residuals(Plain(recompute=False), r"blocks\.\d") < kept / 4
    assert residuals(Plain(recompute=False), r"blocks\.0") < kept
    with pytest.raises(bridge.BridgeError, match=r"'block' matches no submodule; names here are blocks"):
        bridge.export(Plain(recompute=False), recompute="block")


def test_gradients_are_the_same_with_it():
    fns = [bridge.export(Plain(recompute=False).eval(), recompute=r) for r in ("", r"blocks\.\d")]
    x = jnp.ones((3, 4))
    found = [jax.grad(lambda p, fn=fn: fn(p, fn.buffers, x)[0].sum())(fns[0].params) for fn in fns]
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

    report = bridge.verify(Nested(), torch.ones(2, 4, requires_grad=True), tolerance=1e-5)
    assert report.ok, report


def test_without_a_trace_python_may_look_at_values():
    class Looks(nn.Module):
        def look(self, x):
            return x * 2 if x.sum() > 0 else x

        def forward(self, x):
            return checkpoint(self.look, x, use_reentrant=False)

    assert bridge.export(Looks())({}, {}, jnp.ones(2))[0].tolist() == [2.0, 2.0]


def test_the_rules_are_needed(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(checkpoint_file, "recomputed", lambda function, *args, **kwargs: function(*args, **kwargs))
        assert residuals(Plain(recompute=True)) == residuals(Plain(recompute=False))
    monkeypatch.setattr(Region, "note", lambda self, holder: None)
    with pytest.raises(bridge.BridgeError, match=r"UnexpectedTracerError|changes `aside`"):
        bridge.verify(Model(reentrant=False), torch.ones(3, 4, requires_grad=True))


def test_a_reentrant_checkpoint_without_an_input_that_requires_grad():
    """PyTorch gives its parameters no gradient; an input of the call may require grad, which only the caller knows."""

    class Reentrant(nn.Module):
        def __init__(self, detach):
            super().__init__()
            self.linear, self.detach = nn.Linear(3, 3), detach

        def forward(self, x):
            return checkpoint(self.linear, x.detach() if self.detach else x, use_reentrant=True)

    for detach, message in ((True, pytest.raises(bridge.BridgeError, match="gives parameters no gradient in PyTorch")),
                            (False, pytest.warns(bridge.BridgeWarning, match="here they have one"))):  # fmt: skip
        fn = bridge.export(Reentrant(detach))
        with message:
            fn(fn.params, {}, jnp.ones((2, 3)))


def test_a_tensor_that_is_written_before_the_second_run():
    """docs/bridge.md lists this: PyTorch's gradient is that of sin(x * 0.75), the bridge has that of the result."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Buffer(torch.tensor(0.5))

        def forward(self, x):
            y = checkpoint(lambda x: torch.sin(x * self.scale), x, use_reentrant=False)
            self.scale.add_(0.25)
            return y

    x = torch.ones((), requires_grad=True)
    Late()(x).backward()
    fn = bridge.export(Late())
    ours = jax.grad(lambda x: fn(fn.params, fn.buffers, x)[0])(jnp.ones(()))
    np.testing.assert_allclose([x.grad, ours], [0.75 * np.cos(0.75), 0.5 * np.cos(0.5)], rtol=1e-6)
