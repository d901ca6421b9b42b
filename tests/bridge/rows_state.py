"""Rows of the table of meanings: parameters and buffers in all their forms, and random numbers."""

import warnings

import torch
import torch.nn.functional as F
from rows_registry import meaning, row, two_weights, weighted
from torch import nn

# ---- state


@row(lambda: {"norm": nn.BatchNorm1d(4), "out": nn.Linear(4, 3)}, (6, 4), steps=3)
def batch_norm(m, x):
    return m.out(torch.relu(m.norm(x)))


@row(
    lambda: {
        "batch": nn.BatchNorm1d(4, track_running_stats=False),
        "instance": nn.InstanceNorm1d(3, track_running_stats=True, affine=True),
    },
    (6, 4),
    steps=2,
)
def batch_norm_of_the_batch_alone(m, x):
    """Batch norm without running statistics, and instance norm with them."""
    return m.instance(m.batch(x).view(2, 3, 4))


def buffers_of_all_kinds():
    written = nn.Buffer(torch.zeros((), dtype=torch.int64))
    assigned = nn.Buffer(torch.zeros(()))
    scratch = nn.Buffer(torch.ones(4), persistent=False)
    still = nn.Buffer(torch.ones(2))
    return {"written": written, "assigned": assigned, "scratch": scratch, "still": still}


@row(buffers_of_all_kinds, steps=3)
def counters(m, x):
    """Buffers written in place, assigned anew, non-persistent, and one that nobody touches."""
    m.written += 1
    m.assigned = m.assigned * 0.5 + x.detach().mean()
    with torch.no_grad():
        m.scratch[1:] = x[0, 1:]
    return x * m.assigned + m.written


@row(lambda: {"a": nn.Parameter(torch.randn(4, 4), requires_grad=False), "b": nn.Parameter(torch.randn(4, 4))})
def frozen(m, x):
    return torch.tanh(x @ m.a) @ m.b


def leaves():
    scale = torch.randn(4, requires_grad=True)
    shift = torch.randn(4, requires_grad=True)
    return {"scale": nn.Buffer(scale), "shift": nn.Buffer(shift, persistent=False)}


@row(leaves)
def leaf_buffer(m, x):
    """A buffer that requires grad is a parameter in all but name."""
    return torch.tanh(x * m.scale) + m.shift


@row(lambda: {"a": nn.Parameter(torch.randn(4, 4)), "table": nn.Embedding(5, 4, max_norm=1.0)}, steps=2)
def parameter_renormalised(m, x):
    """Parameters that their module writes: directly, and inside an embedding with a largest norm."""
    with torch.no_grad():
        m.a.mul_(1.5).div_(m.a.norm().sqrt())
    return x @ m.a + m.table(torch.tensor([1, 1, 3]))


def weights_and_state():
    hidden = nn.Buffer(torch.full((3, 4), 0.5))
    cell = nn.Buffer(torch.ones(3, 4), persistent=False)
    return two_weights() | {"hidden": hidden, "cell": cell}


@row(weights_and_state, steps=2, spans_calls=True)
def state_with_graph(m, x):
    """A hidden state in a buffer: after several calls, the gradient goes back through all of them."""
    m.hidden = torch.tanh(x @ m.a + m.hidden @ m.b)
    m.cell.mul_(0.5).add_(m.hidden)
    return m.hidden * 1 + m.cell.exp()


@meaning((3, 4))
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Slotted:
    """An object that a call does not copy."""

    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


