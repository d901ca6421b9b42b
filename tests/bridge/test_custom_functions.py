"""`torch.autograd.Function`: its methods, its context, and what both keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import TRANSFORMS, Call, Calls, array, compare, composes, differentiated, gradients, in_jax, raises, verified
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import bridge
from bridge._compat.torch import Replacements
from bridge.module import modes

# ---- `torch.autograd.Function`: the gradient is its backward's, whatever its forward does


class Reversed(Function):
    """Passes its input on; its gradient is reversed and scaled by a number, as in adversarial training."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.scale * grad, None


class Gate(Function):
    """A function with two inputs, two outputs, saved tensors of all three kinds, and one output without gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        hidden = x * 3
        out = torch.tanh(x * weight)
        index = (x > 0).to(torch.float32)
        ctx.save_for_backward(x, weight, out, hidden)
        ctx.mark_non_differentiable(index)
        return out, index

    @staticmethod
    def backward(ctx, grad, _):
        _, weight, out, hidden = ctx.saved_tensors
        slope = grad * (1 - out * out)
        assert ctx.needs_input_grad == (True, True)
        return slope * weight * 2, (slope * hidden).sum(0)


class WithSetup(Function):
    """The newer form, whose forward has no context."""

    @staticmethod
    def forward(x, power=2):
        return x**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.power = inputs
        ctx.save_for_backward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.power * x ** (ctx.power - 1) * 5, None


def doubled_in_place(ctx, x):
    ctx.mark_dirty(x)
    return x.mul_(2)


STRAIGHT_THROUGH = differentiated(lambda ctx, x: x.round(), lambda ctx, grad: grad)
IN_PLACE = differentiated(doubled_in_place, lambda ctx, grad: 7 * grad)


class Written(Function):
    """The results are tensors that no operation on traced ones made: they were written into, or are constant."""

    @staticmethod
    def forward(ctx, x):
        out = torch.zeros(3, 4)
        kept = torch.zeros(3, 4)
        sign = torch.zeros(3, 4)
        out.copy_(x * x)
        kept.copy_(x.exp())
        torch.sign(x, out=sign)
        ctx.save_for_backward(kept)
        ctx.again = out
        ctx.mark_non_differentiable(sign)
        return out, sign, torch.ones(2)

    @staticmethod
    def backward(ctx, grad, of_sign, of_ones):
        made = torch.zeros(3, 4)
        made.copy_(grad * ctx.saved_tensors[0] + ctx.again)
        return made * of_ones.sum()


def written(x, _):
    out, sign, ones = Written.apply(x)
    return (out * sign).sum() + (ones * x[:2, :1].T).sum() * 3


def in_place(x, _):
    y = x + 1
    z = IN_PLACE.apply(y)
    return (y * z).sum()


def under_no_grad(x, _):
    with torch.no_grad():
        y = STRAIGHT_THROUGH.apply(x)
    return y * x


early = STRAIGHT_THROUGH.apply  # a reference taken before anything is traced

CALLS = {
    "reversed": lambda x, _: Reversed.apply(x, 0.5),
    "straight through": lambda x, _: early(x) * x,
    "saved tensors": lambda x, w: Gate.apply(x, w)[0] + Gate.apply(x, w)[1],
    "setup_context": lambda x, _: WithSetup.apply(x, 3) + WithSetup.apply(x),
    "in place": in_place,
    "under no_grad": under_no_grad,
    "written": written,
    "one after another": lambda x, _: Reversed.apply(STRAIGHT_THROUGH.apply(Reversed.apply(x, 2.0)), 3.0),
}
X = torch.linspace(-2, 2, 12).reshape(3, 4)


def weighted(call):
    weight = nn.Parameter(torch.linspace(-1, 1, 4))
    return Calls(lambda m, x: call(x * m.weight, m.weight) + m.w.sum(), weight=weight)


@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_pytorchs(name):
    verified(weighted(CALLS[name]), X.clone().requires_grad_(), tolerance=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_composes(transform):
    composes(transform, weighted(CALLS["saved tensors"]), X[:, None])


def test_second_derivatives():
    """Through the saved input and the saved output."""

    def forward(ctx, x):
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    square = differentiated(forward, lambda ctx, grad: grad * (2 * ctx.saved_tensors[0] + ctx.saved_tensors[1]))
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    (slope,) = torch.autograd.grad(square.apply(x).sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x)
    fn = bridge.export(Call(lambda x: square.apply(x).sum()))
    first = jax.grad(lambda x: fn({}, {}, x)[0])
    second = jax.grad(lambda x: first(x).sum())(array(x.detach()))
    np.testing.assert_allclose(second, curve.detach(), rtol=1e-5, atol=1e-6)


def keep_and_mark(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[1])


TWO_RESULTS = differentiated(
    lambda x: (x.sin(), x.abs()),
    lambda ctx, grad, other: ctx.saved_tensors[0].cos() * grad + other,
    setup_context=keep_and_mark,
    generate_vmap_rule=True,
)
"""The second result is marked, which PyTorch's engine overlooks under `torch.vmap`."""


