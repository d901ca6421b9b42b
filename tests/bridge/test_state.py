"""Parameters and buffers as objects: who else holds them, what they share, and what a call puts in their place."""

import dataclasses
import functools
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Calls, agrees, array, in_jax, refused, verified
from torch import nn

import bridge

# ---- parameters, buffers and modules held by objects, closures and classes of the user's own: the call's own ones


class Helper:
    """An object in an attribute of a module."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@dataclasses.dataclass(frozen=True)
class Group:
    params: tuple
    rates: dict


class Rates(dict):
    """A dict that is no plain one."""


class Holds(nn.Module):
    def __init__(self, call, holder):
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.b = nn.Buffer(torch.ones(3))
        self.drop = nn.Dropout(0.5)
        self.call = call
        self.held = holder(self)

    def forward(self, x):
        return self.call(self, x)


def in_a_nested_closure(m):
    w = m.l.weight
    return (lambda: lambda: w)()


def by_default(m):
    return lambda w=m.l.weight: w is m.l.weight


def written(m, x):
    with torch.no_grad():
        m.held.b.mul_(2)
    return x * m.b


HELD = {
    "object": (lambda m: Helper(w=m.l.weight), lambda m, x: x * (2 if m.held.w is m.l.weight else 1)),
    "frozen dataclass": (
        lambda m: Group((m.l.weight, m.l.bias), {m.b: 3.0}),
        lambda m, x: x * (2 if m.held.params[1] is m.l.bias else 1) * m.held.rates.get(m.b, 1),
    ),
    "dict of a class": (
        lambda m: Rates({m.b: 2.0, "x": 1}),
        lambda m, x: x * m.held.get(m.b, 1) * list(m.held)[1:].index("x"),
    ),
    "list and dict": (
        lambda m: ([m.l.weight], {"params": [m.l.weight], "ids": [m.b]}),
        lambda m, x: x * (m.held[0][0] is m.l.weight) * (m.held[1]["ids"][0] is m.b) + m.held[1]["params"][0].sum(),
    ),
    "set and keys": (
        lambda m: ({m.l.bias}, {m.l.weight: 3.0}),
        lambda m, x: x * (2 if m.l.bias in m.held[0] else 1) * m.held[1].get(m.l.weight, 1),
    ),
    "closure": (in_a_nested_closure, lambda m, x: x * (m.held() is m.l.weight)),
    "default": (by_default, lambda m, x: x * (2 if m.held() else 1)),
    "partial": (
        lambda m: Helper(f=functools.partial(torch.nn.functional.linear, weight=m.l.weight)),
        lambda m, x: m.held.f(x) * (m.held.f.keywords["weight"] is m.l.weight),
    ),
    "bound method": (lambda m: Helper(f=m.l.forward), lambda m, x: m.held.f(x) * (m.held.f.__self__ is m.l)),
    "weak reference": (lambda m: Helper(r=weakref.ref(m.l)), lambda m, x: x * (m.held.r() is m.l)),
    "proxy of the module": (lambda m: Helper(p=weakref.proxy(m)), lambda m, x: m.held.p.l(x) * m.held.p.drop.training),
    "proxy of nothing": (lambda m: Helper(p=weakref.proxy(Helper())), lambda m, x: m.l(x)),
    "weak keys": (lambda m: weakref.WeakKeyDictionary({m.l: 3.0}), lambda m, x: x * m.held.get(m.l, 1)),
    "mode of a module": (lambda m: Helper(drop=m.drop), lambda m, x: m.held.drop(x)),
    "module, its list": (
        lambda m: (Helper(items=[m.l]), types.SimpleNamespace(back=m)),
        lambda m, x: x * (m.held[0].items[0] is m.l) * (m.held[1].back is m),
    ),
    "written": (lambda m: Helper(b=m.b), written),
}


@pytest.mark.parametrize(("holder", "call"), HELD.values(), ids=HELD)
def test_objects_hold_the_parameters_of_the_call(holder, call):
    torch.manual_seed(0)
    module = Holds(call, holder)
    fn = bridge.export(module)
    x = jnp.ones((1, 3))
    before = [type(p) for p in module.parameters()]
    buffers = fn.buffers
    gradient = jax.grad(lambda p: fn(p, fn.buffers, x, train=False)[0].sum())(fn.params)
    module.eval()
    for _ in range(2):
        outputs, buffers = fn(fn.params, buffers, x, train=False)
        wanted = module(torch.ones(1, 3))
    np.testing.assert_allclose(outputs, wanted.detach().numpy(), rtol=1e-6)
    if wanted.requires_grad:
        wanted.sum().backward()
        np.testing.assert_allclose(gradient["l.weight"], module.l.weight.grad.numpy(), rtol=1e-6)
    assert [type(p) for p in module.parameters()] == before


def test_the_objects_are_as_before():
    module = Holds(
        lambda m, x: x * m.held.w.sum(),
        lambda m: Helper(w=m.l.weight, rates=Rates({m.b: 1.0, "x": 2.0})),
    )
    fn = bridge.export(module)
    jax.jit(lambda x: fn(fn.params, fn.buffers, x, train=False))(jnp.ones(3))
    with pytest.raises(bridge.BridgeError):
        fn(fn.params, fn.buffers, jnp.ones(3), method="no_method")
    assert module.held.w is module.l.weight
    assert list(module.held.rates) == [module.b, "x"]


# ---- what a call puts in their place, and memory that two tensors share before a call and not after it

X = torch.tensor([1.0, 2.0, 3.0, 4.0])


def kept(function, keep):
    """Returns a module with a buffer `mem`, and what is kept of it in `kept`."""
    mem = nn.Buffer(torch.ones(4))
    return Calls(function, mem=mem, kept=keep(mem))


def two(function, **attributes):
    return Calls(function, a=nn.Buffer(torch.zeros(4)), b=nn.Buffer(torch.ones(4)), **attributes)


def one(function):
    """Returns a module with two names of one tensor."""
    buffer = nn.Buffer(torch.ones(4))
    return Calls(function, fast=buffer, slow=buffer)


def views(function):
    mem = nn.Buffer(torch.arange(4.0))
    return Calls(function, mem=mem, top=nn.Buffer(mem[:2]))


def holding(function, h):
    return Calls(function, h=nn.Buffer(h))


def assigned(result, **values):
    """Returns a forward that assigns and returns what these functions of the module and the input give."""

    def forward(m, x):
        for name, value in values.items():
            setattr(m, name, value(m, x))
        return result(m, x)

    return forward


EXPANDED = torch.zeros(1, 2).expand(3, 2)


def set_to(value):
    return assigned(lambda m, x: x * m.a, b=lambda m, x: m.b - 1, a=lambda m, x: value(m))


def data_shared(m, x):
    m.a.data = m.b.data
    m.a += x
    return m.b * 1


def element_written(m, x):
    m.h[0] += x[:2]
    return m.h * 1


def write_kept(m, x):
    (value,) = [m.kept] if isinstance(m.kept, torch.Tensor) else m.kept.values() if type(m.kept) is dict else m.kept
    value.add_(x[: len(value)])
    out = m.mem * 1
    m.mem = m.mem * 0.5
    return out


KEEP = {"view": lambda mem: mem[:2], "list": lambda mem: [mem], "dict": lambda mem: {"it": mem}}
SHARED = "share their memory after the call"
REFUSED = {
    "one buffer is set to another": (
        lambda: two(set_to(lambda m: m.b)),
        "a and b share their memory after the call.*assign a clone",
    ),
    "one buffer is set to another, detached": (lambda: two(set_to(lambda m: m.b.detach())), SHARED),
    "data is shared afterwards": (lambda: two(data_shared), SHARED),
    "one of two names": (
        lambda: one(assigned(lambda m, x: m.fast - m.slow, fast=lambda m, x: m.fast * 0.5 + x)),
        "fast and slow are one tensor before the call and two after it",
    ),
    "the base of a view is assigned": (
        lambda: views(assigned(lambda m, x: m.mem * x, mem=lambda m, x: m.mem * 1)),
        "mem and top|top and mem",
    ),
    "an expanded buffer is written": (lambda: holding(element_written, EXPANDED), "share memory"),
    **{
        f"a slot parts from a kept {name}": (lambda keep=keep: kept(write_kept, keep), "`kept")
        for name, keep in KEEP.items()
    },
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_memory_that_parts_or_joins_is_refused(make, message):
    """PyTorch would write both, or one alone, in the next call."""
    refused(make, message, X)


def both_written(m, x):
    m.top += 10
    m.mem *= 2
    return m.mem * x


def both_names_assigned(m, x):
    m.fast = m.slow = m.fast * 0.5 + x
    return m.fast + x


def one_name_written(m, x):
    m.fast.mul_(0.5).add_(x)
    return m.fast + m.slow


def with_attribute(module, tensor, **attributes):
    vars(getattr(module, tensor)).update(attributes)
    return module


AGREES = {
    "attribute of a buffer": lambda: with_attribute(two(lambda m, x: x * m.a.scale + m.b), "a", scale=5.0),
    "attribute of a parameter": lambda: with_attribute(Calls(lambda m, x: x * m.w.sum() * m.w.age), "w", age=4),
    "a kept tensor that nobody reads": lambda: kept(
        assigned(lambda m, x: m.mem * 1, mem=lambda m, x: m.mem * 0.5 + x), KEEP["list"]
    ),
    "a view stays one": lambda: views(both_written),
    "both names assigned": lambda: one(both_names_assigned),
    "one name written": lambda: one(one_name_written),
    "expanded, read": lambda: holding(lambda m, x: m.h * x[:2], EXPANDED),
    "expanded, assigned": lambda: holding(assigned(lambda m, x: m.h * 1, h=lambda m, x: m.h + x[:2]), EXPANDED),
}


@pytest.mark.parametrize("name", AGREES)
def test_calls_in_a_row_are_pytorch_s(name):
    agrees(AGREES[name], X)


def test_a_parameter_that_the_call_replaces_is_handed_back():
    def forward(m, x):
        out = x @ m.w
        m.w = nn.Parameter(m.w.detach() * 2)
        return out + x @ m.w

    module = Calls(forward)
    x = torch.ones(2, 3)
    fn = bridge.export(module)
    params = fn.params
    for _ in range(2):
        result = fn.run(params, fn.buffers, jnp.ones((2, 3)))
        np.testing.assert_allclose(result.outputs, module(x).detach().numpy(), rtol=1e-6)
        params = result.params


def test_a_buffer_keeps_its_shape_from_call_to_call():
    grows = assigned(lambda m, x: m.h.sum(0), h=lambda m, x: torch.cat([m.h, x]))
    fn = bridge.export(holding(grows, torch.zeros(0, 3)))
    _, buffers = fn(fn.params, fn.buffers, jnp.ones((2, 3)))
    with pytest.raises(bridge.BridgeError, match=r"buffer h has shape \(2, 3\), expected \(0, 3\).*register it at"):
        fn(fn.params, buffers, jnp.ones((2, 3)))


def test_calls_before_do_not_decide_whether_a_call_is_an_error():
    """A buffer set to another tensor in one method and written in another: PyTorch would write both tensors."""

    class Resets(Calls):
        def reset(self):
            self.a = self.other

    module = Resets(lambda m, x: m.a.add_(x) * 1, a=nn.Buffer(torch.zeros(2)), other=torch.zeros(2))
    args = {"reset": (), "forward": (jnp.ones(2),)}
    for order in (("reset", "forward"), ("forward", "reset"), ("forward",)):
        fn = bridge.export(module)
        results = {method: fn.run(fn.params, fn.buffers, *args[method], method=method) for method in order}
        assert results["forward"].buffers["a"].tolist() == [1, 1]


class Distilled(nn.Module):
    """Hides its teacher from the optimizer, with the signature of torchrl."""

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(3, 3)
        self.teacher = nn.Linear(3, 3)
        self.tied = self.teacher

    def named_parameters(self, prefix="", recurse=True):
        return ((n, p) for n, p in super().named_parameters(prefix, recurse) if "teacher" not in n)

    def forward(self, x):
        return self.student(x) - self.teacher(x) + self.tied.bias


def test_parameters_that_a_module_hides_are_buffers():
    module = Distilled()
    x = torch.ones(2, 3)
    fn = bridge.export(module)
    assert set(fn.params) == {"student.weight", "student.bias"} and set(fn.buffers) == {
        "teacher.weight",
        "teacher.bias",
    }
    state = bridge.state_dict(fn, *bridge.into(fn, module.state_dict()))
    assert state.keys() == module.state_dict().keys()
    expected = module(x).detach()
    with torch.no_grad():
        module.teacher.weight.mul_(5)
    np.testing.assert_allclose(fn(fn.params, fn.buffers, x.numpy())[0], expected, rtol=1e-6)
    verified(module, x)


def test_a_module_whose_names_have_changed_since_export_is_refused():
    """PyTorch's own call parts the two names of one tensor."""
    module = one(lambda m, x: x + m.fast)
    fn = bridge.export(module)
    module.fast = module.fast * 0.5
    with pytest.raises(bridge.BridgeError, match="other parameters or buffers than when it was exported: slow; export"):
        fn(fn.params, fn.buffers, jnp.ones(4))


