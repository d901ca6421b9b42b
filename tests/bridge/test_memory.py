"""Memory as PyTorch has it: strides, offsets, and several state tensors over one storage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
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
