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
