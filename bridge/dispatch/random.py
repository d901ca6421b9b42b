"""PyTorch's random operations, drawn from one explicit JAX key.

The numbers differ from PyTorch's (another generator), the distributions are the same. Every draw folds its ordinal
into the call's key, so a call is a pure function of the key, and two draws in one call never share numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge._compat.torch import (
    Replacements,
    below_modes,
    default_generator,
    in_place_of_default_generator,
    tree_map_only,
)
from bridge.context import CURRENT, TraceContext
from bridge.errors import BridgeError
from bridge.tensor.arrays import array_of, jax_dtype
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten

_UNSEEDED = range(0x5EED_0F_0_C_A11, 0x5EED_0F_0_C_A11 + 2**32)
"""Seeds of generators that the call has not seeded yet, each its own: PyTorch's dispatcher passes the seed and the
state on, and not the Python object."""
_SEEDS = itertools.cycle(_UNSEEDED)

_BY_SHAPE = (
    "rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "random", "uniform", "normal_functional",
    "exponential", "geometric", "log_normal", "cauchy", "randperm", "bernoulli.p",
)  # fmt: skip
"""Draws whose numbers depend on the shapes of their tensors and not on the values."""


class CallGenerator(torch.Generator):
    """The stand-in, in a traced call, for a generator of the module or its arguments."""

    def __init__(self):
        super().__init__()
        with below_modes():
            self.manual_seed(next(_SEEDS))


def seeded(generator: torch.Generator) -> bool:
    """True unless the bridge made it and the call has not seeded it since."""
    with below_modes():
        seed = generator.initial_seed()
        unused = torch.Generator().manual_seed(seed) if seed in _UNSEEDED else None
        return unused is None or not torch.equal(generator.get_state(), unused.get_state())


class WatchedGenerator:
    """PyTorch's default generator, which notes whether it has been seeded since."""

    def __init__(self):
        self.seeded = False
        self._when_saved: dict[bytes, bool] = {}

    def manual_seed(self, seed: int) -> torch.Generator:
        self.seeded = True
        return default_generator.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        state = default_generator.get_state()
        with below_modes():
            self._when_saved[state.numpy().tobytes()] = self.seeded
        return state

    def set_state(self, state: torch.Tensor) -> None:
        with below_modes():
            self.seeded = self._when_saved.get(state.numpy().tobytes(), True)
        default_generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(default_generator, name)


def _generator_of_thread() -> CallGenerator | WatchedGenerator | None:
    """Returns what stands for the default generator; a call gets its own, unseeded one when it asks for it."""
    if CURRENT.generator is None and CURRENT.call is not None:
        CURRENT.generator = CallGenerator()
    return CURRENT.generator


DEFAULT_GENERATOR = Replacements(in_place_of_default_generator(_generator_of_thread))


@contextlib.contextmanager
def watched_generator() -> Iterator[WatchedGenerator]:
    """In this thread and the code under it, `torch.manual_seed` and its like act on a `WatchedGenerator`."""
    before, CURRENT.generator = CURRENT.generator, WatchedGenerator()
    try:
        with DEFAULT_GENERATOR:
            yield CURRENT.generator
    finally:
        CURRENT.generator = before


def generator_of(given: torch.Generator | None) -> torch.Generator | None:
    """The generator that a draw takes its numbers from; None if that is the default one and the call has not seeded it.

    Raises `LookupError` for one that was made before the call and that the call has not seeded.
    """
    default = CURRENT.generator
    if given is None:
        return default if isinstance(default, CallGenerator) and seeded(default) else None
    if not seeded(given):
        raise LookupError
    return given


def draw(generator: torch.Generator, func: Any, args: tuple, kwargs: dict) -> Any:
    """The operation in PyTorch, with the generator's numbers; tensors of the bridge count by their shape.

    Raises `NotImplementedError` where their values count.
    """
    name = func.name().removeprefix("aten::")
    by_shape = name in _BY_SHAPE or name.partition(".")[0] in _BY_SHAPE

    def zeros(tensor: BridgeTensor) -> torch.Tensor:
        if not by_shape:
            raise NotImplementedError("numbers of a seeded generator around traced values")
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with below_modes():
        args, kwargs = tree_map_only(BridgeTensor, zeros, (args, kwargs))
        if name == "bernoulli.p" and len(args) == 1:
            args = (*args, 0.5)  # the default of `bernoulli_`, whose functional form has none
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        # Not every operation has a form that takes a generator.
        state = default_generator.get_state()
        try:
            default_generator.set_state(generator.get_state())
            out = func(*args, **kwargs)
            generator.set_state(default_generator.get_state())
        finally:
            default_generator.set_state(state)
        return out


# ---- draws from the call's key

Replay = list[jax.Array]
"""Draws made elsewhere, to be used in order instead of a key: how `verify` gives both sides the same numbers."""


