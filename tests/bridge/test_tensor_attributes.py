"""Attributes of tensors and of parameters, and tensors made like others."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, Calls, compare, differentiated, in_jax, raises, randn, verified
from torch import nn

import bridge
from bridge.dispatch.constants import EMBEDDED

# ---- Attributes of a traced tensor besides its value: its place in PyTorch's graph, its class, its version

X = randn(3, 4)


def linear():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def answers(module, x):
    h = module(x)
    leaf = h.detach().requires_grad_()
    with torch.no_grad():
        k = module.weight * 1
    parameter = nn.Parameter(module.weight.detach())
    tensors = [x, x * 2, module.weight, module.weight.view(-1), module.weight.data, h, h.detach(), leaf, leaf[0]]
    tensors += [k, k * module.weight, parameter, torch.ones(3), torch.ones(3, requires_grad=True), h > 0]
    out = torch.zeros(3, 4)
    before = [(out.is_leaf, out.grad_fn is None, out.requires_grad)]
    out.copy_(h)
    return torch.tensor(before + [(t.is_leaf, t.grad_fn is None, t.requires_grad) for t in [*tensors, out]])


def kinds(module, x):
    said = [x.__class__ is torch.Tensor, isinstance(x, torch.Tensor), isinstance(x, nn.Parameter)]
    return torch.tensor([*said, module.weight.__class__ is nn.Parameter, isinstance(module.weight, nn.Parameter)])


def versions(module, x):
    """Writes that PyTorch counts: not those through `.data`, and a module's weights may have been written before."""
    y = x * 1
    seen = [y._version]
    y.data.mul_(3)
    seen += [y._version, y.data._version]
    y[0].mul_(2)
    y.detach().add_(1)
    seen += [y._version, y[1]._version, y.detach()._version]
    with torch.no_grad():
        y.copy_(x)
    y.data = x * 2
    return torch.tensor([*seen, y._version])


def clamped(ctx, x):
    ctx.mark_dirty(x)
    return x.clamp_(-1, 1)


Dirty = differentiated(clamped, lambda ctx, gradient: gradient)


def versions_of_dirty_tensors(module, x):
    """`mark_dirty` counts as a write, whether there is a gradient or not."""
    y = module(x)
    z = module(x).detach()
    places = torch.arange(3) * x.argmax()
    Dirty.apply(y)
    with torch.no_grad():
        Dirty.apply(z)
    Dirty.apply(places)
    return torch.tensor([y._version, z._version, places._version])


@pytest.mark.parametrize("call", [answers, kinds, versions, versions_of_dirty_tensors])
def test_what_code_asks_of_a_tensor(call):
    module = Call(call, linear())
    np.testing.assert_array_equal(in_jax(module, X), module(X).numpy())


def test_what_no_python_code_can_answer():
    """`type(x)` sees the class itself, and a print says that there are no numbers yet."""

    def call(module, x):
        return type(x) is torch.Tensor, type(module.weight) is nn.Parameter, [repr(x), str(module.weight)]

    *same_types, texts = in_jax(Call(call, linear()), X)
    assert same_types == [False, False]
    assert all("BridgeTensor(shape=" in text and "traced" in text for text in texts)


GRAPH = {
    "register_prehook": lambda h: h.grad_fn.register_prehook(lambda g: (g[0] * 3,)),
    "next_functions": lambda h: h.grad_fn.next_functions,
}


@pytest.mark.parametrize("name", GRAPH)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_node_of_pytorch_s_graph_is_refused(name, recorded):
    def call(module, x):
        h = module(x)
        if recorded:
            torch.autograd.grad(h.sum(), h, retain_graph=True)
        with contextlib.suppress(Exception):
            GRAPH[name](h)
        return h

    raises(rf"`grad_fn.{name}`.*test_tensor_attributes.py.*autograd.Function", Call(call, linear()), X)


def owners(m, x):
    """Asked before and after traced values are written."""
    state = m.buf[1]
    state.add_(x)
    said = [state._base is m.buf, state._is_view(), m.row._base is m.buf, m.row._is_view()]
    said += [m.w[0]._base is m.w, m.w.detach()._base is None, (x * 2)._is_view(), x._base is None]
    made = torch.zeros(3, 4)
    before = made[1]
    other = made.view(-1)[2:6].view(2, 2)
    said += [before._base is made, before._is_view()]
    other[0] += x[:2]
    said += [view._base is made for view in (before, other, made[2])]
    said += [before._is_view(), other._is_view(), made._is_view(), made._base is None]
    slot = torch.zeros(3, 4)[-1]
    slot.copy_(x)
    slot._base.sub_(1.0)
    return slot._base * 1, said


# ---- `grad` in a forward, and other attributes of parameters in a backward

MATRIX = randn(4, 6)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def assigned(m, x):
    weight = m[0].weight
    weight.grad = torch.ones(5, 6) if weight.grad is None else weight.grad.add_(1)
    return m(x)


def of_an_input(m, x):
    x.grad = x.detach() * 2
    return m(x)


@pytest.mark.parametrize("call", [assigned, of_an_input])
def test_assigned_in_forward(call):
    raises(r"`\.grad` of a parameter.* is assigned.*Remedy: ", Call(call, small()), MATRIX)


def norm(m, x):
    gradient = m[0].weight.grad
    return x if gradient is None else x * gradient.norm()


def accumulated(m, x):
    if m[0].weight.grad is not None:
        m[0].weight.grad.add_(1)
    return x


