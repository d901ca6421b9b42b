"""Random numbers from one key: PyTorch's distributions, every draw its own, the same under each transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import array, in_jax, raises, verified
from rows import ROWS
from rows_state import Noise
from torch import nn

import bridge
from bridge.dispatch import random as randomness

DROPPED = nn.Dropout(0.4)


def distributions(x):
    """Many numbers of every kind."""
    weights = torch.tensor([1.0, 2.0, 3.0, 0.0, 4.0]).expand(len(x), 5)
    return {
        "rand": torch.rand_like(x),
        "randn": torch.randn_like(x),
        "uniform_": torch.empty_like(x).uniform_(-1, 2),
        "normal": torch.normal(x + 1, 2.0),
        "normal_": torch.empty_like(x).normal_(1, 2),
        "randint": torch.randint(2, 7, x.shape),
        "randint_like": torch.randint_like(x, 2, 7),
        "random_": torch.empty_like(x).random_(3, 9),
        "bernoulli": torch.bernoulli(torch.full_like(x, 0.3)),
        "bernoulli_": torch.empty_like(x).bernoulli_(0.7),
        "exponential_": torch.empty_like(x).exponential_(2.0),
        "geometric_": torch.empty_like(x).geometric_(0.3),
        "log_normal_": torch.empty_like(x).log_normal_(0.5, 0.3),
        "cauchy_": torch.empty_like(x).cauchy_(1, 2),
        "randperm": torch.randperm(len(x)),
        "multinomial, first": torch.multinomial(weights, 3)[:, 0],
        "multinomial, third": torch.multinomial(weights, 3)[:, 2],
        "multinomial, replaced": torch.multinomial(weights[0], len(x), replacement=True),
        "poisson": torch.poisson(torch.full_like(x, 2.5)),
        "poisson, large": torch.poisson(torch.full_like(x, 40.0)),
        "dropout": F.dropout(x + 1, 0.3),
    }


@pytest.mark.slow
def test_distributions_are_pytorchs():
    """The largest gap of the two empirical distributions: for equal ones above 0.02 with a probability of 7e-4."""
    count = 20_000
    torch.manual_seed(0)
    expected = distributions(torch.zeros(count))
    found = in_jax(distributions, jnp.zeros(count), jit=True, rng=jax.random.key(0))
    for name, theirs in expected.items():
        ours = np.sort(np.asarray(found[name], np.float64))
        theirs = np.sort(theirs.double().numpy())
        places = np.concatenate([ours, theirs])
        gaps = np.searchsorted(ours, places, "right") - np.searchsorted(theirs, places, "right")
        assert np.abs(gaps).max() / count < 0.02, name


def numbers(module, train=True):
    """key -> what the module draws, for an input of zeros (of ones where they are dropped)."""
    x = jnp.ones((64, 8)) if module is DROPPED else jnp.zeros((64, 8))
    return lambda key: in_jax(module, x, rng=key, train=train)


def different(*arrays):
    flat = [np.asarray(a).reshape(-1) for a in arrays]
    return all((a != b).mean() > 0.3 for i, a in enumerate(flat) for b in flat[:i])


def keys(count):
    return jax.random.split(jax.random.key(0), count)


def test_a_key_is_wanted_and_used():
    call = jax.jit(numbers(DROPPED))
    one, again, other = (call(jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert different(one, other)
    assert 0.35 < float((one == 0).mean()) < 0.45
    with pytest.raises(bridge.BridgeError, match=r"draws random numbers but the call has no key .*rng=jax.random.key"):
        numbers(DROPPED)(None)
    assert (numbers(DROPPED, train=False)(None) == 1).all()


def test_every_draw_of_a_call_is_its_own(monkeypatch):
    twice = numbers(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    assert different(*twice(jax.random.key(0)))
    monkeypatch.setattr(randomness.Source, "_folded", lambda self, key: key)
    assert not different(*twice(jax.random.key(0)))


def test_every_draw_has_pytorchs_shape_and_dtype():
    """Another key gives other numbers: nothing is drawn while tracing and kept."""
    module, (args, _) = ROWS["EveryDraw"].build(), ROWS["EveryDraw"].example()
    fn = bridge.export(module)
    arrays = [array(a) for a in args]
    call = jax.jit(lambda key: fn(fn.params, fn.buffers, *arrays, rng=key, train=True)[0])
    expected = module(*args)
    one = call(jax.random.key(0))
    other = call(jax.random.key(1))
    assert (one.shape, str(one.dtype)) == (tuple(expected.shape), "float32")
    assert different(one, other)


@pytest.mark.slow
def test_vmap_over_keys_is_the_calls_one_by_one():
    for module in (DROPPED, Noise()):
        call = numbers(module)
        batched = jax.vmap(call)(keys(3))
        for i, key in enumerate(keys(3)):
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda a, i=i: a[i], batched), call(key))
        assert different(*jax.tree.leaves(batched)[0])


def test_one_key_for_a_vmapped_batch_is_one_draw_for_all():
    """JAX's own rule: what does not depend on the mapped axis is the same along it. Split the key to have others."""
    out = jax.vmap(lambda x: in_jax(DROPPED, x, rng=jax.random.key(0), train=True))(jnp.ones((3, 64)))
    np.testing.assert_array_equal(out[0], out[1])


def test_scan_over_keys_is_the_calls_one_by_one():
    call = numbers(DROPPED)
    _, stacked = jax.lax.scan(lambda carry, key: (carry, call(key)), 0, keys(3))
    np.testing.assert_array_equal(stacked, jnp.stack([call(key) for key in keys(3)]))
    assert different(*stacked)


@pytest.mark.parametrize("transform", [lambda call: call, jax.checkpoint], ids=["plain", "checkpoint"])
def test_the_gradient_has_the_mask_of_the_values(transform):
    """Made again in the backward pass under `checkpoint`, the draws are the same."""
    call = transform(lambda x: in_jax(DROPPED, x, rng=jax.random.key(0), train=True))
    out, pull = jax.vjp(jax.jit(call), jnp.ones((64, 8)))
    np.testing.assert_array_equal(pull(jnp.ones((64, 8)))[0], out)
    assert {0.0} < set(np.unique(out).tolist())


def test_draws_belong_to_rows_not_to_replicas():
    key = jax.random.key(0)
    x = jnp.linspace(-9, 0, 16).reshape(8, 2)
    whole, own, *others = in_jax(Noise(), x, rng=bridge.ShardedKey(key, 0, 1, 8))
    parts = [in_jax(Noise(), x[4 * i :][:4], rng=bridge.ShardedKey(key, i, 2, 4)) for i in range(2)]
    for i, rows in ((0, whole), (2, others[0]), (3, others[1])):
        np.testing.assert_array_equal(rows, jnp.concatenate([p[i] for p in parts]))
    assert (parts[0][1] != parts[1][1]).all()
    assert own.shape == (3,)


@pytest.mark.parametrize("p", [0.3, 0.0])
@pytest.mark.parametrize("train", [True, False])
def test_native_dropout_called_directly(p, train):
    verified(lambda x: torch.native_dropout(x, p, train), torch.ones(40, 5))


def test_a_mask_of_native_dropout():
    _, kept = in_jax(lambda x: torch.native_dropout(x, 0.3, True), jnp.ones(10000), rng=jax.random.key(0))
    assert abs(float(kept.mean()) - 0.7) < 0.02
    message = r"native_dropout.*pass True"
    raises(message, lambda x: torch.native_dropout(x, 0.3, None), jnp.ones(3), rng=jax.random.key(0))
