"""PyTorch's random operations, drawn from one explicit JAX key.

The numbers differ from PyTorch's (another generator); the distributions are the same. Every draw folds its ordinal
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
from bridge.context import CURRENT, CallState
from bridge.dispatch.schemas import functional_op, is_random, kind_of
from bridge.errors import BridgeError
from bridge.tensor.arrays import array_of, jax_dtype
from bridge.tensor.tensor import BridgeTensor

aten = torch.ops.aten

_UNSEEDED = range(0x5EED_0F_0_C_A11, 0x5EED_0F_0_C_A11 + 2**32)
"""Seeds of generators that the call has not seeded yet, one for each: PyTorch's dispatcher passes the seed and the
state on, but not the Python object."""
_SEEDS = itertools.cycle(_UNSEEDED)


class CallGenerator(torch.Generator):
    """Replaces, in a traced call, a generator of the module or of its arguments."""

    def __init__(self):
        super().__init__()
        self.manual_seed(next(_SEEDS))

    @property
    def seeded(self) -> bool:
        """True if the call has seeded it; code may also ask it for its seed or state, as `torch.initial_seed` does."""
        return self.initial_seed() not in _UNSEEDED


class WatchedGenerator:
    """PyTorch's default generator, which records whether it has been seeded since."""

    seeded = False

    def manual_seed(self, seed: int) -> torch.Generator:
        self.seeded = True
        return default_generator.manual_seed(seed)

    def get_state(self) -> torch.Tensor:
        state = default_generator.get_state()
        state.seeded = self.seeded  # pyright: ignore[reportAttributeAccessIssue]
        return state

    def set_state(self, state: torch.Tensor) -> None:
        self.seeded = getattr(state, "seeded", True)
        default_generator.set_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(default_generator, name)


def _generator_of_thread() -> CallGenerator | WatchedGenerator | None:
    """Returns the substitute for the default generator; a call gets its own, unseeded one when it asks for it."""
    if CURRENT.generator is None and CURRENT.call is not None:
        CURRENT.generator = CallGenerator()
    return CURRENT.generator


DEFAULT_GENERATOR = Replacements(in_place_of_default_generator(_generator_of_thread))


@contextlib.contextmanager
def watched_generator() -> Iterator[WatchedGenerator]:
    """Lets `torch.manual_seed` and its like act on a `WatchedGenerator`, in this thread and the code under it."""
    before = CURRENT.generator
    CURRENT.generator = WatchedGenerator()
    try:
        with DEFAULT_GENERATOR:
            yield CURRENT.generator
    finally:
        CURRENT.generator = before


def generator_of(given: torch.Generator | None) -> torch.Generator | None:
    """Returns `given`; if that is None, the default generator if the call has seeded it."""
    default = CURRENT.generator
    if given is None and isinstance(default, CallGenerator) and default.seeded:
        return default
    return given


def seeded_generator(context: CallState, func: Any, kwargs: dict) -> torch.Generator | None:
    """Returns the seeded generator that the operation draws from, None if it draws from the call's key.

    Raises `BridgeError` for a generator that was made before the call and that the call has not seeded.
    """
    generator = generator_of(kwargs.get("generator"))
    if generator is not None and context.truths:
        what = f"`{func.name()}` draws from a seeded generator on one side of a branch on a traced value"
        raise context.error(what, "draw before the branch")
    if generator is not None and generator.initial_seed() in _UNSEEDED:
        raise context.error(
            f"`{func.name()}` draws from a torch.Generator that was made before the call, so each call would draw "
            "other numbers in PyTorch",
            "seed it in the call, or leave the generator out and pass rng=jax.random.key(…)",
        )
    return generator


def draw(generator: torch.Generator, func: Any, args: tuple, kwargs: dict) -> Any:
    """Runs the operation in PyTorch with the generator's numbers; only the shapes of the bridge's tensors are used.

    Raises `NotImplementedError` if the operation needs their values.
    """

    def zeros(tensor: BridgeTensor) -> torch.Tensor:
        if func in _OF_VALUES or func not in RANDOM:
            raise NotImplementedError("numbers of a seeded generator around traced values")
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    with below_modes():
        args, kwargs = tree_map_only(BridgeTensor, zeros, (args, kwargs))
        if func is aten.bernoulli.p and len(args) == 1:
            args = (*args, 0.5)  # the default of `bernoulli_`, which its functional form lacks
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


@dataclasses.dataclass(frozen=True)
class ShardedKey:
    """One key for a batch split over replicas: row i of the whole batch gets the same numbers for any split.

    A draw whose first dimension is `rows` is the replica's slice of the draw for the whole batch (counter-based
    generators compute just the slice). Any other draw is the replica's own.
    """

    key: jax.Array
    index: jax.Array | int
    """The index of this replica."""
    count: int
    """The number of replicas that share the batch."""
    rows: int
    """Rows of the batch on one replica."""


Rng = jax.Array | ShardedKey | list[jax.Array]
"""A key, or draws made elsewhere, to be used in order; `verify` uses these to give both sides the same numbers."""


