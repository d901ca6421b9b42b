"""`export_blocks`: equal submodules under `lax.scan` compute what the module does; blocks that differ are refused."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Block(nn.Module):
    def __init__(self, layer, **changes):
        super().__init__()
        self.layer = layer
        self.width = 6
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        vars(self).update(changes)

    def forward(self, x, scale=1.0):
        return x + scale * self.drop(self.norm(self.linear(x)))


class ReadsLayer(Block):
    def forward(self, x):
        return super().forward(x, getattr(self, "layer", 1.0))


def network(count=3, kind=Block, *more):
    torch.manual_seed(0)
    return nn.Sequential(*(kind(i) for i in range(count)), *more)


def state(blocks, module):
    fn = bridge.export(module)
    return blocks.stacked(fn.params), blocks.stacked(fn.buffers)


X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


@pytest.mark.parametrize("train", [True, False])
def test_values_buffers_and_gradients_are_those_of_the_module(train):
    module = network()
    for block in module:
        block.drop.p = 0.0
    whole = bridge.export(module)
    blocks = bridge.export_blocks(module, r"\d+")
    params = blocks.stacked(whole.params)
    buffers = blocks.stacked(whole.buffers)
    assert blocks.names == ("0", "1", "2") and params["linear.weight"].shape == (3, 6, 6)

    def loss(params, buffers, fn):
        out, buffers = fn(params, buffers, X, train=train)
        return (out**2).sum(), buffers

    slope = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
    (there, written), slopes = slope(whole.params, whole.buffers, whole)
    (here, stacked), scanned = slope(params, buffers, blocks)
    np.testing.assert_allclose(here, there, rtol=1e-6)
    for expected, arrays in ((written, stacked), (slopes, scanned)):
        found = blocks.unstacked(arrays)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4, err_msg=name)


def test_each_block_draws_numbers_of_its_own():
    class Noise(nn.Module):
        def forward(self, x):
            return torch.cat([x[1:], torch.rand(1)])

    blocks = bridge.export_blocks(nn.Sequential(*(Noise() for _ in range(3))), r"\d")
    first, _ = blocks({}, {}, jnp.zeros(3), rng=jax.random.key(0))
    assert len(set(first.tolist())) == 3
    with pytest.raises(bridge.BridgeError, match="draw from a JAX key of their own, and not from list"):
        blocks({}, {}, jnp.zeros(3), rng=[jnp.zeros(1)])


def test_the_first_item_of_a_tuple_goes_on_and_further_arguments_are_shared():
    class Pair(Block):
        def forward(self, x, scale):
            return super().forward(x, scale), None

    module = network(2, Pair).eval()
    blocks = bridge.export_blocks(module, r"\d")
    params, buffers = state(blocks, module)
    x = torch.from_numpy(X)
    for block in module:
        x, _ = block(x, 0.5)
    found, _ = blocks(params, buffers, X, 0.5, train=False)
    np.testing.assert_allclose(found, x.detach(), atol=1e-6)


def shared():
    module = network()
    module[2].linear.weight = module[0].linear.weight
    return module


def hooked():
    module = network()
    module[1].register_forward_hook(lambda *_: None)
    return module


def frozen():
    module = network()
    module[1].linear.bias.requires_grad = False
    return module


def other_mode():
    module = network()
    module[1].drop.eval()
    return module


REFUSED = {
    "class": (network(2, Block, nn.Linear(6, 6)), "the blocks 0 and 2 differ in class, submodules or state"),
    "shared": (shared(), r"the blocks 0 … 2 share a parameter"),
    "hooks": (hooked(), "the blocks 0 and 1 differ in _forward_hooks"),
    "frozen": (frozen(), "the blocks 0 and 1 differ in class, submodules or state"),
    "mode": (other_mode(), "the blocks 0 and 1 differ in drop.training"),
}


@pytest.mark.parametrize(("module", "message"), REFUSED.values(), ids=REFUSED)
def test_blocks_that_differ_are_refused(module, message):
    with pytest.raises(bridge.BridgeError, match=message):
        bridge.export_blocks(module, r"\d")


def test_a_pattern_without_a_match_is_refused():
    with pytest.raises(bridge.BridgeError, match=r"blocks 'layers.*' matches no submodule; names here are 0, 0.linear"):
        bridge.export_blocks(network(), "layers.*")


def test_reading_an_attribute_in_which_blocks_differ_is_refused():
    """The same holds if the code has a default for an attribute that is not there."""
    module = network(kind=ReadsLayer)
    blocks = bridge.export_blocks(module, r"\d")
    with pytest.raises(bridge.BridgeError, match="the blocks differ in the attribute layer, which their code reads"):
        blocks(*state(blocks, module), X, train=False)
    module = network()
    module[1].drop.p = 0.1
    module[2].drop.p = None
    blocks = bridge.export_blocks(module, r"\d")
    with pytest.raises(bridge.BridgeError, match=r"attribute p, which their code reads in drop \(Dropout\)"):
        blocks(*state(blocks, module), X, rng=jax.random.key(0), train=True)


def test_containers_and_objects_are_compared_by_what_they_hold():
    class Settings:
        def __init__(self, scale):
            self.scale = scale
            self.sizes = [1, (2, {"a": 3.0})]

    def module(scale):
        blocks = network(2)
        for i, block in enumerate(blocks):
            vars(block).update(settings=Settings(scale[i]), mine=[block.linear], table=torch.ones(2))
        return blocks

    def differing(blocks):
        kinds = type(blocks.cell.module).__mro__
        return {name for kind in kinds for name, value in vars(kind).items() if isinstance(value, property)}

    assert differing(bridge.export_blocks(module([1, 1]), r"\d")) == {"layer"}
    assert differing(bridge.export_blocks(module([1, 2]), r"\d")) == {"layer", "settings"}


@pytest.mark.slow
def test_forty_eight_blocks_lower_in_the_time_of_four():
    def seconds(count):
        module = network(count)
        blocks = bridge.export_blocks(module, r"\d+")
        params, buffers = state(blocks, module)

        def loss(params):
            return blocks(params, buffers, X, rng=jax.random.key(0), train=True)[0].sum()

        start = time.process_time()
        jax.jit(jax.grad(loss)).lower(params)
        return time.process_time() - start

    seconds(4)
    assert min(seconds(48) for _ in range(3)) <= 1.5 * min(seconds(4) for _ in range(3))