# ---- gradients of shared memory


def gradient(module, x):
    """JAX's gradient of the parameter `w`, and PyTorch's."""
    fn = bridge.export(module)
    ours = jax.grad(lambda params: fn.run(params, fn.buffers, array(x)).outputs.sum())(fn.params)
    out = module(x).sum()
    if out.requires_grad:
        out.backward()
    wanted = np.zeros(module.w.shape) if module.w.grad is None else module.w.grad.numpy()
    np.testing.assert_allclose(ours["w"], wanted)


def test_data_that_is_assigned_leaves_the_gradient_path():
    def forward(m, x):
        flat = torch.cat([x, x]).detach()
        m.w.data = flat[1:3]
        flat.mul_(2)
        return (m.w**2).sum() * x.sum()

    gradient(Calls(forward, w=nn.Parameter(torch.tensor([1.0, 2.0]))), torch.tensor([3.0, 4.0]))


@pytest.mark.parametrize("take", [lambda a: a[0], lambda a: a.detach()[0]], ids=["row", "detached"])
@pytest.mark.parametrize("keep", [nn.Buffer, lambda view: [view]], ids=["registered", "in a list"])
def test_a_view_kept_of_a_buffer_has_the_gradient_of_what_is_written_into_the_buffer(take, keep):
    def forward(m, x):
        m.a += m.w
        return (m.v[0] if isinstance(m.v, list) else m.v).sum() * x.sum()

    a = nn.Buffer(torch.zeros(2, 2))
    gradient(Calls(forward, w=nn.Parameter(torch.tensor([1.0, 2.0])), a=a, v=keep(take(a))), torch.tensor([3.0, 4.0]))