@meaning((3, 4))
class WeightKeptElsewhere(nn.Module):
    """Parameters reached by another way than the attribute they are registered under."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.everything = [self.linear.weight, self.linear.bias]
        self.top = self.linear.weight[:2]
        self.top_values = self.linear.weight.data[:2]
        self.call, self.slotted = self.linear.forward, Slotted(self.linear.weight)

    def forward(self, x):
        x = F.linear(x, self.slotted.tensor)
        return self.call(x) + F.linear(x, *self.everything) + (x @ self.top.t()).sum() + self.top_values.sum()

    def __deepcopy__(self, memo):
        other = type(self)()
        with torch.no_grad():
            other.linear.weight.copy_(self.linear.weight)
            other.linear.bias.copy_(self.linear.bias)
        return other


@row(lambda: {"linear": torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))})
def weight_norm(m, x):
    return m.linear(x)


@meaning((3, 4))
class WeightNormByHook(nn.Module):
    def __init__(self):
        super().__init__()
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            self.linear = torch.nn.utils.weight_norm(nn.Linear(4, 3))

    def forward(self, x):
        return self.linear(x)

    def __deepcopy__(self, memo):  # PyTorch itself cannot copy one whose hook has run
        other = type(self)()
        other.load_state_dict(self.state_dict())
        return other


@meaning((3, 4), steps=2)
class SpectralNorm(nn.Module):
    """A parametrization that writes buffers of its own while training."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
        for vector in self.linear.parametrizations.weight.buffers():  # it starts out converged
            vector.copy_(F.normalize(torch.randn_like(vector), dim=0))

    def forward(self, x):
        return self.linear(x)


# ---- randomness


@row(lambda: {"linear": nn.Linear(8, 8)}, (64, 8))
def dropout(m, x):
    return F.dropout(m.linear(x), 0.4, m.training)


def dropouts():
    last = nn.AlphaDropout(0.2), nn.Dropout(0.3, inplace=True)
    return {"layers": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Dropout1d(0.5), *last)}


@row(dropouts, (2, 3, 4))
def dropout_of_every_kind(m, x):
    return m.layers(x)


@weighted((8, 4))
def every_draw(m, x):
    noise = torch.rand_like(x) + torch.randn(8, 4) + torch.rand(4) + torch.normal(0.0, 1.0, (8, 4))
    noise = noise + torch.randint(0, 5, (8, 4)) + torch.bernoulli(torch.full((8, 4), 0.3))
    noise = noise + torch.empty(8, 4).uniform_(-1, 1) + torch.empty(8, 4).normal_() + torch.randperm(4)
    noise = noise + torch.empty(8, 4).exponential_() + torch.multinomial(torch.ones(8, 6), 4)
    return (x @ m.a) * noise + torch.randint_like(x, 2, 5) * m.b[0]


@row(lambda: two_weights() | {"generator": torch.Generator()})
def generators(m, x):
    """Draws from generators that the call seeds, the module's own and those made on the way; in place too."""
    m.generator.manual_seed(1)
    other = torch.Generator().manual_seed(3)
    noise = torch.rand(3, 4, generator=m.generator) + torch.randn(3, 4, generator=m.generator)
    noise = noise + torch.randperm(4, generator=other) + torch.randint(0, 5, (3, 4), generator=other)
    noise = noise + torch.empty(3, 4).normal_(generator=other) + torch.empty(3, 4).random_(7, generator=other)
    noise = noise + torch.bernoulli(torch.full((3, 4), 0.5), generator=other)
    return x @ m.a * (noise + torch.multinomial(torch.ones(3, 6), 4, generator=other))


@weighted((8, 4))
def draws_inside_no_grad(m, x):
    """Exploration: numbers drawn where gradients are off decide what is used where they are on."""
    h = x @ m.a
    with torch.no_grad():
        explore = torch.rand_like(h[:, 0]) < 0.5
        noise = h + torch.randn_like(m.a).sum() + h.new_empty(8, 4).bernoulli_(0.5)
    return torch.where(explore.unsqueeze(-1), h * noise, h @ m.b)


class Noise(nn.Module):
    """A module for `ShardedKey`, not a row: it draws for each row of a split batch, and for each replica."""

    def forward(self, x):
        return torch.rand_like(x), torch.rand(3), torch.randint_like(x, 0, 1000), torch.poisson(x.exp() * 1e4)
