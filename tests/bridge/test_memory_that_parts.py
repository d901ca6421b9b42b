"""Memory that two tensors share before a call and not after it, or the reverse; layouts that a call leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import bridge


class Kept(nn.Module):
    """`function(module, x)`, with a buffer `mem` of four zeros, and `keep` of it in attributes."""

    def __init__(self, function, **keep):
        super().__init__()
        self.register_buffer("mem", torch.ones(4))
        for name, of in keep.items():
            setattr(self, name, of(self.mem))
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def calls(make, count=3, x=(1.0, 2.0, 3.0, 4.0)):
    """Asserts that `count` calls give what PyTorch gives."""
    module, fn = make(), bridge.export(make())
    buffers, call = fn.buffers, jax.jit(lambda buffers, x: fn(fn.params, buffers, x))
    for _ in range(count):
        expected = module(torch.tensor(x))
        out, buffers = call(buffers, jnp.array(x))
        np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-6)
    for name, value in module.named_buffers():
        np.testing.assert_allclose(buffers[name], value.numpy(), rtol=1e-6)


def refused(make, what, x=(1.0, 2.0, 3.0, 4.0)):
    fn = bridge.export(make())
    with pytest.raises(bridge.BridgeError, match=what):
        jax.jit(lambda buffers, x: fn(fn.params, buffers, x))(fn.buffers, jnp.array(x))


# ---- x.data = y.data


def test_data_that_is_assigned_is_shared():
    def forward(self, x):
        a, b = x * 1, x * 0
        b.data = a.data
        a.mul_(3)
        b[:2].add_(5)
        return a * 2 + b

    calls(lambda: Kept(forward), 1)


def test_data_of_a_view_is_shared():
    def forward(self, x):
        flat, part = x * 1, x[:2] * 0
        part.data = flat[1:3]
        flat.mul_(3)
        part.add_(1)
        return flat + torch.cat([part, part])

    calls(lambda: Kept(forward), 1)


def test_data_that_is_assigned_leaves_the_gradient_path():
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self, x):
            flat = torch.cat([x, x]).detach()
            self.w.data = flat[1:3]
            flat.mul_(2)
            return (self.w**2).sum() * x.sum()

    module, x = Weights(), torch.tensor([3.0, 4.0])
    fn = bridge.export(module)
    ours = jax.grad(lambda params: fn.run(params, {}, jnp.asarray(x.numpy()))[0])(fn.params)
    module(x).backward()
    np.testing.assert_allclose(ours["w"], module.w.grad.numpy())


def test_buffers_that_swap_their_data():
    class Swap(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.ones(4))
            self.register_buffer("b", torch.zeros(4))

        def forward(self, x):
            view = self.a[:1]
            self.a.data, self.b.data = self.b.data, self.a.data
            view.mul_(3)
            return self.b * x

    calls(Swap, 3)


def test_buffers_that_share_data_afterwards():
    class Share(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.ones(4))
            self.register_buffer("b", torch.zeros(4))

        def forward(self, x):
            self.a.data = self.b.data
            self.a += x
            return self.b * 1

    refused(Share, "share their memory after the call")


# ---- kept tensors over the memory of a buffer


def test_a_kept_view_keeps_the_old_data():
    def forward(self, x):
        self.mem.data = self.mem.data * 3
        self.view.add_(10)
        return self.mem * x

    module = Kept(forward, view=lambda mem: mem[:2])
    assert module(torch.ones(4)).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    "keep", [lambda mem: mem[:2], lambda mem: [mem], lambda mem: (mem[:2], 1), lambda mem: {"it": mem}]
)
@pytest.mark.parametrize("assign", ["slot", "data"])
def test_a_slot_that_parts_from_a_kept_tensor(keep, assign):
    def forward(self, x):
        kept = self.kept
        kept = kept if isinstance(kept, torch.Tensor) else next(iter(kept.values() if type(kept) is dict else kept))
        kept.add_(x[: len(kept)])
        out = self.mem * 1
        if assign == "slot":
            self.mem = self.mem * 0.5
        else:
            self.mem.data = self.mem * 0.5
        return out

    module = Kept(forward, kept=keep)
    if assign == "data" and not isinstance(module.kept, torch.Tensor) and type(module.kept) is not tuple:
        calls(lambda: Kept(forward, kept=keep))  # the same tensor has the new data
        return
    refused(lambda: Kept(forward, kept=keep), "`kept")


def test_a_slot_that_parts_from_a_kept_tensor_which_nobody_reads():
    def forward(self, x):
        self.mem = self.mem * 0.5 + x
        return self.mem * 1

    calls(lambda: Kept(forward, kept=lambda mem: [mem]))


# ---- buffers that are views of one another


class Views(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.register_buffer("mem", torch.arange(4.0))
        self.register_buffer("top", self.mem[:2])
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def test_a_view_of_a_buffer_that_gets_a_tensor_of_its_own():
    def top(self, x):
        self.top += 10
        self.top = self.top + 1
        return self.mem * x

    def mem(self, x):
        self.top += 10
        self.mem = self.mem * 1
        return self.mem * x

    for forward in (top, mem):
        refused(lambda forward=forward: Views(forward), "mem and top|top and mem")


def test_a_view_of_a_buffer_that_stays_one():
    def forward(self, x):
        self.top += 10
        self.mem *= 2
        return self.mem * x

    calls(lambda: Views(forward))


# ---- expanded buffers


class Expanded(nn.Module):
    def __init__(self, function, of=lambda: torch.zeros(1, 2).expand(3, 2)):
        super().__init__()
        self.register_buffer("h", of())
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def test_a_write_into_an_expanded_buffer():
    def forward(self, x):
        self.h[0] += x[:2]
        return self.h * 1

    refused(lambda: Expanded(forward), "share memory")
    refused(lambda: Expanded(forward, lambda: torch.zeros(4).unfold(0, 2, 1)), "share memory")


def test_an_expanded_buffer_that_is_read_or_assigned():
    def reads(self, x):
        return self.h * x[:2]

    def assigns(self, x):
        self.h = self.h + x[:2]
        return self.h * 1

    calls(lambda: Expanded(reads))
    calls(lambda: Expanded(assigns))


# ---- layouts


def test_a_layout_that_no_later_call_sees():
    def forward(self, x):
        self.h = (self.h @ self.h).T + x[:2]
        self.h = self.h.T
        return self.h * 2

    calls(lambda: Expanded(forward, lambda: torch.tensor([[0.1, 0.2], [0.3, 0.4]])))


def test_weights_of_a_frozen_parameter_over_a_trained_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.t = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.t.weight = nn.Parameter(self.a.weight.data, requires_grad=False)

        def forward(self, x):
            return self.a(x) + self.t(x)

    module = Tied()
    fn = bridge.export(module)
    params = {name: value + 1 for name, value in fn.params.items()}
    here, _ = fn(params, fn.buffers, jnp.ones((1, 2)))
    module.load_state_dict(bridge.state_dict(fn, params, fn.buffers))
    np.testing.assert_allclose(module(torch.ones(1, 2)).detach().numpy(), here, rtol=1e-6)


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize(
    "take", [lambda a: a[0], lambda a: a, lambda a: a.detach()[0]], ids=["row", "same", "detached"]
)
def test_a_view_kept_of_a_buffer_has_the_gradient_of_what_is_written_into_the_buffer(take, registered):
    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
            self.a = nn.Buffer(torch.zeros(2, 2))
            view = take(self.a)
            self.v = nn.Buffer(view) if registered and view is not self.a else [view]

        def forward(self, x):
            self.a += self.w
            return (self.v[0] if isinstance(self.v, list) else self.v).sum() * x.sum()

    module, x = Kept(), torch.tensor([3.0, 4.0])
    fn = bridge.export(module)
    ours = jax.grad(lambda params: fn(params, fn.buffers, jnp.asarray(x.numpy()))[0])(fn.params)
    y = module(x)
    if y.requires_grad:
        y.backward()
    np.testing.assert_allclose(ours["w"], module.w.grad.numpy() if y.requires_grad else np.zeros(2))
