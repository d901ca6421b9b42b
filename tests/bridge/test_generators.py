"""Numbers from a generator that the call seeds are PyTorch's own; one that was seeded before the call is refused."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bridge

OUTSIDE = torch.Generator().manual_seed(5)


def seeded_in_forward(x):
    return x + torch.randn(4, generator=torch.Generator().manual_seed(0))


def equal_seeds(x):
    one, two = (torch.rand(4, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    return x + one - two


def fork(x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        noise = torch.randn(4)
    return x * noise


def default_seeded(x):
    torch.manual_seed(11)
    return x + torch.rand(4) + torch.randn_like(x) + torch.empty_like(x).uniform_(-1, 1)


def dropout_after_seed(x):
    torch.manual_seed(2)
    return F.dropout(x, 0.5, True)


def permutation(x):
    return x[torch.randperm(4, generator=torch.Generator().manual_seed(1))]


def in_nested_functions(x):
    generator = torch.Generator().manual_seed(1)
    listed = [torch.randn(4, generator=generator) for _ in range(2)]
    summed = sum(torch.rand(4, generator=generator) for _ in range(2))

    def nested():
        generator.manual_seed(2)
        return next(map(lambda n: torch.rand(n, generator=generator), [4]))

    return x + sum(listed) + summed + nested()


def state_restored(x):
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return x + first - torch.rand(4)


SEEDED = [
    seeded_in_forward, equal_seeds, fork, default_seeded, dropout_after_seed, permutation, state_restored,
    in_nested_functions,
]  # fmt: skip


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def call(module, *args, rng=None, **kwargs):
    fn = bridge.export(module)
    return jax.jit(lambda *a: fn(fn.params, fn.buffers, *a, rng=rng, **kwargs)[0])(*args)


@pytest.mark.parametrize("function", SEEDED, ids=lambda f: f.__name__)
def test_seeded_numbers_are_pytorchs(function):
    x = torch.linspace(-1, 1, 4)
    torch.manual_seed(99)
    expected = function(x)
    state = torch.get_rng_state()
    for key in (None, jax.random.key(0)):
        np.testing.assert_allclose(call(Calls(function), jnp.asarray(x.numpy()), rng=key), expected, rtol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's numbers are not touched
    assert bridge.verify(Calls(function), x).ok


def test_after_a_fork_draws_follow_the_key_again():
    def forward(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            torch.rand(2)
        return x + torch.rand(4)

    x = jnp.zeros(4)
    one, other = (call(Calls(forward), x, rng=jax.random.key(seed)) for seed in (0, 1))
    assert not np.array_equal(one, other)
    with pytest.raises(bridge.BridgeError, match="draws random numbers but the call has no key"):
        call(Calls(forward), x)


class Own(nn.Module):
    """A generator in an attribute, in a list, or in an object that is no module."""

    def __init__(self, where, seed_in_forward=False):
        super().__init__()
        self.generator = self.listed = self.object = None
        setattr(
            self,
            where,
            {"generator": lambda g: g, "listed": lambda g: [g], "object": lambda g: types.SimpleNamespace(generator=g)}[
                where
            ](torch.Generator().manual_seed(1)),
        )
        self.seed_in_forward = seed_in_forward

    def forward(self, x):
        generator = self.generator or (self.listed[0] if self.listed else self.object.generator)
        if self.seed_in_forward:
            generator.manual_seed(6)
        return x + torch.rand(4, generator=generator)


@pytest.mark.parametrize("where", ["generator", "listed", "object"])
def test_a_generator_from_before_the_call_is_refused_unless_the_call_seeds_it(where):
    x = torch.zeros(4)
    module = Own(where)
    with pytest.raises(bridge.BridgeError, match=r"torch\.Generator that was made before the call"):
        call(module, jnp.zeros(4), rng=jax.random.key(0))
    np.testing.assert_array_equal(module(x), Own(where)(x))  # its state is as it was
    seeded = Own(where, seed_in_forward=True)
    np.testing.assert_array_equal(call(seeded, jnp.zeros(4)), Own(where, seed_in_forward=True)(x))


def test_one_that_is_global_or_enclosed_is_seen_by_verify():
    local = torch.Generator().manual_seed(5)
    assert not bridge.verify(Calls(lambda x: x + torch.rand(4, generator=OUTSIDE)), torch.zeros(4)).ok
    with pytest.raises(bridge.BridgeError, match="made before the call"):  # closures are copied with the module
        bridge.verify(Calls(lambda x: x + torch.rand(4, generator=local)), torch.zeros(4))


def test_one_that_is_passed_is_refused():
    x = jnp.zeros(4)
    fn = bridge.export(Calls(lambda x, generator: x + torch.rand(4, generator=generator)))
    with pytest.raises(bridge.BridgeError, match="made before the call"):
        fn({}, {}, x, torch.Generator().manual_seed(5))


def test_seeded_draws_around_traced_numbers_are_refused():
    module = Calls(lambda p: torch.bernoulli(p, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(bridge.BridgeError, match="seeded generator around traced values"):
        call(module, jnp.full(4, 0.5))


def test_numbers_of_python_and_numpy_are_refused():
    import random

    for draw in (random.random, np.random.rand):
        state = random.getstate(), str(np.random.get_state())
        with pytest.raises(bridge.BridgeError, match=r"drew random numbers from .*test_generators\.py"):
            call(Calls(lambda x, draw=draw: x * float(draw())), jnp.ones(4))
        assert state == (random.getstate(), str(np.random.get_state()))
