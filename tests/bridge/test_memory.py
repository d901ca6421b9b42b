"""Memory as PyTorch has it: strides, offsets, and several state tensors over one storage."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, compare
from torch import nn

import bridge

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


class Strided(nn.Module):
    """`as_strided` counts in memory, whatever the layout of the tensor it is called on."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.w = nn.Parameter(randn(4, 6))

    def forward(self, x):
        h = self.make(x @ self.w)
        return h.as_strided((2, 3), (2, 1), 1).sin().sum() + h.sum()


class StridedWrite(Strided):
    def forward(self, x):
        h = self.make(x @ self.w)
        h.as_strided((2, 3), (3, 1), 2).mul_(3)
        return (h * torch.arange(h.numel()).view(h.shape)).sum()


MAKES = {
    "contiguous": lambda h: h * 1,
    "transposed clone": lambda h: h.t().clone(),
    "transposed result": lambda h: h.t() * 2,
    "channels last": lambda h: (h * 1).view(1, 3, 2, 3).to(memory_format=torch.channels_last),
    "channels last clone": lambda h: h.view(1, 3, 2, 3).clone(memory_format=torch.channels_last),
    "slice": lambda h: (h * 1)[1:],
    "slice of transposed": lambda h: h.t().clone()[1:, 1:],
}


class ViewParameter(nn.Module):
    """A parameter that is a view of a larger tensor, read through `.data` that was kept."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(6, 4)[1:5])
        self.kept = self.w.data[1:, :2]
        self.flipped = self.w.data.t()

    def forward(self, x):
        with torch.no_grad():
            self.w.mul_(2)
        return x @ self.w + self.kept.sum() + (x @ self.flipped)


class TransposedParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(4, 3).t())
        self.kept = self.w.data[1:, :2]

    def forward(self, x):
        return (x * self.w).sum() + self.kept[:, 0].sum() * 3 + self.kept[1, 1]


class Flat(nn.Module):
    """Two parameters cut from one flat tensor: neither is the other."""

    def __init__(self):
        super().__init__()
        flat = randn(32)
        self.a = nn.Parameter(flat[:16].view(4, 4))
        self.b = nn.Parameter(flat[16:].view(4, 4))
        self.kept = [self.a.data[1], self.b.data[2], self.a.detach().t()]

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b + self.kept[0] * 2 - self.kept[1] + x @ self.kept[2]


class BufferOfBuffer(nn.Module):
    """A buffer that views another one, written through either."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(randn(4))
        self.base = nn.Buffer(randn(4, 4))
        self.row = nn.Buffer(self.base[1])
        self.column = nn.Buffer(self.base.t()[2])

    def forward(self, x):
        self.base.mul_(2)
        y = x * self.row
        self.row.add_(x[0].detach())
        y = y + self.base.sum() + self.column
        self.column += 1
        return (y + x @ self.base) * self.scale