def test_marks_under_a_generated_rule_for_vmap():
    compare(lambda x: torch.vmap(TWO_RESULTS.apply)(x), [X])


def test_the_rule_is_needed(monkeypatch):
    """PyTorch's own `apply` runs without the rule."""
    monkeypatch.setattr(modes, "_REPLACED", Replacements())
    report = bridge.verify(weighted(CALLS["reversed"]), X.clone().requires_grad_(), tolerance=1e-5)
    assert not report.ok


# ---- Values on the context of a `torch.autograd.Function`: the backward gets them as in PyTorch, or they are refused


def saving(forward):
    def run(ctx, *args):
        ctx.save_for_backward(*args)
        return forward(*args)

    return run


TO_COMPLEX = differentiated(lambda ctx, x, w: torch.complex(x, w), lambda ctx, g: (g.real, g.imag))
SQUARE = differentiated(saving(lambda z: z * z), lambda ctx, g: g * (2 * ctx.saved_tensors[0]).conj())
POWER = differentiated(saving(lambda z: z.real**2 + z.imag**2), lambda ctx, g: g * 2 * ctx.saved_tensors[0])


def recomputed(ctx, g):
    inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
    with torch.enable_grad():
        result = (inputs[0] * inputs[1]).sin()
    torch.autograd.backward(result, g)
    return tuple(t.grad for t in inputs)


RECOMPUTED = differentiated(saving(lambda x, w: (x * w).sin()), recomputed)
BROADCAST = differentiated(
    saving(lambda x, w: x * w[:1]), lambda ctx, g: ((g * ctx.saved_tensors[1][:1]).expand(3, 2) / 3, g * 2)
)


def enclosing(x, w):
    """The backward encloses a tensor of the call, one in a tuple, and one that is written before."""
    factor = x.detach().exp()
    pair = (w.detach() * 2, 3.0)
    with torch.no_grad():
        factor += 1
    made = differentiated(lambda ctx, t: t * factor, lambda ctx, g: g * factor * pair[0] + pair[1])
    return made.apply(x * w) * made.apply(w)


RIGHT = {
    "tensors that the backward encloses": enclosing,
    "gradient of a wider shape": lambda x, w: BROADCAST.apply(x, w),
    "complex result": lambda x, w: TO_COMPLEX.apply(x, w).abs(),
    "complex input and result": lambda x, w: SQUARE.apply(torch.complex(x, w)).real,
    "complex input": lambda x, w: POWER.apply(torch.complex(x, w)),
    "flags of saved inputs": RECOMPUTED.apply,
}


@pytest.mark.parametrize("name", RIGHT)
def test_values_and_gradients(name):
    compare(RIGHT[name], [torch.tensor([1.0, 0.5]), torch.tensor([1.5, -2.0])])


def keep(**contents):
    """Returns a forward that puts `name(x, argument)` on the context."""

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


