"""Results that are no pytrees: refused, since the caller could not use the tensors in them."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import torch
from eager import Call

import bridge

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
    """Also in an object that is a pytree; the message says where the tensor is."""
    for wrap in (lambda value: [X, value], Box):
        with pytest.raises(bridge.BridgeError, match=f"a tensor inside {kind}.*Remedy: return a tuple") as error:
            bridge.export(Call(lambda x, wrap=wrap: wrap(WRAPPED[kind](x))))({}, {}, X)
        assert WHERE.get(kind, "") in str(error.value)


def test_objects_without_tensors_are_returned():
    shapes = {"set": {1, 2}, "box": Box("text"), "deque": collections.deque([1])}
    out, _ = bridge.export(Call(lambda x: (x, shapes)))({}, {}, X)
    assert out[1]["set"] == {1, 2} and out[1]["box"].value == "text" and list(out[1]["deque"]) == [1]


def test_a_size_is_a_tuple():
    fn = bridge.export(Call(lambda x: (x * 2, x.shape, {"size": x[None].size()})))
    for call in (lambda f: f, jax.jit):
        assert call(lambda x: fn({}, {}, x)[0][1:])(X) == ((3,), {"size": (1, 3)})


@dataclasses.dataclass
class Pair:
    first: object
    second: object


def test_two_results_of_a_class_that_no_call_has_returned():
    def forward(x):
        return torch.std_mean(x), x.kthvalue(1), x.kthvalue(2), Pair(x, 2 * x), Pair(x, [Pair(x, x)])

    for call in (lambda fn: fn, jax.jit):
        fn = bridge.export(Call(forward))
        _, first, second, one, other = call(lambda x, fn=fn: fn({}, {}, x)[0])(jnp.arange(3.0))
        assert (first.values, second.values) == (0, 1) and other.second[0].first.shape == one.second.shape == (3,)
