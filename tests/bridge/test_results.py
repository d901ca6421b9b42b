"""Results and arguments: what a call returns, in which order and of which class; the exported module as a value."""

import collections
import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, in_jax, raises, verified
from support.markers import slow_unless
from torch import nn

import bridge

# ---- Results that are no pytrees: refused, since the caller could not use the tensors in them

X = jnp.ones(3)


class Box:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


WRAPPED = {
    "set": lambda x: {x * 2},
    "frozenset": lambda x: frozenset({x * 2}),
    "Slotted": lambda x: Slotted([x * 2]),
    "partial": lambda x: functools.partial(max, x * 2),
    "function": lambda x: lambda: x,
}
WHERE = {"Slotted": ".value[0]", "function": ".x"}


@pytest.mark.parametrize("kind", WRAPPED)
def test_refused(kind):
    """A tensor is refused even in an object that is a pytree; the message names its place."""
    for wrap in (lambda value: [X, value], Box):
        text = raises(f"a tensor inside {kind}.*Remedy: return a tuple", lambda x, wrap=wrap: wrap(WRAPPED[kind](x)), X)
        assert WHERE.get(kind, "") in text


def test_objects_without_tensors_are_returned():
    shapes = {"set": {1, 2}, "box": Box("text"), "deque": collections.deque([1])}
    _, out = in_jax(lambda x: (x, shapes), X)
    assert out["set"] == {1, 2} and out["box"].value == "text" and list(out["deque"]) == [1]


def test_a_size_is_a_tuple():
    def sized(x):
        return x * 2, x.shape, {"size": x[None].size()}

    _, shape, more = in_jax(sized, X)
    assert type(shape) is torch.Size and (shape, more) == (torch.Size([3]), {"size": (1, 3)})
    assert in_jax(sized, X, jit=True)[1:] == ((3,), {"size": (1, 3)})
    verified(sized, torch.ones(3))


@dataclasses.dataclass
class Pair:
    first: object
    second: object


def test_two_results_of_a_class_that_no_call_has_returned():
    def forward(x):
        return torch.std_mean(x), x.kthvalue(1), x.kthvalue(2), Pair(x, 2 * x), Pair(x, [Pair(x, x)])

    for jit in (False, True):
        _, first, second, one, other = in_jax(forward, jnp.arange(3.0), jit=jit)
        assert (first.values, second.values) == (0, 1) and other.second[0].first.shape == one.second.shape == (3,)


# ---- Dicts and keyword arguments keep their order in a call


def in_turn(x, inputs=None, **more):
    for value in (*(inputs or {}).values(), *more.values()):
        x = x * 2 + (value["z"] - value["y"] if isinstance(value, dict) else value)
    return {"z": x, "a": [{"n": x + 1, "m": x}]}


class InTurn(nn.Module):
    def forward(self, *args, **more):
        return in_turn(*args, **more)


def test_a_call_keeps_the_order_of_dicts():
    def call(x, first, second):
        return fn({}, {}, x, {"c": first, "b": {"z": second, "y": first}}, b=first, a=second)[0]

    fn = bridge.export(InTurn())
    given = (jnp.zeros(2), jnp.ones(2), jnp.full(2, 10.0))
    x, first, second = (torch.tensor(a.tolist()) for a in given)
    expected = in_turn(x, {"c": first, "b": {"z": second, "y": first}}, b=first, a=second)
    ours = call(*given)
    assert jnp.allclose(ours["z"], expected["z"].numpy())
    assert [*ours] == [*expected] == ["z", "a"] and [*ours["a"][0]] == ["n", "m"]
    assert jnp.allclose(jax.jit(call)(*given)["z"], expected["z"].numpy())


# ---- An exported module as a value: hashable, comparable, a static field; and arguments that no call can take

ROWS = np.ones((2, 3), np.float32)


def test_it_is_hashable_and_equal_to_itself_alone():
    module = nn.Linear(3, 3)
    fn = bridge.export(module)
    other = bridge.export(module)
    assert fn == fn and fn != other and fn in {fn} and other not in {fn: 1}


