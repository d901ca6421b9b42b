"""Private random generators and caches of functions, which a call may neither advance nor fill."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from holding import Calls
from torch import nn

import bridge

X = torch.ones(2, 3)


def call(module):
    fn = bridge.export(module)
    return jax.jit(lambda p, x: fn(p, fn.buffers, x)[0])(fn.params, jnp.ones((2, 3)))


def unlike(make):
    """Whether a second call in PyTorch gives something else."""
    module = make()
    one, two = (module(X).detach().clone() for _ in range(2))
    return not torch.equal(one, two)


# ---- iterators


def numbers():
    n = 0.0
    while True:
        n += 1
        yield n


def test_an_iterator_that_the_call_makes_or_nobody_advances_is_none_of_its_business():
    def forward(m, x):
        it = zip(m.list, itertools.count(2.0), strict=False)
        return sum(x * a * b for a, b in it) + len(str(m.it is None))

    module = Calls(forward, list=[1.0, 3.0], it=numbers())
    np.testing.assert_allclose(call(module), module(X))


# ---- random numbers


def seeded(m, x):
    m.it.seed(5)
    return x * m.it.random()


def of_numpy(m, x):
    return x * float(m.it.random())


def branch(m, x):
    """It may take the same branch at the second call as at the first."""
    return x * 2 if m.it.random() > 0.001 else x


OUTSIDE = random.Random(0)

DRAWS = {
    "random.Random": lambda: Calls(lambda m, x: x * m.it.random(), it=random.Random(0)),
    "default_rng": lambda: Calls(of_numpy, it=np.random.default_rng(0)),
    "RandomState": lambda: Calls(lambda m, x: x * m.it.rand(), it=np.random.RandomState(0)),
    "Philox": lambda: Calls(of_numpy, it=np.random.Generator(np.random.Philox(0))),
    "in a list": lambda: Calls(lambda m, x: x * m.it[0].random(), it=[random.Random(0)]),
    "global": lambda: Calls(lambda m, x: x * OUTSIDE.random()),
}


@pytest.mark.parametrize("name", [*DRAWS, "branch"])
def test_a_private_generator_that_was_seeded_before_the_call_is_refused(name):
    make = DRAWS.get(name, lambda: Calls(branch, it=random.Random(0)))
    assert name == "branch" or unlike(make)
    module, twin = make(), make()
    OUTSIDE.seed(0)
    with pytest.raises(bridge.BridgeError, match=r"draws random numbers from .*(it|OUTSIDE).*seeded before it"):
        call(module)
    number = module(X)
    OUTSIDE.seed(0)
    assert torch.equal(number, twin(X))  # its state is as it was


def test_one_that_the_call_seeds_gives_the_numbers_of_python():
    module = Calls(seeded, it=random.Random(0))
    np.testing.assert_allclose(call(module), module(X))


# ---- caches of functions


class Cached(Calls):
    @functools.lru_cache  # noqa: B019 (which is the case)
    def scaled(self, n):
        return self.w * n

    @functools.lru_cache(maxsize=2)  # noqa: B019
    def constant(self, n):
        return torch.full((3,), n)

    @functools.cached_property
    def double(self):
        return self.w.detach() * 2

    @functools.cached_property
    def mask(self):
        return torch.ones(3).cumsum(0)


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (lambda m, x: x @ m.scaled(2.0), "changes `Cached.scaled.*a later call would read it"),
        (lambda m, x: x @ m.double, "changes `double`.*a later call would read it"),
    ],
    ids=["lru_cache", "cached_property"],
)
def test_a_traced_value_that_a_cache_keeps_is_refused(forward, match):
    module = Cached(forward)
    for _ in range(2):
        with pytest.raises(bridge.BridgeError, match=match):
            call(module)
    torch.testing.assert_close(module(X), X)  # nothing of the trace is in the cache


def test_constants_may_be_cached_and_no_copy_of_the_module_stays():
    module = Cached(lambda m, x: x * m.constant(2.0) + m.mask)
    for _ in range(2):
        np.testing.assert_allclose(call(module), module(X))
    assert Cached.constant.cache_info().currsize <= 1


class Failing(Calls):
    n, log = 0, []

    def forward(self, x, held=[1]):  # noqa: B006 (which is the case)
        type(self).n += 1
        self.log.append(x)
        held.append(x)
        self.it[0].seed(1)
        self.it[1][0] += 1
        raise KeyError(self.n)


def test_a_call_that_fails_leaves_nothing_either():
    held = [random.Random(0), bytearray(1)]
    module, state = Failing(None, it=held), held[0].getstate()
    with pytest.raises(KeyError):
        call(module)
    assert Failing.n == 0 and Failing.log == [] and Failing.forward.__defaults__ == ([1],)
    assert held[0].getstate() == state and held[1] == bytearray(1)


def test_modules_that_a_call_swaps_are_refused():
    def forward(m, x):
        m.a, m.b = m.b, m.a
        return m.b(x)

    module = Calls(forward, a=nn.Linear(3, 3), b=nn.Linear(3, 3))
    a = module.a
    with pytest.raises(bridge.BridgeError, match=r"changes `a`.*a later call would read it"):
        call(module)
    assert module.a is a