def check_key(rng: Any) -> None:
    """Raises `BridgeError` for an object from which nothing can be drawn."""
    if rng is None or isinstance(rng, (list, ShardedKey)):
        return
    if isinstance(rng, (jax.Array, np.ndarray)):
        if jnp.issubdtype(rng.dtype, jax.dtypes.prng_key) or (rng.dtype == jnp.uint32 and rng.ndim > 0):
            return
        rng = f"an array of {rng.dtype}"
    raise BridgeError(f"rng is a JAX key, such as jax.random.key(0), and not {rng}")


@dataclasses.dataclass(frozen=True)
class Source:
    """The numbers of one draw: `jax.random` under the call's key and the draw's ordinal, sliced in a split batch."""

    rng: jax.Array | ShardedKey
    ordinal: int

    def sample(self, sampler: Callable[..., jax.Array], shape: tuple[int, ...], *args: Any) -> jax.Array:
        """Returns `sampler(key, shape, *args)`, as `jax.random`'s samplers are called."""
        rng = self.rng
        shape = tuple(shape)
        if not isinstance(rng, ShardedKey):
            return sampler(self._folded(rng), shape, *args)
        key = self._folded(rng.key)
        if rng.count > 1 and shape and shape[0] == rng.rows:
            whole = sampler(key, (rng.count * rng.rows, *shape[1:]), *args)
            return jax.lax.dynamic_slice_in_dim(whole, rng.index * rng.rows, rng.rows)
        return sampler(jax.random.fold_in(key, rng.index) if rng.count > 1 else key, shape, *args)

    def _folded(self, key: jax.Array) -> jax.Array:
        return jax.random.fold_in(key, self.ordinal)


def drawn_numbers(
    context: CallState, func: Any, args: tuple, kwargs: dict, by_key: Callable[[Source], jax.Array]
) -> Any:
    """Returns random numbers: of a seeded generator, of a recorded call, or of the key."""
    generator = seeded_generator(context, func, kwargs)
    if generator is not None:
        return array_of(draw(generator, func, args, kwargs))
    if context.off_path and isinstance(context.rng, list):
        return by_key(Source(jax.random.key(0), context.draws))
    context.draws += 1
    if isinstance(context.rng, list):
        if context.draws > len(context.rng):
            raise context.error(f"`{func.name()}` draws numbers that were not recorded", "draw the same in each call")
        return context.rng[context.draws - 1]
    if context.rng is not None:
        return by_key(Source(context.rng, context.draws))
    what = "but the call has no key"
    remedy = "pass rng=jax.random.key(…), or train=False if the module draws in training only"
    if context.is_backward:
        what = "in the backward of a torch.autograd.Function, which has no key"
        remedy = "draw in its forward and save the numbers"
    raise context.error(f"`{func.name()}` draws random numbers {what}", remedy)


def _uniforms(source: Source, meta: torch.Tensor, *_args: Any, **_: Any) -> jax.Array:
    return source.sample(jax.random.uniform, meta.shape, jax_dtype(meta.dtype))


def _normals(source: Source, meta: torch.Tensor, *_args: Any, **_: Any) -> jax.Array:
    return source.sample(jax.random.normal, meta.shape, jax_dtype(meta.dtype))


def _normal(source: Source, meta: torch.Tensor, mean: Any = 0.0, std: Any = 1.0, *_size: Any, **_: Any) -> jax.Array:
    return mean + std * _normals(source, meta)


def _integers(source: Source, meta: torch.Tensor, low: Any, high: Any, *_size: Any, **_: Any) -> jax.Array:
    dtype = jnp.int32 if meta.dtype.is_floating_point else jax_dtype(meta.dtype)
    return source.sample(jax.random.randint, meta.shape, low, high, dtype)


