"""Iterators, private random generators and caches of functions, which a call may neither advance nor fill."""

import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from holding import Calls, Slotted, with_last
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


def sent():
    n = 0.0
    while True:
        n += (yield n) or 0.0


def started():
    generator = sent()
    next(generator)
    return generator


GLOBAL, GLOBAL_LIST = itertools.count(1.0), [iter([1.0, 2.0, 3.0, 4.0])]


def advance(m, x):
    return x * next(m.it)


def swallowing(m, x):
    try:
        return x * next(m.it)
    except Exception:
        return x


def looped(m, x):
    for number in m.it:
        return x * number


def global_iterator(m, x):
    return x * next(GLOBAL)


def in_global_list(m, x):
    return x * next(GLOBAL_LIST[0])


def in_default(m, x, it=itertools.count(1.0)):  # noqa: B008 (which is the case)
    return x * next(it)


def enclosed():
    it = numbers()
    return lambda m, x: x * next(it)


class Numbered(Calls):
    numbers = itertools.count(1.0)


ITERATORS = {
    "of a class": lambda: Numbered(lambda m, x: x * next(m.numbers)),
    "iterator of a list": lambda: Calls(advance, it=iter([1.0, 2.0, 3.0, 4.0])),
    "count": lambda: Calls(advance, it=itertools.count(1.0)),
    "cycle": lambda: Calls(advance, it=itertools.cycle([1.0, 2.0])),
    "map": lambda: Calls(advance, it=map(float, range(1, 9))),
    "generator": lambda: Calls(advance, it=numbers()),
    "in a loop": lambda: Calls(looped, it=numbers()),
    "sent": lambda: Calls(lambda m, x: x * m.it.send(2.0), it=started()),
    "in a list": lambda: Calls(lambda m, x: x * next(m.it[0]), it=[numbers()]),
    "in a slot": lambda: Calls(lambda m, x: x * next(m.it.last), it=with_last(Slotted(), numbers())),
    "caught": lambda: Calls(swallowing, it=numbers()),
    "global": lambda: Calls(global_iterator),
    "in a global list": lambda: Calls(in_global_list),
    "default": lambda: Calls(in_default),
    "closure": lambda: Calls(enclosed()),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_is_not_advanced(name):
    module = ITERATORS[name]()
    one = module(X).detach()
    with pytest.raises(bridge.BridgeError, match="advances an iterator that was made before it"):
        call(module)
    two = module(X).detach()
    assert not torch.equal(one, two)
    torch.testing.assert_close(two, one + X * (one[0, 0] if name != "sent" else 2))  # it has not missed one


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


def test_stale_weights_by_the_identity_of_a_tensor_are_refused():
    cache = {}

    def forward(m, x):
        key = id(m.w), m
        if key not in cache:
            cache[key] = m.w.detach() * 2
        with torch.no_grad():
            m.w.mul_(0.5)
        return x @ cache[key]

    module = Calls(forward)
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError, match=r"changes .*a later call would read it"):
        fn.run(fn.params, fn.buffers, jnp.ones((2, 3)))
    assert not cache


class Failing(Calls):
    n, log = 0, []

    def forward(self, x, held=[1]):  # noqa: B006 (which is the case)
        type(self).n += 1
        self.log.append(x)
        held.append(x)
        self.it[0].seed(1)
        self.it[1][0] += 1
        raise KeyError(next(self.it[2][0], 0))


def test_a_call_that_fails_leaves_nothing_either():
    held = [random.Random(0), bytearray(1), (GLOBAL_LIST[0],)]
    module, state = Failing(None, it=held), held[0].getstate()
    with pytest.raises(bridge.BridgeError, match="advances an iterator"):
        call(module)
    module.it = [*held[:2], [iter([])]]
    with pytest.raises(bridge.BridgeError, match="advances an iterator"):
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