COUNT = differentiated(keep(module=lambda x, m: m), count)
WRITE = differentiated(keep(statistic=lambda x, s: s), write)
SCALE = differentiated(keep(settings=lambda x, s: s), lambda ctx, g: (g * ctx.settings["scale"], None))
CLOSURE = differentiated(keep(run=lambda x, _: lambda g: g * x.cos()), lambda ctx, g: ctx.run(g))
VJP = differentiated(keep(run=lambda x, _: torch.func.vjp(torch.sin, x)[1]), lambda ctx, g: ctx.run(g)[0])
GRAPH = differentiated(keep(x=lambda x, _: x, y=twice), lambda ctx, g: torch.autograd.grad(ctx.y, ctx.x, g)[0])
COMPLEX = differentiated(keep(), lambda ctx, g: g * 1j)
DRAWS = differentiated(keep(), lambda ctx, g: g * torch.rand_like(g))
WRONG_SHAPE = differentiated(keep(), lambda ctx, g: g.sum())
TOO_FEW = differentiated(keep(), lambda ctx, g: g)
TIMES = differentiated(keep(factor=lambda x, s: s), lambda ctx, g: (g * ctx.factor, None))
EXP = differentiated(lambda ctx, x: setattr(ctx, "y", x.exp()) or ctx.y, lambda ctx, g: g * ctx.y)


def written_later(m, x):
    y = TIMES.apply(x, m.statistic)
    m.statistic.add_(1)
    return y


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
    "attribute": (lambda m, x: COUNT.apply(x, m), "of Differentiated changes ctx.module.calls, which would be lost"),
    "buffer": (lambda m, x: WRITE.apply(x, m.statistic), "of Differentiated changes a parameter or buffer"),
    "closure": (lambda m, x: CLOSURE.apply(x), "a traced tensor inside of an object or a function, at ctx.run.x"),
    "vjp": (lambda m, x: VJP.apply(x), "a traced tensor inside of an object or a function, at ctx.run"),
    "graph": (lambda m, x: GRAPH.apply(x), "of Differentiated differentiates what was computed before it"),
    "complex": (lambda m, x: COMPLEX.apply(x), "of Differentiated gave a complex gradient for a real input"),
    "wrong shape": (lambda m, x: WRONG_SHAPE.apply(x), r"backward of Differentiated gave a gradient of shape \(\)"),
    "too few": (lambda m, x: TOO_FEW.apply(1.0 * x, x), "of Differentiated gave 1 of 2 gradients; return one for each"),
    "none": (lambda m, x: differentiated(keep(), lambda ctx, g: ()).apply(x), "gave 0 of 1 gradients"),
    "draws": (lambda m, x: DRAWS.apply(x), "draws random numbers in the backward of a torch.autograd.Function"),
}
ROW = torch.tensor([1.0, 0.5, 2.0])


def stateful(call, statistic=0.0):
    return Calls(lambda m, x: call(m, x * m.w), statistic=nn.Buffer(torch.tensor(statistic)), calls=0)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    call, message = REFUSED[name]
    with pytest.raises(bridge.BridgeError, match=message):
        gradients(stateful(call), ROW, rng=jax.random.key(0))


def assigned(m, x):
    y = TIMES.apply(x, m.statistic)
    m.statistic = m.statistic + 1
    return y


def not_read(m, x):
    y = differentiated(keep(factor=lambda x, s: s), lambda ctx, g: (g * 2, None)).apply(x, m.statistic)
    m.statistic.add_(1)
    return y


def of_a_copy(m, x):
    y = TIMES.apply(x, m.statistic.clone())
    m.statistic.add_(1)
    return y


@pytest.mark.parametrize("call", [assigned, not_read, of_a_copy])
def test_what_is_written_later_and_not_read_by_the_backward(call):
    verified(stateful(call, 0.5), ROW.clone().requires_grad_(), steps=2)


@pytest.mark.parametrize("call", [changed_later, written_later, result_written])
def test_what_is_written_later_and_read_by_the_backward_is_seen_by_verify(call):
    try:
        report = bridge.verify(stateful(call), ROW.clone().requires_grad_())
    except RuntimeError as error:  # PyTorch refuses it itself
        assert "modified by an inplace operation" in str(error)
    else:
        assert not report.ok


def test_differences_by_nature():
    """docs/bridge.md lists these, too."""
    seen = []
    flags = differentiated(
        keep(), lambda ctx, g, *_: seen.append((ctx.needs_input_grad[1], torch.is_grad_enabled())) or (g, None)
    )
    module = stateful(lambda m, x: flags.apply(x, m.statistic))
    module(ROW).sum().backward()
    gradients(module, ROW)
    assert seen == [(False, False), (False, True)]


