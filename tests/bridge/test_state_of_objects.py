"""State that is no number of a buffer: classes, code, orders, hooks, attributes of tensors, modes, cached tables."""

import collections
import copy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Holds(nn.Module):
    """`function(module, x)`, with attributes."""

    def __init__(self, function, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def refuses(module, what):
    """The call names what it changes, in PyTorch a second call differs from the first, and the module is as before."""
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=what):
        jax.jit(lambda x: fn(fn.params, fn.buffers, x))(jnp.ones(2))


def differs(module):
    """Whether PyTorch's second call gives something else than its first; it changes the module."""
    first, second = (module(torch.ones(2)).detach().clone() for _ in range(2))
    return not torch.equal(first, second)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_the_order_of_a_dict_that_the_call_reads(kind):
    def forward(self, x):
        key = next(iter(self.lru))
        value = self.lru[key]
        self.lru[key] = self.lru.pop(key)
        return x * value

    refuses(Holds(forward, lru=kind(a=2.0, b=3.0)), "order of `lru`")
    assert differs(Holds(forward, lru=kind(a=2.0, b=3.0)))


def test_the_order_of_a_dict_that_belongs_to_somebody_else():
    table = {"a": 2.0, "b": 3.0}

    class Owner:
        def __init__(self):
            self.table = table

    def forward(self, x):
        key = next(iter(self.owner.table))
        table[key] = table.pop(key)
        return x * table[key]

    refuses(Holds(forward, owner=Owner()), "order of `")
    assert list(table) == ["a", "b"]


def test_the_order_of_a_dict_that_nobody_reads():
    def forward(self, x):
        self.lru["a"] = self.lru.pop("a")
        return x * self.lru["a"]

    fn = bridge.export(Holds(forward, lru={"a": 2.0, "b": 3.0}))
    assert fn({}, {}, jnp.ones(2))[0].tolist() == [2, 2]


def test_the_order_of_the_modules_in_a_dict():
    def forward(self, x):
        for module in self.layers.values():
            x = module(x)
        self.layers["a"] = self.layers.pop("a")
        return x

    def make():
        return Holds(forward, layers=nn.ModuleDict({"a": nn.Tanh(), "b": nn.Softplus()}))

    refuses(make(), "order of `layers")
    assert differs(make())


def with_hook(forward):
    module = Holds(forward, act=nn.Identity())
    module.handle = module.act.register_forward_hook(lambda m, i, o: o * 5)
    return module


def test_a_hook_that_the_call_removes():
    def forward(self, x):
        y = self.act(x)
        self.handle.remove()
        return y

    module = with_hook(forward)
    refuses(module, "`act._forward_hooks")
    assert len(module.act._forward_hooks) == 1
    assert differs(module)


def test_a_hook_of_the_call_alone():
    def forward(self, x):
        with self.act.register_forward_hook(lambda m, i, o: o * 5):
            return self.act(x)

    module = Holds(forward, act=nn.Identity())
    fn = bridge.export(module)
    assert fn({}, {}, jnp.ones(2))[0].tolist() == [5, 5] and not module.act._forward_hooks


def with_attribute(forward, **attributes):
    module = Holds(forward, w=nn.Parameter(torch.ones(2)))
    module.register_buffer("buf", torch.ones(2))
    for name, value in attributes.items():
        setattr(module.w, name, copy.copy(value))
        setattr(module.buf, name, copy.copy(value))
    return module


def test_an_attribute_of_a_tensor_that_is_only_read():
    module = with_attribute(lambda self, x: x * self.w * self.w.age, age=4)
    fn = bridge.export(module)
    assert fn(fn.params, fn.buffers, jnp.ones(2))[0].tolist() == [4, 4]


@pytest.mark.parametrize(
    "leave",
    [
        lambda: torch.set_grad_enabled(False),
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
    ],
    ids=["gradient mode", "autocast", "its dtype"],
)
def test_a_mode_of_the_process_that_the_call_leaves(leave):
    def modes():
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
        )

    def forward(self, x):
        leave()
        return x * 2

    before = modes()
    fn = bridge.export(Holds(forward))
    with pytest.raises(bridge.BridgeError, match=r"leaves .* changed"):
        fn({}, {}, jnp.ones(2))
    assert modes() == before


@pytest.mark.parametrize(
    "read",
    [
        lambda table, position: table[:8][position],
        lambda table, position: table[1:7][position],
        lambda table, position: table.unsqueeze(0)[0, position],
        lambda table, position: table.t()[:, position],
        lambda table, position: table.flip(0)[position],
    ],
)
def test_a_part_of_a_cached_table_at_a_traced_position(read):
    def forward(self, x):
        if self.table is None:
            self.table = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01])).cos()
        return read(self.table, self.position.long()) * x

    module = Holds(forward, table=None, position=nn.Buffer(torch.tensor(3)))
    fn = bridge.export(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out, _ = jax.jit(lambda buffers, x: fn(fn.params, buffers, x))(fn.buffers, jnp.ones((2, 3)))
    np.testing.assert_allclose(out, module(torch.ones(2, 3)).detach().numpy(), rtol=1e-5)