@dataclasses.dataclass(frozen=True)
class ShardedKey:
    """One key for a batch split over replicas: row i of the whole batch gets the same numbers however it is split.

    A draw whose first dimension is `rows` is the replica's slice of the draw for the whole batch (counter-based
    generators compute just the slice). Any other draw is the replica's own.
    """

    key: jax.Array
    index: jax.Array | int
    """Which replica this is."""
    count: int
    """How many replicas share the batch."""
    rows: int
    """Rows of the batch on one replica."""


Rng = jax.Array | Replay | ShardedKey


def check_key(rng: Any) -> None:
    """Raises `BridgeError` for what draws cannot come from."""
    if rng is None or isinstance(rng, (list, ShardedKey)):
        return
    if isinstance(rng, (jax.Array, np.ndarray)):
        if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or (rng.dtype == jnp.uint32 and rng.ndim > 0):
            return
        rng = f"an array of {rng.dtype}"
    raise BridgeError(f"rng is a JAX key, such as jax.random.key(0), and not {rng}")


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the numbers of one draw come from: `jax.random` under one key, sliced when the batch is split."""

    rng: jax.Array | ShardedKey
    ordinals: tuple[int, ...]

    def sample(self, sampler: Callable[..., jax.Array], shape: tuple[int, ...], *args: Any) -> jax.Array:
        """`sampler(key, shape, *args)`, as `jax.random`'s samplers are called."""
        rng = self.rng
        if not isinstance(rng, ShardedKey):
            return sampler(self._folded(rng), shape, *args)
        if rng.count > 1 and shape and shape[0] == rng.rows:
            whole = sampler(self._folded(rng.key), (rng.count * rng.rows, *shape[1:]), *args)
            return jax.lax.dynamic_slice_in_dim(whole, rng.index * rng.rows, rng.rows)
        key = self._folded(rng.key)
        return sampler(jax.random.fold_in(key, rng.index) if rng.count > 1 else key, shape, *args)

    def _folded(self, key: jax.Array) -> jax.Array:
        for ordinal in self.ordinals:
            key = jax.random.fold_in(key, ordinal)
        return key


Draw = Callable[..., jax.Array]


def _uniforms(source: Source, meta: torch.Tensor) -> jax.Array:
    return source.sample(jax.random.uniform, tuple(meta.shape), jax_dtype(meta.dtype))


def _normals(source: Source, meta: torch.Tensor) -> jax.Array:
    return source.sample(jax.random.normal, tuple(meta.shape), jax_dtype(meta.dtype))


def _integers(source: Source, meta: torch.Tensor, low: Any, high: Any) -> jax.Array:
    dtype = jnp.int32 if meta.dtype.is_floating_point else jax_dtype(meta.dtype)
    return source.sample(jax.random.randint, tuple(meta.shape), low, high, dtype).astype(jax_dtype(meta.dtype))


def _coin(source: Source, meta: torch.Tensor, p: Any) -> jax.Array:
    # Compared in float32: bf16 uniforms have 2**-8 steps, which would bias the probability.
    return (source.sample(jax.random.uniform, tuple(meta.shape)) < p).astype(jax_dtype(meta.dtype))


