"""Dicts and keyword arguments keep their order in a call."""

import jax
import jax.numpy as jnp
import torch
from torch import nn

import bridge

FIRST, SECOND = torch.ones(2), torch.full((2,), 10.0)


def in_turn(x, inputs=None, **more):
    for value in (*(inputs or {}).values(), *more.values()):
        x = x * 2 + (value["z"] - value["y"] if isinstance(value, dict) else value)
    return {"z": x, "a": [{"n": x + 1, "m": x}]}


class InTurn(nn.Module):
    def forward(self, *args, **more):
        return in_turn(*args, **more)


def test_a_call_keeps_the_order_of_dicts():
    x = torch.zeros(2)
    nested = {"z": SECOND, "y": FIRST}
    expected = in_turn(x, {"c": FIRST, "b": nested}, b=FIRST, a=SECOND)
    fn = bridge.export(InTurn())
    first, second = jnp.asarray(FIRST.numpy()), jnp.asarray(SECOND.numpy())

    def call(x):
        return fn({}, {}, x, {"c": first, "b": {"z": second, "y": first}}, b=first, a=second)[0]

    ours = call(jnp.zeros(2))
    assert jnp.allclose(ours["z"], expected["z"].numpy())
    assert [*ours] == [*expected] == ["z", "a"] and [*ours["a"][0]] == ["n", "m"]
    assert jnp.allclose(jax.jit(call)(jnp.zeros(2))["z"], expected["z"].numpy())


def test_a_size_among_the_results():
    class Sized(nn.Module):
        def forward(self, x):
            return x * 2, x.shape

    out = bridge.export(Sized())({}, {}, jnp.ones((2, 3)))[0]
    assert out[1] == torch.Size([2, 3]) and type(out[1]) is torch.Size
    compiled = jax.jit(lambda x: bridge.export(Sized())({}, {}, x)[0])(jnp.ones((2, 3)))
    assert tuple(map(int, compiled[1])) == (2, 3)
    assert bridge.verify(Sized(), torch.ones(2, 3)).ok