def test_jit_of_it():
    fn = bridge.export(nn.Linear(3, 3))
    compiled = jax.jit(fn, static_argnames=("train", "method"))
    out, _ = compiled(fn.params, fn.buffers, ROWS, train=True)
    np.testing.assert_allclose(out, fn(fn.params, fn.buffers, ROWS)[0], rtol=1e-6)


def test_a_static_argument_and_a_static_field():
    traces = 0

    @functools.partial(jax.jit, static_argnums=0)
    def call(fn, params):
        nonlocal traces
        traces += 1
        return fn(params, {}, ROWS)[0]

    fn = bridge.export(nn.Linear(3, 3))
    for _ in range(2):
        call(fn, fn.params)
    assert traces == 1

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        params: dict
        fn: bridge.Functional = dataclasses.field(metadata={"static": True})

    model = Model(fn.params, fn)
    slopes = jax.jit(jax.grad(lambda model: model.fn(model.params, {}, ROWS)[0].sum()))(model)
    assert slopes.fn is fn and slopes.params["bias"].tolist() == [2, 2, 2]
    assert jax.tree.leaves(fn) == [fn], "one leaf"


@pytest.mark.parametrize("rng", [0, np.int32(0), jnp.zeros(3), "key"])
def test_what_is_no_key(rng):
    raises(r"rng is a JAX key, such as jax\.random\.key\(0\)", nn.Dropout(), ROWS, rng=rng, train=True)


def test_keys_of_both_kinds():
    fn = bridge.export(nn.Dropout())
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        out, _ = jax.jit(lambda key: fn({}, {}, ROWS, rng=key, train=True))(key)
        np.testing.assert_array_equal(out, fn({}, {}, ROWS, rng=jax.random.key(0), train=True)[0])


def test_a_symbolic_shape():
    fn = bridge.export(nn.Linear(3, 3))
    shape = jax.export.symbolic_shape("batch, 3")
    call = jax.export.export(jax.jit(lambda x: fn(fn.params, fn.buffers, x)[0]))
    with pytest.raises(bridge.BridgeError, match=r"an input has the symbolic shape \(batch, 3\).*a number for each"):
        call(jax.ShapeDtypeStruct(shape, jnp.float32))


# ---- arguments that a call changes: PyTorch's caller has the changed ones, JAX's has only what the call returns


@bridge.register
@dataclasses.dataclass
class State:
    h: object


def in_dict(x, state):
    state["k"] = torch.cat([state["k"], x])
    return state["k"].sum() * x


def in_tensor(x, cache):
    cache[1:] = cache[:-1].clone()
    return x * cache.sum(0)


def in_dataclass(x, state):
    state.h = 0.5 * state.h + x
    return state.h.tanh()


def inside(x, state):
    state["steps"][0].append(x)
    return x + 1


ARGUMENTS = {
    "dict": (in_dict, lambda: {"k": X}, "state"),
    "tensor": (in_tensor, lambda: jnp.ones((2, 3)), "cache"),
    "dataclass": (in_dataclass, lambda: State(X), "state"),
    "inside": (inside, lambda: {"steps": ([X],)}, "state"),
}


def warned(function, *args, jit=False):
    fn = bridge.export(Call(function))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = jax.jit(lambda *args: fn({}, {}, *args)) if jit else lambda *args: fn({}, {}, *args)
        for _ in range(2):
            call(*args)
    return [str(w.message) for w in caught if issubclass(w.category, bridge.BridgeWarning)]


@pytest.mark.parametrize("jit", slow_unless(False.__eq__, [False, True]))
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_changed_argument_is_one_warning(name, jit):
    function, state, argument = ARGUMENTS[name]
    (text,) = warned(function, X, state(), jit=jit)
    assert f"`{argument}`" in text or "argument" in text
    assert "the caller's own stays as it was; return it" in text


def returned(x, state, cache, past):
    state["k"] = x
    cache.mul_(2)
    past.append(x)
    return x, state, cache.view(3, 2), (past,)


def own(x, *others, **named):
    """Containers that only the call has."""
    named["y"], (more, *_) = x, others
    named.pop("z")
    return x + more


def test_what_is_returned_or_the_calls_own_is_silent():
    assert warned(returned, X, {"k": X}, jnp.ones((2, 3)), [X]) == []
    assert warned(lambda x: own(x, x, z=x), X) == []
