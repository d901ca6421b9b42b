"""Buffers, parameters and modules that a call makes, replaces or grows, and NumPy arrays over their memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from holding import Calls
from torch import nn

import bridge


def test_what_a_call_registers_says_where_to_register_it():
    def fills(self, x):
        self.late = x if self.late is None else self.late + x
        return self.late

    def registers(self, x):
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(3))
        self.made += x.sum(0)
        return x * self.made

    def adds_a_module(self, x):
        if not hasattr(self, "more"):
            self.add_module("more", nn.Linear(3, 3).requires_grad_(False))
        return self.more(x)

    for forward, name, remedy in (
        (fills, "late", "register the buffer in `__init__` as a tensor"),
        (registers, "made", "register the buffer in `__init__` as a tensor"),
        (adds_a_module, "more", "register it in `__init__`"),
    ):
        module = Calls(forward)
        module.register_buffer("late", None)
        fn = bridge.export(module)
        with pytest.raises(bridge.BridgeError, match=f"changes `{name}.*{remedy}"):
            fn(fn.params, fn.buffers, jnp.ones((2, 3)), rng=jax.random.key(0))
        assert "made" not in module._buffers and "more" not in module._modules and module.late is None


def test_a_parameter_that_the_call_replaces_is_handed_back():
    def forward(self, x):
        out = x @ self.w
        self.w = nn.Parameter(self.w.detach() * 2)
        return out + x @ self.w

    module, x = Calls(forward), torch.ones(2, 3)
    fn = bridge.export(module)
    params = fn.params
    for _ in range(2):
        result = fn.run(params, fn.buffers, jnp.ones((2, 3)))
        np.testing.assert_allclose(result.outputs, module(x).detach().numpy(), rtol=1e-6)
        params = result.params


def test_a_buffer_keeps_its_shape_from_call_to_call():
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = nn.Buffer(torch.zeros(0, 3))

        def forward(self, x):
            self.cache = torch.cat([self.cache, x])
            return self.cache.sum(0)

    fn = bridge.export(Grows())
    _, buffers = fn({}, fn.buffers, jnp.ones((2, 3)))
    with pytest.raises(bridge.BridgeError, match=r"buffer cache has shape \(2, 3\), expected \(0, 3\).*register it at"):
        fn({}, buffers, jnp.ones((2, 3)))


def test_a_ring_of_past_inputs_by_a_pointer_in_a_buffer():
    class Ring(nn.Module):
        def __init__(self, pointer):
            super().__init__()
            self.q, self.ptr = nn.Buffer(torch.zeros(4, 3)), pointer

        def forward(self, x):
            self.q[self.ptr % 4] = x.detach().mean(0)
            self.q[:, self.ptr % 3] = self.ptr
            self.ptr += 1
            return x + self.q.sum(0)

    x = torch.ones(2, 3)
    assert bridge.verify(Ring(nn.Buffer(torch.zeros((), dtype=torch.int64))), x, steps=3).ok
    fn = bridge.export(Ring(0))
    with pytest.raises(bridge.BridgeError, match="changes `ptr` and a later call would read it"):
        fn({}, fn.buffers, x.numpy())


def counts_by(key):
    def forward(self, x):
        self.counts[key(self)] = self.counts.get(key(self), 0) + 1
        return x * self.counts[key(self)]

    return forward


@pytest.mark.parametrize("key", [lambda m: m, lambda m: (m.w, "n"), lambda m: id(m.w)], ids=["module", "tensor", "id"])
def test_counts_by_the_module_or_a_tensor_are_refused(key):
    module, x = Calls(counts_by(key), counts={}), torch.ones(2, 3)
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=r"changes `counts.* a later call would read it"):
        jax.make_jaxpr(lambda p: fn(p, {}, x.numpy())[0])(fn.params)
    assert module.counts == {} and not torch.equal(module(x), module(x))


# ---- tables that the next call would write again


class Named(nn.Module):
    """Returns text beside a tensor, and keeps a table."""

    def __init__(self):
        super().__init__()
        self.tables, self.last = {}, None

    def forward(self, x):
        if x.shape not in self.tables:
            self.tables[x.shape] = torch.linspace(0, 1, 3)
        self.last = torch.ones(2)
        return x + self.tables[x.shape], "a name"


def test_text_in_a_result_beside_state():
    fn = bridge.export(Named())
    out, name = fn({}, {}, jnp.ones((2, 3)))[0]
    assert name == "a name" and jnp.array_equal(out[0], jnp.asarray([1, 1.5, 2]))
    assert bridge.verify(Named(), torch.randn(2, 3)).ok