def test_equal_indices_in_an_assignment_give_the_gradient_to_the_value_that_is_kept():
    """PyTorch gives it to all of them."""

    def assigned(m, x, v):
        y = x.clone()
        y[torch.tensor([1, 1])] = v
        return y

    slope = jax.grad(lambda v: in_jax(Calls(assigned), jnp.zeros(3), v).sum())(jnp.ones(2))
    assert sorted(slope.tolist()) == [0, 1]


def over(make):
    """Something over the memory of a trained parameter."""

    def forward(m, x):
        return m.linear(x) + nn.functional.linear(x, m.alias) + m.alias.sum()

    linear = nn.Linear(3, 3)
    return Calls(forward, linear=linear, alias=make(linear.weight.data))


@pytest.mark.parametrize("make", [nn.Buffer, lambda memory: nn.Parameter(memory, requires_grad=False)])
def test_what_lies_in_the_memory_of_a_parameter_follows_it(make):
    """An optimizer updates the parameter in place, and so what shows its memory; so does `load_state_dict`."""
    module = over(make)
    loaded = over(make)
    fn = bridge.export(module)
    params = {name: value + 1.0 for name, value in fn.params.items()}
    out, buffers = fn(params, fn.buffers, jnp.ones((2, 3)))
    with torch.no_grad():
        for parameter in fn.params:
            module.get_parameter(parameter).add_(1.0)
    loaded.load_state_dict(bridge.state_dict(fn, params, fn.buffers))
    for reference in (module, loaded):
        np.testing.assert_allclose(out, reference(torch.ones(2, 3)).detach().numpy(), rtol=1e-5)
    assert jnp.array_equal(buffers["alias"], params["linear.weight"])
