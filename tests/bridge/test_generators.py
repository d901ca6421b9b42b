"""Numbers from a generator that the call seeds are PyTorch's own; one that was seeded before the call is refused."""

import random
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, differentiated, in_jax, raises, verified

import bridge

HELD = random.random, np.random.rand  # as by `from random import random`
OUTSIDE = torch.Generator().manual_seed(5)


def seeded_in_forward(x):
    return x + torch.randn(4, generator=torch.Generator().manual_seed(0))


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


def state_restored(x):
    torch.manual_seed(4)
    state = torch.get_rng_state()
    first = torch.rand(4)
    torch.set_rng_state(state)
    return x + first - torch.rand(4)


SEEDED = [
    seeded_in_forward, fork, default_seeded, dropout_after_seed, permutation, state_restored,
]  # fmt: skip


@pytest.mark.parametrize("function", SEEDED, ids=lambda f: f.__name__)
def test_seeded_numbers_are_pytorchs(function):
    x = torch.linspace(-1, 1, 4)
    torch.manual_seed(99)
    expected = function(x)
    state = torch.get_rng_state()
    for key in (None, jax.random.key(0)):
        np.testing.assert_allclose(in_jax(function, x, rng=key, jit=True), expected, rtol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)  # the caller's numbers are not touched
    verified(function, x)


def test_after_a_fork_draws_follow_the_key_again():
    def forward(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            torch.rand(2)
        return x + torch.rand(4)

    one, other = (in_jax(forward, jnp.zeros(4), rng=jax.random.key(seed), jit=True) for seed in (0, 1))
    assert not np.array_equal(one, other)
    raises("draws random numbers but the call has no key", forward, jnp.zeros(4))


KEPT = {
    "attribute": (lambda generator: generator, lambda kept: kept),
    "list": (lambda generator: [generator], lambda kept: kept[0]),
    "object": (lambda generator: types.SimpleNamespace(generator=generator), lambda kept: kept.generator),
}


def keeping(where, seed_in_forward):
    put, find = KEPT[where]

    def forward(m, x):
        if seed_in_forward:
            find(m.kept).manual_seed(6)
        return x + torch.rand(4, generator=find(m.kept))

    return Calls(forward, kept=put(torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("where", KEPT)
def test_a_generator_from_before_the_call_is_refused_unless_the_call_seeds_it(where):
    x = torch.zeros(4)
    module = keeping(where, False)
    raises(r"torch\.Generator that was made before the call", module, x, rng=jax.random.key(0))
    np.testing.assert_array_equal(module(x), keeping(where, False)(x))  # its state is as it was
    np.testing.assert_array_equal(in_jax(keeping(where, True), x, jit=True), keeping(where, True)(x))


def test_one_that_is_global_or_enclosed_is_seen_by_verify():
    local = torch.Generator().manual_seed(5)
    assert not bridge.verify(Call(lambda x: x + torch.rand(4, generator=OUTSIDE)), torch.zeros(4)).ok
    with pytest.raises(bridge.BridgeError, match="made before the call"):  # closures are copied with the module
        bridge.verify(Call(lambda x: x + torch.rand(4, generator=local)), torch.zeros(4))


def test_one_that_is_passed_is_refused():
    with pytest.raises(bridge.BridgeError, match="made before the call"):
        in_jax(lambda generator: torch.rand(4, generator=generator), torch.Generator().manual_seed(5))


def test_seeded_draws_around_traced_numbers_are_refused():
    def draw(p):
        return torch.bernoulli(p, generator=torch.Generator().manual_seed(0))

    raises("seeded generator around traced values", draw, jnp.full(4, 0.5))


@pytest.fixture(params=["alone", "beside a thread that draws"])
def threads(request):
    """Another thread may draw from the same generators, as a loader of data does."""
    stop = threading.Event()

    def draw():
        while not stop.is_set():
            _ = random.random(), np.random.rand(), time.sleep(1e-4)

    other = threading.Thread(target=draw)
    if request.param != "alone":
        other.start()
    yield request.param
    stop.set()
    if other.ident:
        other.join()


FOREIGN = {
    "random": HELD[0],
    "random.choice": lambda: random.choice([1, 2]),
    "random.seed": lambda: random.seed(3) or 1,
    "numpy.random.rand": HELD[1],
    "numpy.random.randn": np.random.randn,
    "numpy.random.seed": lambda: np.random.seed(3) or 1,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_numbers_of_python_and_numpy_are_refused(name, threads):
    np.random.seed(0)
    np.random.randn()  # keeps a second number, which the next draw takes without the generator
    state = random.getstate(), str(np.random.get_state())

    def forward(x, draw=FOREIGN[name]):
        return x * float(draw())

    place = rf"in the module itself .*{__name__}\.py:\d+\. Remedy: draw with torch"
    raises(rf"drew random numbers from `(numpy\.)?random`, .* {place}", forward, jnp.ones(4))
    if threads == "alone":
        assert state == (random.getstate(), str(np.random.get_state()))


def test_numbers_that_another_thread_draws_are_not_the_call_s(threads):
    generator = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    np.testing.assert_array_equal(in_jax(lambda x: (time.sleep(0.01), x + 1)[1], jnp.ones(2)), 2 * np.ones(2))
    assert np.random.get_bit_generator() is generator  # pyright: ignore[reportAttributeAccessIssue]


def test_numbers_of_python_in_a_backward_are_refused(threads):
    apply = differentiated(lambda ctx, x: x * 2, lambda ctx, g: g * random.random()).apply
    with pytest.raises(bridge.BridgeError, match=r"drew random numbers from `random`"):
        jax.grad(lambda x: in_jax(apply, x).sum())(jnp.ones(4))
