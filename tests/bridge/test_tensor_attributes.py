"""Attributes of tensors and of parameters, and tensors made like others."""

import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, compare, randn, verified
from torch import nn
from torch.autograd import Function

import bridge
from bridge.dispatch.constants import EMBEDDED

# ---- What Python code asks of a traced tensor besides its value: its place in PyTorch's graph, its class, its version

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
    return torch.tensor([(t.is_leaf, t.grad_fn is None, t.requires_grad) for t in tensors])


def written(module, x):
    out = torch.zeros(3, 4)
    before = out.is_leaf, out.grad_fn is None
    out.copy_(module(x))
    return torch.tensor([before, (out.is_leaf, out.grad_fn is None)])


def kinds(module, x):
    return torch.tensor(
        [
            x.__class__ is torch.Tensor,
            module.weight.__class__ is nn.Parameter,
            isinstance(x, nn.Parameter),
            isinstance(module.weight, nn.Parameter),
            isinstance(x, torch.Tensor),
        ]
    )


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


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.clamp_(-1, 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def versions_of_dirty_tensors(module, x):
    """`mark_dirty` counts as a write, whether there is a gradient or not."""
    y, z, places = module(x), module(x).detach(), torch.arange(3) * x.argmax()
    Dirty.apply(y)
    with torch.no_grad():
        Dirty.apply(z)
    Dirty.apply(places)
    return torch.tensor([y._version, z._version, places._version])


@pytest.mark.parametrize("call", [answers, written, kinds, versions, versions_of_dirty_tensors])
def test_what_code_asks_of_a_tensor(call):
    fn = bridge.export(Call(call, linear()))
    np.testing.assert_array_equal(fn(fn.params, fn.buffers, jnp.asarray(X.numpy()))[0], call(linear(), X).numpy())


def test_what_no_python_code_can_answer():
    """`type(x)` sees the class itself, and a print says that there are no numbers yet."""
    seen = queue.SimpleQueue()  # a list would be empty again after the call

    def call(module, x):
        seen.put((type(x) is torch.Tensor, type(module.weight) is nn.Parameter, repr(x), str(module.weight)))
        return x

    fn = bridge.export(Call(call, linear()))
    fn(fn.params, fn.buffers, jnp.ones((3, 4)))
    *same_types, x_text, weight_text = seen.get()
    assert same_types == [False, False]
    assert all("BridgeTensor(shape=" in text and "traced" in text for text in (x_text, weight_text))


GRAPH = {
    "register_prehook": lambda h: h.grad_fn.register_prehook(lambda g: (g[0] * 3,)),
    "register_hook": lambda h: h.grad_fn.register_hook(lambda i, o: None),
    "next_functions": lambda h: h.grad_fn.next_functions,
    "name": lambda h: h.grad_fn.name(),
}


@pytest.mark.parametrize("name", GRAPH)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_node_of_pytorch_s_graph_is_refused(name, recorded):
    def call(module, x):
        h = module(x)
        if recorded:
            torch.autograd.grad(h.sum(), h, retain_graph=True)
        try:
            GRAPH[name](h)
        except Exception:
            return x
        return h

    fn = bridge.export(Call(call, linear()))
    with pytest.raises(bridge.BridgeError, match=rf"`grad_fn.{name}`.*test_tensor_attributes.py.*autograd.Function"):
        fn(fn.params, fn.buffers, jnp.ones((3, 4)))


class Views(nn.Module):
    """Which tensor owns the memory of a view, asked before and after traced values are written."""

    def __init__(self):
        super().__init__()
        self.buf = nn.Buffer(torch.zeros(3, 4))
        self.row = nn.Buffer(self.buf[0])
        self.w = nn.Parameter(torch.ones(3, 4))

    def forward(self, x):
        state = self.buf[1]
        state.add_(x)
        said = [state._base is self.buf, state._is_view(), self.row._base is self.buf, self.row._is_view()]
        said += [self.w[0]._base is self.w, self.w.detach()._base is None, (x * 2)._is_view(), x._base is None]
        made = torch.zeros(3, 4)
        before, other = made[1], made.view(-1)[2:6].view(2, 2)
        said += [before._base is made, before._is_view()]
        other[0] += x[:2]
        said += [view._base is made for view in (before, other, made[2])]
        said += [before._is_view(), other._is_view(), made._is_view(), made._base is None]
        slot = torch.zeros(3, 4)[-1]
        slot.copy_(x)
        assert slot._base is not None
        slot._base.sub_(1.0)
        return slot._base * 1, said


def test_which_tensor_owns_the_memory():
    module, x = Views(), torch.arange(4.0)
    fn = bridge.export(module)
    (ours, said), _ = fn(fn.params, fn.buffers, jnp.asarray(x.numpy()))
    theirs, expected = module(x)
    assert said == expected
    np.testing.assert_array_equal(ours, theirs.detach())


# ---- `grad` in a forward, and other attributes of parameters in a backward

MATRIX = randn(4, 6)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))


