"""Arguments that a call changes: PyTorch's caller has the changed ones, JAX's has only what the call returns."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call
from support.markers import slow_unless

import bridge


@bridge.register
@dataclasses.dataclass
class State:
    h: object


def in_dict(x, state):
    state["k"] = torch.cat([state["k"], x])
    return state["k"].sum() * x


def in_list(x, past):
    past.append(x)
    return torch.stack(past).sum(0)


def in_tensor(x, cache):
    cache[1:] = cache[:-1].clone()
    return x * cache.sum(0)


def in_dataclass(x, state):
    state.h = 0.5 * state.h + x
    return state.h.tanh()


def inside(x, state):
    state["steps"][0].append(x)
    return x + 1


ONES = jnp.ones(3)
CHANGED = {
    "dict": (in_dict, lambda: {"k": ONES}, "state"),
    "list": (in_list, lambda: [ONES], "past"),
    "tensor": (in_tensor, lambda: jnp.ones((2, 3)), "cache"),
    "dataclass": (in_dataclass, lambda: State(ONES), "state"),
    "inside": (inside, lambda: {"steps": ([ONES],)}, "state"),
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
@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_argument_is_one_warning(name, jit):
    function, state, argument = CHANGED[name]
    (text,) = warned(function, ONES, state(), jit=jit)
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
    assert warned(returned, ONES, {"k": ONES}, jnp.ones((2, 3)), [ONES]) == []
    fn = bridge.export(Call(lambda x: own(x, x, z=x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fn({}, {}, ONES)