class FrozenInTrained(nn.Module):
    """A buffer over a part of a parameter's memory."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(randn(4, 4))
        self.seen = nn.Buffer(self.w.data[2])

    def forward(self, x):
        with torch.no_grad():
            self.w[2].add_(1)
        return x @ self.w + self.seen


MODULES = {
    **{f"read, {name}": (lambda make=make: Strided(make)) for name, make in MAKES.items()},
    **{f"write, {name}": (lambda make=make: StridedWrite(make)) for name, make in MAKES.items()},
    "view parameter": ViewParameter,
    "transposed parameter": TransposedParameter,
    "flat": Flat,
    "buffer of buffer": BufferOfBuffer,
    "buffer over a parameter": FrozenInTrained,
}


@pytest.mark.parametrize("name", MODULES)
def test_memory(name):
    """Two calls; `deepcopy` keeps shared memory, but not the tie to memory kept outside of parameters."""
    fn = bridge.export(MODULES[name]())
    reference = MODULES[name]()
    params, buffers = fn.params, fn.buffers
    for _ in range(2):
        for p in reference.parameters():
            p.grad = None
        out = reference(X)
        (out * out).sum().backward()

        def loss(params, buffers=buffers):
            result = fn.run(params, buffers, jnp.asarray(X.numpy()))
            return jnp.sum(result.outputs**2), result

        gradients, result = jax.jit(jax.grad(loss, has_aux=True))(params)
        close(result.outputs, out.detach())
        for n, p in reference.named_parameters():
            close(gradients[n], p.grad)
            close(result.params[n], p.detach())
        for n, b in reference.named_buffers():
            close(result.buffers[n], b)
        params, buffers = result.params, result.buffers


def close(results, expected):
    expected = expected.numpy()
    np.testing.assert_allclose(results, expected, rtol=0, atol=2e-5 * max(np.abs(expected).max(), 1e-3))


class Overlapping(nn.Module):
    def __init__(self):
        super().__init__()
        flat = randn(20)
        self.a = nn.Parameter(flat[:16].view(4, 4))
        self.b = nn.Parameter(flat[4:].view(4, 4))

    def forward(self, x):
        return x @ self.a @ self.b


def test_parameters_that_overlap_are_refused():
    """One step of any optimizer writes the shared elements twice; two arrays cannot say that."""
    with pytest.raises(bridge.BridgeError, match="parameters a and b share memory"):
        bridge.export(Overlapping())


def test_a_buffer_given_apart_from_the_one_it_views():
    """Both names are one memory: what is given for the view is written into it, as `load_state_dict` does."""
    fn, reference = bridge.export(BufferOfBuffer()), BufferOfBuffer()
    other = fn.buffers | {"row": fn.buffers["row"] + 1}
    out, _ = fn(fn.params, other, X.numpy())
    state = {name: torch.from_numpy(np.array(array)) for name, array in other.items()}
    with torch.no_grad():
        reference.base.copy_(state["base"])
        reference.row.copy_(state["row"])
        reference.column.copy_(state["column"])
    # `column` crosses `row`, and is given with the old value there.
    close(out, reference(X).detach())


# ---- writes where elements share memory


def one_of_several(x):
    y = x * 2
    y.expand(1, 3, 4)[0, 1].add_(1)
    y[:1].expand(3, 4)[2].mul_(x[0])
    y.expand(3, 4).mul_(x)
    y.unfold(1, 2, 1)[:, 0].add_(x[:, :2])
    y.as_strided((2, 3), (4, 0))[:, 1].exp_()
    return y


def cleared(x):
    y, z = x * 2, x * 3
    y[0].zero_()
    z.zero_()
    return y + z


@pytest.mark.parametrize("call", [one_of_several, cleared])
def test_each_element_is_written_once(call):
    compare(Call(call), [X])


SHARED = {
    "add": lambda y: y.expand(2, 3, 4).add_(1),
    "copy": lambda y: y[0].expand(3, 4).copy_(torch.ones(3, 4)),
    "item": lambda y: y[:1].expand(3, 4).__setitem__((slice(None), 0), 1.0),
    "scatter": lambda y: y.expand(2, 3, 4).scatter_(0, torch.zeros(1, 3, 4, dtype=torch.long), 1.0),
    "constant": lambda y: torch.zeros(4).expand(3, 4).add_(y),
    "strided": lambda y: y.as_strided((3, 2), (0, 1)).mul_(2),
}


@pytest.mark.parametrize("name", SHARED)
def test_elements_that_share_memory_are_refused_as_in_pytorch(name):
    """Code may catch the error, as it may there."""

    def call(x):
        y = x * 2
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor") as caught:
            SHARED[name](y)
        assert type(caught.value) is RuntimeError
        return y

    compare(Call(call), [X])


UNDEFINED = {
    "unfold": lambda y: y.unfold(1, 2, 1).add_(1),
    "as_strided": lambda y: y.as_strided((3, 2), (1, 1)).mul_(2),
    "fill": lambda y: y.expand(2, 3, 4).fill_(7.0),
    "zero": lambda y: y.expand(2, 3, 4).zero_(),
    "masked": lambda y: y.expand(2, 3, 4).masked_fill_(torch.tensor([True, False, True, False]), 1.0),
    "complex": lambda y: torch.view_as_real(torch.complex(y, y).expand(2, 3, 4))[0].add_(1),
}


@pytest.mark.parametrize("name", UNDEFINED)
def test_elements_that_share_memory_where_pytorch_goes_on(name):
    """Element after element, with a result that depends on their order."""

    def call(x):
        y = x * 2
        with contextlib.suppress(Exception):
            UNDEFINED[name](y)
        return y

    with pytest.raises(bridge.BridgeError, match=r"has no translation \(a write into elements that share memory"):
        bridge.export(Call(call))({}, {}, jnp.asarray(X.numpy()))


def test_a_tensor_of_which_the_state_is_a_part_is_refused():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.whole = torch.zeros(4)
            self.part = nn.Buffer(self.whole[:2])

        def forward(self, x):
            return x * self.whole.sum() + self.part.sum()

    fn = bridge.export(Part())
    with pytest.raises(bridge.BridgeError, match="shares memory with a parameter or buffer and reaches beyond it"):
        fn({}, fn.buffers, jnp.ones(2))