def _full_range(source: Source, meta: torch.Tensor) -> jax.Array:
    """All integers the dtype represents exactly; int64 stored in 32 bits gets the 32-bit range."""
    dtype = jax_dtype(meta.dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return _integers(source, meta, 0, 2 ** min(jnp.finfo(dtype).nmant + 1, 31) - 1)
    return _integers(source, meta, 0, int(jnp.iinfo(dtype).max))


def _permutation(source: Source, meta: torch.Tensor, n: Any) -> jax.Array:
    return source.sample(lambda key, shape: jax.random.permutation(key, *shape), (n,)).astype(jax_dtype(meta.dtype))


def _geometric(source, meta, _self, p, **_):
    # Trials up to the first success, as PyTorch counts: 1, 2, …
    tails = jnp.log1p(-source.sample(jax.random.uniform, tuple(meta.shape)))
    return jnp.maximum(jnp.ceil(tails / jnp.log1p(-p)), 1).astype(jax_dtype(meta.dtype))


def _multinomial(source, meta, weights, count, replacement=False, **_):
    logits = jnp.log(weights.astype(jnp.float32))
    # The largest of Gumbel-perturbed logits is a draw; the `count` largest are draws without replacement, in order.
    if not replacement:
        scores = logits + source.sample(jax.random.gumbel, logits.shape)
        return jax.lax.top_k(scores, count)[1].astype(jax_dtype(meta.dtype))
    noise = source.sample(jax.random.gumbel, (*logits.shape[:-1], count, logits.shape[-1]))
    return jnp.argmax(logits[..., None, :] + noise, axis=-1).astype(jax_dtype(meta.dtype))


def _poisson(source, meta, rates, **_):
    # With a key for each number: those that JAX draws with one key depend on the rates beside them.
    shape = tuple(meta.shape)
    keys = source.sample(jax.random.split, shape)
    keys, rates = jnp.reshape(keys, (-1, *keys.shape[len(shape) :])), jnp.reshape(rates, -1).astype(jnp.float32)
    numbers = jax.vmap(jax.random.poisson)(keys, jax.lax.stop_gradient(rates))
    return jnp.reshape(numbers, shape).astype(jax_dtype(meta.dtype))


def _normal(source: Source, meta: torch.Tensor, mean: Any = 0.0, std: Any = 1.0) -> jax.Array:
    return mean + std * _normals(source, meta)


RANDOM: dict[Any, Draw] = {
    **dict.fromkeys(
        (aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.rand_like.generator),
        lambda source, meta, *_args, **_: _uniforms(source, meta),
    ),
    **dict.fromkeys(
        (aten.randn.default, aten.randn.generator, aten.randn_like.default, aten.randn_like.generator),
        lambda source, meta, *_args, **_: _normals(source, meta),
    ),
    **dict.fromkeys(
        (aten.randint.default, aten.randint.generator),
        lambda source, meta, high, *_args, **_: _integers(source, meta, 0, high),
    ),
    **dict.fromkeys(
        (aten.randint.low, aten.randint.low_generator),
        lambda source, meta, low, high, *_args, **_: _integers(source, meta, low, high),
    ),
    aten.randint_like.default: lambda source, meta, _self, high, **_: _integers(source, meta, 0, high),
    aten.randint_like.low_dtype: lambda source, meta, _self, low, high, **_: _integers(source, meta, low, high),
    aten.random.to: lambda source, meta, _self, to, **_: _integers(source, meta, 0, to),
    getattr(aten.random, "from"): lambda source, meta, _self, low, to, **_: _integers(source, meta, low, to),
    **dict.fromkeys(
        (aten.randperm.default, aten.randperm.generator), lambda source, meta, n, **_: _permutation(source, meta, n)
    ),
    **dict.fromkeys(
        (aten.bernoulli.p, aten.bernoulli.Tensor), lambda source, meta, _self, p=0.5, **_: _coin(source, meta, p)
    ),
    **dict.fromkeys(
        (aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.float_float),
        lambda source, meta, mean, std=1.0, *_size, **_: _normal(source, meta, mean, std),
    ),
    aten.random.default: lambda source, meta, _self, **_: _full_range(source, meta),
    aten.bernoulli.default: lambda source, meta, probabilities, **_: _coin(source, meta, probabilities),
    aten.uniform.default: lambda source, meta, _self, low=0.0, high=1.0, **_: (
        low + (high - low) * _uniforms(source, meta)
    ),
    aten.normal_functional.default: lambda source, meta, _self, mean=0.0, std=1.0, **_: _normal(
        source, meta, mean, std
    ),
    aten.exponential.default: lambda source, meta, _self, lambd=1.0, **_: -jnp.log1p(-_uniforms(source, meta)) / lambd,
    aten.log_normal.default: lambda source, meta, _self, mean=1.0, std=2.0, **_: jnp.exp(
        _normal(source, meta, mean, std)
    ),
    aten.cauchy.default: lambda source, meta, _self, median=0.0, sigma=1.0, **_: (
        median + sigma * jnp.tan(jnp.pi * (_uniforms(source, meta) - 0.5))
    ),
    aten.geometric.default: _geometric,
    aten.multinomial.default: _multinomial,
    aten.poisson.default: _poisson,
}
"""Random op -> (source, meta of the result, *the op's arguments as arrays, **keywords) -> array."""


def drawn_numbers(
    context: TraceContext, func: Any, args: tuple, kwargs: dict, by_key: Callable[[Source], jax.Array]
) -> Any:
    """Random numbers: of a seeded generator, of a recorded call, or of the key."""
    generator = seeded_generator(context, func, kwargs)
    if generator is not None:
        return array_of(draw(generator, func, args, kwargs))
    context.draws += 1
    if isinstance(context.rng, list):
        return context.rng[context.draws - 1]
    if context.rng is None:
        what = f"`{func.name()}` draws random numbers"
        if context.is_backward:
            what += " in the backward of a torch.autograd.Function, which has no key"
            raise context.error(what, "draw in its forward and save the numbers")
        remedy = "pass rng=jax.random.key(…), or train=False if the module draws in training only"
        raise context.error(f"{what} but the call has no key", remedy)
    return by_key(Source(context.rng, (context.draws,)))


def seeded_generator(context: TraceContext, func: Any, kwargs: dict) -> torch.Generator | None:
    """The seeded generator that the operation draws from."""
    try:
        return generator_of(kwargs.get("generator"))
    except LookupError:
        raise context.error(
            f"`{func.name()}` draws from a torch.Generator that was made before the call, so each call would draw "
            "other numbers in PyTorch",
            "seed it in the call, or leave the generator out and pass rng=jax.random.key(…)",
        ) from None