def assigned(m, x):
    m[0].weight.grad = torch.ones(5, 6)
    return m(x)


def added(m, x):
    weight = m[0].weight
    weight.grad = torch.ones(5, 6) if weight.grad is None else weight.grad.add_(1)
    return m(x)


def of_an_input(m, x):
    x.grad = x.detach() * 2
    return m(x)


@pytest.mark.parametrize("call", [assigned, added, of_an_input])
def test_assigned_in_forward(call):
    fn = bridge.export(Call(call, small()))
    with pytest.raises(bridge.BridgeError, match=r"`\.grad` of a parameter.* is assigned.*Remedy: "):
        fn(fn.params, fn.buffers, MATRIX.numpy())


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
    """As `delta.grad.zero_()` of an attack, and `zero_grad` after it."""
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


class AttributesOfTensors(nn.Module):
    """As `main_grad`, which large-model code keeps on parameters."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.5, -2.0]))
        self.w.main_grad = torch.tensor([3.0, 4.0])

    def forward(self, x):
        def forward(ctx, x, w):
            x.scale = x.detach() * 2
            ctx.save_for_backward(x, w)
            return x * w

        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * x.scale, g * w.main_grad

        scaled = type("Scaled", (Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
        return scaled.apply(x * 2, self.w)


def test_attributes_of_tensors():
    verified(AttributesOfTensors(), torch.tensor([1.0, 0.5], requires_grad=True))


# ---- `torch.complex32` and other dtypes that JAX does not have: one error that names the dtype and what to do

NUMBERS = randn(3)
HALF = torch.complex32
WITHIN = r"a tensor is torch\.complex32, which JAX does not have in the module.*, at .*Remedy: .*torch\.complex64"


def caught(x):
    try:
        return (x.half() * 1j).abs()
    except Exception:
        return x


def autocast(x):
    with torch.autocast("cpu", torch.float16):
        return (x[None] @ x[:, None]) * 1j


MADE = {
    "Python number": lambda x: (x.half() * 1j).abs().float(),
    "sum": lambda x: x.half() + 1j,
    "autocast": autocast,
    "cast": lambda x: x.to(HALF).abs(),
    "type": lambda x: x.half().type(HALF),
    "like": lambda x: torch.zeros_like(x, dtype=HALF),
    "parts": lambda x: torch.complex(x.half(), x.half()).abs(),
    "view as complex": lambda x: torch.view_as_complex(torch.stack([x, x], -1).half()).abs(),
    "view": lambda x: x.view(HALF),
    "where": lambda x: torch.where(x > 0, x.half(), 1j),
    "draws": lambda x: torch.randn(3, dtype=HALF) * x,
    "constant": lambda x: torch.ones(3, dtype=HALF) * x,
    "constant written": lambda x: torch.zeros(3, dtype=HALF).copy_(x).abs(),
    "constant returned": lambda x: torch.ones(3, dtype=HALF),
    "out": lambda x: torch.mul(x.half(), 1j, out=torch.empty(3, dtype=HALF)),
    "in a try": caught,
}


@pytest.mark.parametrize("name", MADE)
def test_refused_in_a_call(name):
    MADE[name](NUMBERS)
    fn = bridge.export(Call(MADE[name]))
    with pytest.raises(bridge.BridgeError, match=WITHIN):
        jax.eval_shape(lambda x: fn({}, {}, x, rng=jax.random.key(0))[0], NUMBERS.numpy())


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return (gradient.half() * 1j).abs().float()


def test_refused_in_a_backward():
    fn = bridge.export(Call(Backward.apply))
    with pytest.raises(bridge.BridgeError, match=r"complex32, which JAX does not have"):
        jax.eval_shape(jax.grad(lambda x: fn({}, {}, x)[0].sum()), NUMBERS.numpy())


class State(nn.Module):
    def __init__(self, kind: str, dtype: torch.dtype = HALF):
        super().__init__()
        tensor = torch.ones(3, dtype=dtype)
        if kind == "buffer":
            self.register_buffer("weight", tensor)
        else:
            self.weight = nn.Parameter(tensor, requires_grad=kind == "parameter")

    def forward(self, x):
        return (self.weight.to(torch.complex64) * x).abs()


@pytest.mark.parametrize("kind", ["parameter", "frozen parameter", "buffer"])
def test_refused_as_state(kind):
    what = r"weight is torch\.complex32, which JAX does not have; convert it before, to torch\.complex64"
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.export(State(kind))
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.verify(State(kind), NUMBERS)


def test_refused_as_an_argument_or_loaded_weight():
    what = r"complex32, which JAX does not have.*\.to\(torch\.complex64\)"
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.verify(Call(lambda x: x.to(torch.complex64).abs()), NUMBERS.to(HALF))
    fn = bridge.export(State("parameter", torch.complex64))
    with pytest.raises(bridge.BridgeError, match=what):
        bridge.into(fn, {"weight": NUMBERS.to(HALF)})


def test_refused_in_a_survey_and_for_other_dtypes():
    with pytest.raises(bridge.BridgeError, match=WITHIN):
        bridge.export(Call(MADE["sum"])).survey(jnp.ones(3))
    fn = bridge.export(Call(lambda x: x.to(torch.float8_e8m0fnu)))
    with pytest.raises(bridge.BridgeError, match=r"float8_e8m0fnu, which has no counterpart .*torch\.float32"):
        jax.eval_shape(lambda x: fn({}, {}, x)[0], NUMBERS.numpy())


def test_what_is_done_about_it():
    """Constants may have any dtype of PyTorch's."""
    compare(
        Call(lambda x: (x.half().float() * 1j + torch.ones(3, dtype=HALF).to(torch.complex64)).abs()),
        [NUMBERS],
    )


# ---- Tensors made by the shape of a traced one: the prototype that stands for it has no values of its own

SHAPE = EMBEDDED // 64 + 1, 64


class Zeros(nn.Module):
    def forward(self, x):
        return torch.zeros_like(x), torch.ones_like(x) + x, x.new_full(x.shape, 3)


@pytest.mark.parametrize("attempt", range(3))
def test_memory_that_was_used_before_is_not_read(attempt):
    """Wide integers were in it, which a constant of 32 bits would not hold."""
    fn, x = bridge.export(Zeros()), np.ones(SHAPE, np.int32)
    for _ in range(3):
        used = torch.full(SHAPE, 2**55, dtype=torch.int64)
        del used
        lowered = jax.jit(lambda x: fn(fn.params, fn.buffers, x)[0]).lower(x)
        assert f"dense<{2**55}>" not in lowered.as_text() and len(lowered.as_text()) < 3000
    zeros, twos, threes = lowered.compile()(x)
    assert (int(zeros.max()), int(twos.min()), int(threes.max())) == (0, 2, 3)