@pytest.mark.parametrize("call", [norm, accumulated])
def test_a_gradient_from_before_the_call(call):
    module = Call(call, small())
    fn = bridge.export(module)
    assert (fn(fn.params, fn.buffers, MATRIX.numpy())[0] == MATRIX.numpy()).all()
    module.module(MATRIX).sum().backward()
    with pytest.raises(bridge.BridgeError, match=r"uses the `\.grad` that PyTorch's engine has left on a parameter"):
        fn(fn.params, fn.buffers, MATRIX.numpy())


def reset(m, x):
    """Does `delta.grad.zero_()`, as attacks do, and `zero_grad` after it."""
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(2):
        (x.detach() * delta).sin().sum().backward()
        with torch.no_grad():
            delta += 0.1 * delta.grad.sign()
        delta.grad.zero_()
    m.zero_grad()
    return m(x + delta.detach())


def test_leaves_of_the_call_s_own():
    compare(Call(reset, small()), [MATRIX])


def scaled(m, x):
    """Sets an attribute like `main_grad`, which large-model code keeps on parameters."""

    def forward(ctx, x, w):
        x.scale = x.detach() * 2
        ctx.save_for_backward(x, w)
        return x * w

    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * x.scale, g * w.main_grad

    return differentiated(forward, backward).apply(x * 2, m.w)


def test_attributes_of_tensors():
    module = Calls(scaled, w=nn.Parameter(torch.tensor([1.5, -2.0])))
    module.w.main_grad = torch.tensor([3.0, 4.0])
    verified(module, torch.tensor([1.0, 0.5], requires_grad=True))


# ---- `torch.complex32` and other dtypes that JAX does not have: one error that names the dtype and what to do

NUMBERS = randn(3)
HALF = torch.complex32
WEIGHT = torch.ones(3, dtype=HALF)
WITHIN = r"a tensor is torch\.complex32, which JAX does not have in the .*, at .*Remedy: .*torch\.complex64"


def caught(x):
    with contextlib.suppress(Exception):
        return (x.half() * 1j).abs()
    return x


MADE = {
    "sum": lambda x: x.half() + 1j,
    "cast": lambda x: x.to(HALF).abs(),
    "like": lambda x: torch.zeros_like(x, dtype=HALF),
    "draws": lambda x: torch.randn(3, dtype=HALF) * x,
    "constant written": lambda x: torch.zeros(3, dtype=HALF).copy_(x).abs(),
    "in a try": caught,
}


@pytest.mark.parametrize("name", MADE)
def test_refused_in_a_call(name):
    MADE[name](NUMBERS)
    raises(WITHIN, MADE[name], NUMBERS, rng=jax.random.key(0))


Backward = differentiated(lambda ctx, x: x * 2, lambda ctx, gradient: (gradient.half() * 1j).abs().float())


def test_refused_in_a_backward_in_a_survey_and_for_other_dtypes():
    with pytest.raises(bridge.BridgeError, match="complex32, which JAX does not have"):
        jax.eval_shape(jax.grad(lambda x: in_jax(Backward.apply, x).sum()), NUMBERS.numpy())
    with pytest.raises(bridge.BridgeError, match=WITHIN):
        bridge.export(Call(MADE["sum"])).survey(jnp.ones(3))
    message = r"float8_e8m0fnu, which has no counterpart .*torch\.float32"
    raises(message, lambda x: x.to(torch.float8_e8m0fnu), NUMBERS)


def test_refused_as_state_as_an_argument_or_loaded_weight():
    parameter, buffer, right = (
        Calls(lambda m, x: (m.weight.to(torch.complex64) * x).abs(), weight=weight)
        for weight in (nn.Parameter(WEIGHT), nn.Buffer(WEIGHT), nn.Parameter(WEIGHT.to(torch.complex64)))
    )
    loaded = {"w": torch.eye(3), "weight": WEIGHT}
    for call in (
        lambda: bridge.export(parameter),
        lambda: bridge.export(buffer),
        lambda: bridge.verify(buffer, NUMBERS),
        lambda: bridge.verify(Call(lambda x: x.to(torch.complex64).abs()), WEIGHT),
        lambda: bridge.into(bridge.export(right), loaded),
    ):
        with pytest.raises(bridge.BridgeError, match=r"complex32, which JAX does not have.*torch\.complex64"):
            call()


def test_what_is_done_about_it():
    """Constants may have any dtype of PyTorch's."""
    compare(lambda x: (x.half().float() * 1j + torch.ones(3, dtype=HALF).to(torch.complex64)).abs(), [NUMBERS])


# ---- Tensors made by the shape of a traced one: the prototype that stands for it has no values of its own

SHAPE = EMBEDDED // 64 + 1, 64


@pytest.mark.parametrize("attempt", range(3))
def test_memory_that_was_used_before_is_not_read(attempt):
    """Wide integers were in it, which a constant of 32 bits would not hold."""

    def made(x):
        return torch.zeros_like(x), torch.ones_like(x) + x, x.new_full(x.shape, 3)

    x = np.ones(SHAPE, np.int32)
    for _ in range(3):
        used = torch.full(SHAPE, 2**55, dtype=torch.int64)
        del used
        lowered = jax.jit(lambda x: in_jax(made, x)).lower(x)
        assert f"dense<{2**55}>" not in lowered.as_text() and len(lowered.as_text()) < 3000
    zeros, twos, threes = lowered.compile()(x)
    assert (int(zeros.max()), int(twos.min()), int(threes.max())) == (0, 2, 3)
