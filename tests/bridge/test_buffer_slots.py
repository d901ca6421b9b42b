"""Parameters and buffers as objects: who else holds them, what they share, what the call puts in their place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Slots(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.call = nn.Buffer(torch.zeros(2)), nn.Buffer(torch.ones(2)), forward

    def forward(self, x):
        return self.call(self, x)


@pytest.mark.parametrize("value", [lambda m: m.b, lambda m: m.b.view(2), lambda m: m.b.detach()])
def test_buffers_that_share_memory_after_a_call_are_refused(value):
    """PyTorch would write both in the next call."""

    def forward(m, x):
        m.b -= 1
        m.a = value(m)
        return x * m.a

    fn = bridge.export(Slots(forward))
    with pytest.raises(bridge.BridgeError, match=r"a and b share their memory after the call.*assign a clone"):
        fn.run({}, fn.buffers, jnp.ones(2))


def test_two_buffers_set_to_one_constant_are_refused():
    def forward(m, x):
        m.a = m.b = torch.zeros(2)
        return x

    fn = bridge.export(Slots(forward))
    with pytest.raises(bridge.BridgeError, match="share their memory after the call"):
        fn.run({}, fn.buffers, jnp.ones(2))


def test_a_buffer_that_is_set_to_a_constant_and_only_read():
    def forward(m, x):
        y, m.a = x + m.a, m.other
        return y

    module = Slots(forward)
    module.other = torch.full((2,), 3.0)
    assert bridge.verify(module, torch.ones(2), steps=2).ok


def deleted(m, x):
    del m.a
    return x


def test_a_deleted_buffer_is_refused():
    fn = bridge.export(Slots(deleted))
    with pytest.raises(bridge.BridgeError, match="the call deletes a,"):
        fn.run({}, fn.buffers, jnp.ones(2))


def test_buffers_written_as_a_list():
    def forward(m, x):
        torch._foreach_mul_([m.a, m.b], 0.9)
        torch._foreach_lerp_([m.a], [x.detach()], 0.5)
        return x * m.a + m.b

    assert bridge.verify(Slots(forward), torch.ones(2), steps=2).ok


def test_attributes_of_buffers_and_parameters_are_kept():
    module = Slots(lambda m, x: x * m.a.scale + m.b)
    module.a.scale = 5.0
    fn = bridge.export(module)
    np.testing.assert_array_equal(fn({}, fn.buffers, jnp.ones(2))[0], [6, 6])


def test_parameters_in_containers_are_the_registered_ones():
    class Groups(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, self.b = nn.Linear(2, 2), nn.Buffer(torch.ones(2))
            self.frozen, self.rates = {self.l.bias}, {self.l.weight: 3.0}
            self.listed, self.group = [self.l.weight], {"params": [self.l.weight], "ids": [self.b]}

        def forward(self, x):
            for p in self.l.parameters():
                x = x * (2 if p in self.frozen else 1) * self.rates.get(p, 1.0)
                x = x * (5 if any(p is q for q in self.listed) else 1) * (7 if self.b is self.group["ids"][0] else 1)
            return self.l(x) + self.group["params"][0].sum()

    torch.manual_seed(0)
    module, x = Groups(), torch.ones(1, 2)
    fn = bridge.export(module)
    np.testing.assert_allclose(fn(fn.params, fn.buffers, x.numpy())[0], module(x).detach().numpy(), rtol=1e-6)
    gradient = jax.grad(lambda p: fn(p, fn.buffers, x.numpy())[0].sum())(fn.params)
    module(x).sum().backward()
    np.testing.assert_allclose(gradient["l.weight"], module.l.weight.grad.numpy(), rtol=1e-6)


def test_equal_indices_in_an_assignment_give_the_gradient_to_the_value_that_is_kept():
    """PyTorch gives it to all of them."""

    class Assigned(nn.Module):
        def forward(self, x, v):
            y = x.clone()
            y[torch.tensor([1, 1])] = v
            return y

    fn = bridge.export(Assigned())
    gradient = jax.grad(lambda v: fn({}, {}, jnp.zeros(3), v)[0].sum())(jnp.ones(2))
    assert sorted(gradient.tolist()) == [0, 1]


def test_calls_before_do_not_decide_whether_a_call_is_an_error():
    """A buffer set to another tensor in one method and written in another: PyTorch would write both tensors."""

    class Resets(Slots):
        def reset(self):
            self.a = self.other

    module = Resets(lambda m, x: m.a.add_(x) * 1)
    module.other = torch.zeros(2)
    args = {"reset": (), "forward": (jnp.ones(2),)}
    for order in (("reset", "forward"), ("forward", "reset"), ("forward",)):
        fn = bridge.export(module)
        results = {method: fn.run({}, fn.buffers, *args[method], method=method) for method in order}
        assert results["forward"].buffers["a"].tolist() == [1, 1]