def _any_integers(source: Source, meta: torch.Tensor, *_args: Any, **_: Any) -> jax.Array:
    """Draws from all integers that the dtype represents exactly; int64 stored in 32 bits gets the 32-bit range."""
    dtype = jax_dtype(meta.dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return _integers(source, meta, 0, 2 ** min(jnp.finfo(dtype).nmant + 1, 31) - 1)
    return _integers(source, meta, 0, int(jnp.iinfo(dtype).max))


def _coin(source: Source, meta: torch.Tensor, p: Any, **_: Any) -> jax.Array:
    # Compared in float32: bf16 uniforms have 2**-8 steps, which would bias the probability.
    return source.sample(jax.random.uniform, meta.shape) < p


def _permutation(source: Source, meta: torch.Tensor, *_args: Any, **_: Any) -> jax.Array:
    return source.sample(lambda key, shape: jax.random.permutation(key, *shape), meta.shape)


def _geometric(source: Source, meta: torch.Tensor, _self: Any, p: Any, **_: Any) -> jax.Array:
    # Trials up to the first success, as PyTorch counts: 1, 2, …
    tails = jnp.log1p(-source.sample(jax.random.uniform, meta.shape))
    return jnp.maximum(jnp.ceil(tails / jnp.log1p(-p)), 1)


def _multinomial(source: Source, _meta: Any, weights: Any, count: int, replacement: bool = False, **_: Any) -> Any:
    logits = jnp.log(weights.astype(jnp.float32))
    # The largest of Gumbel-perturbed logits is a draw; the `count` largest ones in order are draws without replacement.
    if not replacement:
        return jax.lax.top_k(logits + source.sample(jax.random.gumbel, logits.shape), count)[1]
    noise = source.sample(jax.random.gumbel, (*logits.shape[:-1], count, logits.shape[-1]))
    return jnp.argmax(logits[..., None, :] + noise, axis=-1)


def _each(sampler: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a sampler with a key for each number: numbers that JAX draws with one key depend on their neighbours."""

    def draws(source: Source, meta: torch.Tensor, *parameters: jax.Array, **_: Any) -> jax.Array:
        keys = source.sample(jax.random.split, meta.shape)
        keys = jnp.reshape(keys, (-1, *keys.shape[meta.dim() :]))
        given = [jnp.reshape(jnp.broadcast_to(p, meta.shape), -1).astype(jnp.float32) for p in parameters]
        return jnp.reshape(jax.vmap(sampler)(keys, *map(jax.lax.stop_gradient, given)), tuple(meta.shape))

    return draws


def _dirichlet(source: Source, meta: torch.Tensor, concentration: jax.Array, **_: Any) -> jax.Array:
    """Draws through logarithms, because all gammas of small concentrations would be zero."""
    return jax.nn.softmax(_each(jax.random.loggamma)(source, meta, concentration), -1)


def _operations(names: str) -> list[Any]:
    parts = [name.partition(".") for name in names.split()]
    return [getattr(getattr(aten, name), overload or "default") for name, _, overload in parts]


_DRAWS: dict[str, Callable[..., jax.Array]] = {
    "rand rand.generator rand_like rand_like.generator": _uniforms,
    "randn randn.generator randn_like randn_like.generator": _normals,
    "randint randint.generator": lambda s, meta, high, *_, **__: _integers(s, meta, 0, high),
    "randint.low randint.low_generator": _integers,
    "randint_like randint_like.generator random.to": lambda s, meta, _, high, **__: _integers(s, meta, 0, high),
    "randint_like.low_dtype random.from": lambda s, meta, _, low, high, **__: _integers(s, meta, low, high),
    "random": _any_integers,
    "randperm randperm.generator": _permutation,
    "bernoulli": _coin,
    "bernoulli.p bernoulli.Tensor": lambda s, meta, _, p=0.5, **__: _coin(s, meta, p),
    "normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor normal.float_float": _normal,
    "normal_functional": lambda s, meta, _, *moments, **__: _normal(s, meta, *moments),
    "log_normal": lambda s, meta, _, mean=1.0, std=2.0, **__: jnp.exp(_normal(s, meta, mean, std)),
    "uniform": lambda s, meta, _, low=0.0, high=1.0, **__: low + (high - low) * _uniforms(s, meta),
    "exponential": lambda s, meta, _, rate=1.0, **__: -jnp.log1p(-_uniforms(s, meta)) / rate,
    "cauchy": lambda s, meta, _, mid=0.0, sigma=1.0, **__: mid + sigma * jnp.tan(jnp.pi * (_uniforms(s, meta) - 0.5)),
    "geometric": _geometric,
    "multinomial": _multinomial,
    "poisson": _each(jax.random.poisson),
    "binomial": _each(jax.random.binomial),
    "_standard_gamma": _each(jax.random.gamma),
    "_sample_dirichlet": _dirichlet,
}
RANDOM = {operation: function for names, function in _DRAWS.items() for operation in _operations(names)}
"""Random operation -> function(source, meta of the result, *the operation's arguments as arrays, **keywords)."""


@jax.custom_jvp
def _reparameterized_gamma(draws: jax.Array, concentration: jax.Array) -> jax.Array:
    return draws


@_reparameterized_gamma.defjvp
def _reparameterized_gamma_jvp(primals, tangents):
    """Computes the implicit gradient: the change that keeps the probability of a smaller draw constant."""
    draws, concentration = primals
    _, change = tangents
    return _reparameterized_gamma(draws, concentration), change * jax.lax.random_gamma_grad(concentration, draws)  # pyright: ignore[reportCallIssue]


REPARAMETERIZED: dict[Any, Callable[..., jax.Array]] = {aten._standard_gamma.default: _reparameterized_gamma}
"""Random operation -> function(numbers, *the operation's arguments) that gives the numbers their gradient.

The function for `_sample_dirichlet` is a `torch.autograd.Function` of `torch.distributions`.
"""

_OF_VALUES = _operations(
    "bernoulli bernoulli.Tensor normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor multinomial poisson "
    "binomial _standard_gamma _sample_dirichlet"
)
"""Draws whose numbers depend on the values of their tensors, not only on their shapes."""


def is_draw(func: Any) -> bool:
    """True if an ATen operation, in place or not, is one of those whose numbers `verify` records and replays."""
    if not is_random(func):
        return False
    try:
        return (functional_op(func) if kind_of(func) == "write" else func) in RANDOM
    except NotImplementedError:
        return False