def test_what_is_computed_of_constants_and_buffers_alone_needs_no_gradient():
    """Functions raise an error for an argument that needs one, or take another formula."""
    seen = []

    def forward(ctx, *given):
        seen.append(ctx.needs_input_grad)
        return sum(given)

    def backward(ctx, gradient):
        seen.append(ctx.needs_input_grad)
        return None, None, None, gradient, gradient

    function = differentiated(forward, backward)
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    module = Calls(
        lambda m, x: function.apply(m.table, m.buffer, (m.buffer * m.table)[0] + m.frozen, m.buffer + x, m.w),
        table=torch.ones(3, 3),
        buffer=nn.Buffer(torch.eye(3)),
        frozen=frozen,
    )
    compare(module, [torch.ones(3, 3)])
    assert set(seen) == {(False, False, False, True, True)}
    fn = bridge.export(module)
    calls = len(seen)
    jax.grad(lambda buffers: fn(fn.params, buffers, jnp.ones((3, 3)))[0].sum())(fn.buffers)
    assert seen[calls:] == [(False, True, True, True, True)] * 2  # JAX was asked for the gradients of buffers


# ---- a backward that runs twice, and one that is registered for an operation of `torch.library`


def test_a_backward_that_freezes_a_weight_runs_again():
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        w.requires_grad_(False)
        return g * w, g * x

    apply = differentiated(lambda ctx, x, w: (ctx.save_for_backward(x, w), x * w)[1], backward).apply
    fn = bridge.export(Calls(lambda m, x: apply(x, m.w)))
    _, vjp = jax.vjp(lambda params: fn(params, {}, jnp.full((3, 3), 2.0))[0], fn.params)
    for _ in range(2):
        np.testing.assert_array_equal(vjp(jnp.ones((3, 3)))[0]["w"], np.full((3, 3), 2.0))


@torch.library.custom_op("tests_bridge::rounded", mutates_args=())
def rounded(x: torch.Tensor, others: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    return torch.round(x * scale) + others[0]


def _setup(ctx, inputs, output):
    ctx.scale = inputs[2]
    ctx.save_for_backward(output)


rounded.register_fake(lambda x, others, scale=1.0: torch.empty_like(x))
rounded.register_autograd(
    lambda ctx, g: (g * ctx.scale * ctx.saved_tensors[0], [3 * g], None), setup_context=_setup
)  # of round, another one


def test_an_operation_of_a_library_keeps_its_backward_beside_a_lowering(monkeypatch):
    def lowering(x, others, scale=1.0):
        return jnp.round(x * scale) + others[0]

    module = Calls(lambda m, x: rounded(m.w * x, [x], 2.0))
    monkeypatch.setitem(bridge.LOWERINGS, torch.ops.tests_bridge.rounded.default, lowering)
    verified(module, torch.tensor([1.3, -0.4, 2.9]))
    monkeypatch.undo()
    fn = bridge.export(module, lowerings={torch.ops.tests_bridge.rounded.default: lowering})
    x = jnp.asarray([1.3, -0.4, 2.9])
    module(torch.tensor([1.3, -0.4, 2.9])).sum().backward()
    ours = jax.jit(jax.grad(lambda params: fn(params, {}, x)[0].sum()))(fn.params)
    np.testing.assert_allclose(ours["w"], module.w.grad)


@torch.library.custom_op("tests_bridge::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)


def test_an_operation_without_a_backward_has_that_of_its_lowering():
    lowerings = {torch.ops.tests_bridge.doubled.default: lambda x: 2 * x}
    fn = bridge.export(Calls(lambda m, x: doubled(m.w * x)), lowerings=lowerings)
    ours = jax.jit(jax.grad(lambda params: fn(params, {}, jnp.asarray([1.5, -2.0, 3.0]))[0].sum()))(fn.params)
    np.testing.assert_allclose(ours["w"], np.tile([3.0, -4.0, 6.0], (3, 1)))


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
    raises("it reads elements that it writes, so that their order counts", sums, x)
    for side in (shifted, lambda x: in_jax(shifted, x)):
        with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor refer to"):
            side(x)
    np.testing.assert_array_equal(in_jax(allowed, x), allowed(x).numpy())
