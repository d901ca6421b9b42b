"""What a `torch.autograd.Function` keeps on its context: its backward gets it as in PyTorch, or is refused by name."""

import jax
import numpy as np
import pytest
import torch
from eager import Call
from torch import nn
from torch.autograd import Function

import bridge


def function(forward, backward):
    """`forward(ctx, *args)` and `backward(ctx, *gradients)` as a Function."""
    return type("Kept", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


def saving(forward):
    def run(ctx, *args):
        ctx.save_for_backward(*args)
        return forward(*args)

    return run


TO_COMPLEX = function(lambda ctx, x, w: torch.complex(x, w), lambda ctx, g: (g.real, g.imag))
SQUARE = function(saving(lambda z: z * z), lambda ctx, g: g * (2 * ctx.saved_tensors[0]).conj())
POWER = function(saving(lambda z: z.real**2 + z.imag**2), lambda ctx, g: g * 2 * ctx.saved_tensors[0])


def recomputed(ctx, g):
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
    with torch.enable_grad():
        result = (inputs[0] * inputs[1]).sin()
    torch.autograd.backward(result, g)
    return tuple(t.grad for t in inputs)


RECOMPUTED = function(saving(lambda x, w: (x * w).sin()), recomputed)
BROADCAST = function(
    saving(lambda x, w: x * w[:1]), lambda ctx, g: ((g * ctx.saved_tensors[1][:1]).expand(3, 2) / 3, g * 2)
)


def enclosing(x, w):
    """The backward encloses a tensor of the call, one in a tuple, and one that is written before."""
    factor, pair = x.detach().exp(), (w.detach() * 2, 3.0)
    with torch.no_grad():
        factor += 1
    made = function(lambda ctx, t: t * factor, lambda ctx, g: g * factor * pair[0] + pair[1])
    return made.apply(x * w) * made.apply(w)


RIGHT = {
    "tensors that the backward encloses": enclosing,
    "gradient of a wider shape": lambda x, w: BROADCAST.apply(x, w),
    "complex result": lambda x, w: TO_COMPLEX.apply(x, w).abs(),
    "complex input and result": lambda x, w: SQUARE.apply(torch.complex(x, w)).real,
    "complex input": lambda x, w: POWER.apply(torch.complex(x, w)),
    "flags of saved inputs": RECOMPUTED.apply,
}


class Weighted(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.w, self.call = nn.Parameter(torch.tensor([1.5, -2.0])), call
        self.register_buffer("statistic", torch.zeros(()))
        self.calls, self.log = 0, []

    def forward(self, x):
        return self.call(x, self.w) if self.call in RIGHT.values() else self.call(self, x * self.w)


X = torch.tensor([1.0, 0.5])


@pytest.mark.parametrize("name", RIGHT)
def test_values_and_gradients(name):
    report = bridge.verify(Weighted(RIGHT[name]), X.clone().requires_grad_())
    assert report.ok, report


def keep(**contents):
    """A forward that puts `name(x, argument)` on the context."""

    def forward(ctx, x, argument=None):
        for name, make in contents.items():
            setattr(ctx, name, make(x, argument))
        return x * 1

    return forward


def twice(x, argument):
    with torch.enable_grad():
        return torch.exp(x.detach().requires_grad_())


def count(ctx, g):
    ctx.module.calls += 1
    return g, None


def write(ctx, g):
    ctx.statistic.mul_(0.9).add_(g.abs().mean())
    return g, None


class Box:
    def __init__(self, value):
        self.value = value


COUNT = function(keep(module=lambda x, m: m), count)
APPEND = function(keep(module=lambda x, m: m), lambda ctx, g: ctx.module.log.append(g) or (g, None))
WRITE = function(keep(statistic=lambda x, s: s), write)
SCALE = function(keep(settings=lambda x, s: s), lambda ctx, g: (g * ctx.settings["scale"], None))
CLOSURE = function(keep(run=lambda x, _: lambda g: g * x.cos()), lambda ctx, g: ctx.run(g))
VJP = function(keep(run=lambda x, _: torch.func.vjp(torch.sin, x)[1]), lambda ctx, g: ctx.run(g)[0])
BOX = function(keep(box=lambda x, _: Box(x)), lambda ctx, g: g * ctx.box.value)
GRAPH = function(keep(x=lambda x, _: x, y=twice), lambda ctx, g: torch.autograd.grad(ctx.y, ctx.x, g)[0])
COMPLEX = function(keep(), lambda ctx, g: g * 1j)
DRAWS = function(keep(), lambda ctx, g: g * torch.rand_like(g))


TIMES = function(keep(factor=lambda x, s: s), lambda ctx, g: (g * ctx.factor, None))
EXP = function(lambda ctx, x: setattr(ctx, "y", x.exp()) or ctx.y, lambda ctx, g: g * ctx.y)


def closing_over(m):
    return function(keep(), lambda ctx, g: g * m.statistic)


def then(write, call):
    """`call(m, x)`, and `write` of the tensor that it gives beside the result."""

    def run(m, x):
        y, tensor = call(m, x)
        with torch.no_grad():
            write(tensor)
        return y

    return run


def add_one(tensor):
    tensor.add_(1)


def written(m, x):
    return then(add_one, lambda m, x: (TIMES.apply(x, m.statistic), m.statistic))(m, x)


def written_in_a_closure(m, x):
    return then(add_one, lambda m, x: (closing_over(m).apply(x), m.statistic))(m, x)


def result_written(m, x):
    y = EXP.apply(x)
    y += 1
    return y


def changed_later(m, x):
    settings = {"scale": 2.0}
    y = SCALE.apply(x, settings)
    settings["scale"] = 5.0
    return y


REFUSED = {
    "attribute": (lambda m, x: COUNT.apply(x, m), "the backward of Kept changes ctx.module.calls, which would be lost"),
    "buffer": (lambda m, x: WRITE.apply(x, m.statistic), "the backward of Kept changes a parameter or buffer"),
    "list of a module": (
        lambda m, x: APPEND.apply(x, m),
        "the backward of Kept changes ctx.module.log, which would be",
    ),
    "closure": (lambda m, x: CLOSURE.apply(x), "a traced tensor inside of an object or a function, at ctx.run.x"),
    "vjp": (lambda m, x: VJP.apply(x), "a traced tensor inside of an object or a function, at ctx.run"),
    "object": (lambda m, x: BOX.apply(x), "a traced tensor inside of an object or a function, at ctx.box.value"),
    "graph": (lambda m, x: GRAPH.apply(x), "the backward of Kept differentiates what was computed before it"),
    "complex": (lambda m, x: COMPLEX.apply(x), "the backward of Kept gave a complex gradient for a real input"),
    "draws": (lambda m, x: DRAWS.apply(x), "draws random numbers in the backward of a torch.autograd.Function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    call, message = REFUSED[name]
    fn = bridge.export(Weighted(call))
    with pytest.raises(bridge.BridgeError, match=message):
        jax.grad(lambda p: fn(p, fn.buffers, X.numpy(), rng=jax.random.key(0))[0].sum())(fn.params)


def assigned(m, x):
    y = TIMES.apply(x, m.statistic)
    m.statistic = m.statistic + 1
    return y


def not_read(m, x):
    y = function(keep(factor=lambda x, s: s), lambda ctx, g: (g * 2, None)).apply(x, m.statistic)
    m.statistic.add_(1)
    return y


def of_a_copy(m, x):
    y = TIMES.apply(x, m.statistic.clone())
    m.statistic.add_(1)
    return y


@pytest.mark.parametrize("call", [assigned, not_read, of_a_copy])
def test_what_is_written_later_and_not_read_by_the_backward(call):
    module = Weighted(call)
    module.statistic.fill_(0.5)
    report = bridge.verify(module, X.clone().requires_grad_(), steps=2)
    assert report.ok, report


@pytest.mark.parametrize("call", [changed_later, written, written_in_a_closure, result_written])
def test_what_is_written_later_and_read_by_the_backward_is_seen_by_verify(call):
    try:
        report = bridge.verify(Weighted(call), X.clone().requires_grad_())
    except RuntimeError as error:  # PyTorch refuses it itself
        assert "modified by an inplace operation" in str(error)
    else:
        assert not report.ok


def test_differences_by_nature():
    """docs/bridge.md lists these, too."""
    seen = []
    flags = function(
        keep(), lambda ctx, g, *_: seen.append((ctx.needs_input_grad[1], torch.is_grad_enabled())) or (g, None)
    )
    module = Weighted(lambda m, x: flags.apply(x, m.statistic))
    module(X).sum().backward()
    fn = bridge.export(module)
    jax.grad(lambda p: fn(p, fn.buffers, X.numpy())[0].sum())(fn.params)
    assert seen == [(False, False), (True, True)]


# ---- operations that read what they write


def sums(x):
    y = x * 1
    y[:, 1:] += y[:, :-1]
    return y


def shifted(x):
    y = x * 1
    y[1:] = y[:-1]
    return y


def allowed(x):
    y = x * 1
    y[0] += y[0]
    y[:, 0], y[:, 1] = y[:, 1] * 2, y[:, 0] * 3
    y.view(-1).mul_(y.view(-1))
    y[:2] += y[2:]
    return y


def test_an_operation_that_reads_what_it_writes():
    x = torch.arange(20.0).view(4, 5)
    with pytest.raises(bridge.BridgeError, match="it reads elements that it writes, so that their order counts"):
        bridge.export(Call(sums))({}, {}, x.numpy())
    for side in (Call(shifted), lambda x: bridge.export(Call(shifted))({}, {}, x.numpy())):
        with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer to"):
            side(x)
    np.testing.assert_array_equal(bridge.export(Call(allowed))({}, {}, x.numpy())[0], allowed(x).numpy())
