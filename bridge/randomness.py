"""PyTorch's random operations, drawn from one explicit JAX key.

The numbers differ from PyTorch's (another generator), the distributions are the same. Every draw folds its ordinal
into the call's key, so a call is a pure function of the key, and two draws in one call never share numbers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from bridge.semantics import jax_dtype

aten = torch.ops.aten
Draw = Callable[..., jax.Array]

RANDOM: dict[Any, Draw] = {}
"""Random op -> (key, meta of the result, *the op's arguments as arrays, **keywords) -> array."""

Replay = list[jax.Array]
"""Draws made elsewhere, to be used in order instead of a key: how `verify` gives both sides the same numbers."""


def is_draw(func: Any) -> bool:
    """Whether an ATen op, in place or not, draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _random(*ops: Any) -> Callable[[Draw], Draw]:
    def register(draw: Draw) -> Draw:
        RANDOM.update(dict.fromkeys(ops, draw))
        return draw

    return register


def _float(meta: torch.Tensor) -> Any:
    return jax_dtype(meta.dtype)


@_random(aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.rand_like.generator)
def _rand(key, meta, *_args, **_kwargs):
    return jax.random.uniform(key, meta.shape, _float(meta))


@_random(aten.randn.default, aten.randn.generator, aten.randn_like.default, aten.randn_like.generator)
def _randn(key, meta, *_args, **_kwargs):
    return jax.random.normal(key, meta.shape, _float(meta))


def _integers(key, meta, low, high):
    if meta.dtype.is_floating_point:
        return jax.random.randint(key, meta.shape, low, high).astype(_float(meta))
    return jax.random.randint(key, meta.shape, low, high, jax_dtype(meta.dtype))


@_random(aten.randint.default, aten.randint.generator)
def _randint(key, meta, high, _size, **_kwargs):
    return _integers(key, meta, 0, high)


@_random(aten.randint.low, aten.randint.low_generator)
def _randint_low(key, meta, low, high, _size, **_kwargs):
    return _integers(key, meta, low, high)


@_random(aten.randint_like.default)
def _randint_like(key, meta, _like, high, **_kwargs):
    return _integers(key, meta, 0, high)


@_random(aten.randint_like.low_dtype)
def _randint_like_low(key, meta, _like, low, high, **_kwargs):
    return _integers(key, meta, low, high)


@_random(aten.random.default)
def _random_full_range(key, meta, _self, **_kwargs):
    # PyTorch's range: all integers the dtype represents exactly; for 32-bit storage of int64 that is the 32-bit range.
    dtype = jax_dtype(meta.dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        high = 2 ** min(jnp.finfo(dtype).nmant + 1, 31) - 1
    else:
        high = int(jnp.iinfo(dtype).max)
    return _integers(key, meta, 0, high)


@_random(aten.random.to)
def _random_to(key, meta, _self, to, **_kwargs):
    return _integers(key, meta, 0, to)


@_random(getattr(aten.random, "from"))
def _random_from(key, meta, _self, low, to, **_kwargs):
    return _integers(key, meta, low, to)


@_random(aten.randperm.default, aten.randperm.generator)
def _randperm(key, meta, n, **_kwargs):
    return jax.random.permutation(key, n).astype(jax_dtype(meta.dtype))


def _coin(key, meta, p):
    # Compared in float32: bf16 uniforms have 2**-8 steps, which would bias the probability.
    return (jax.random.uniform(key, meta.shape) < p).astype(jax_dtype(meta.dtype))


@_random(aten.bernoulli.default)
def _bernoulli(key, meta, probabilities, **_kwargs):
    return _coin(key, meta, probabilities)


@_random(aten.bernoulli.p, aten.bernoulli.Tensor)
def _bernoulli_p(key, meta, _self, p=0.5, **_kwargs):
    return _coin(key, meta, p)


@_random(aten.uniform.default)
def _uniform(key, meta, _self, low=0.0, high=1.0, **_kwargs):
    return jax.random.uniform(key, meta.shape, _float(meta), low, high)


@_random(aten.normal_functional.default)
def _normal(key, meta, _self, mean=0.0, std=1.0, **_kwargs):
    return mean + std * jax.random.normal(key, meta.shape, _float(meta))


@_random(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def _normal_of(key, meta, mean, std=1.0, **_kwargs):
    return mean + std * jax.random.normal(key, meta.shape, _float(meta))


@_random(aten.normal.float_float)
def _normal_sized(key, meta, mean, std, _size, **_kwargs):
    return mean + std * jax.random.normal(key, meta.shape, _float(meta))


@_random(aten.exponential.default)
def _exponential(key, meta, _self, lambd=1.0, **_kwargs):
    return jax.random.exponential(key, meta.shape, _float(meta)) / lambd


@_random(aten.geometric.default)
def _geometric(key, meta, _self, p, **_kwargs):
    return jax.random.geometric(key, p, meta.shape).astype(_float(meta))


@_random(aten.log_normal.default)
def _log_normal(key, meta, _self, mean=1.0, std=2.0, **_kwargs):
    return jnp.exp(mean + std * jax.random.normal(key, meta.shape, _float(meta)))


@_random(aten.cauchy.default)
def _cauchy(key, meta, _self, median=0.0, sigma=1.0, **_kwargs):
    return median + sigma * jax.random.cauchy(key, meta.shape, _float(meta))


@_random(aten.multinomial.default)
def _multinomial(key, meta, weights, count, replacement=False, **_kwargs):
    logits = jnp.log(weights.astype(jnp.float32))
    if replacement:
        draws = jax.random.categorical(key, logits, axis=-1, shape=(count, *logits.shape[:-1]))
        return jnp.moveaxis(draws, 0, -1).astype(jax_dtype(meta.dtype))
    # Without replacement: the largest of Gumbel-perturbed logits are such a sample, in order.
    scores = logits + jax.random.gumbel(key, logits.shape)
    return jax.lax.top_k(scores, count)[1].astype(jax_dtype(meta.dtype))
