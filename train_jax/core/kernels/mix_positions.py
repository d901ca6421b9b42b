"""The gated MLP over positions with its residual sum, by Pallas kernels for TPU.

The kernels go through the examples once and keep the weights in the vector memory. Channels are the last axis, as in
memory, and positions are filled up with zeros to a multiple of 128, which the matrix unit does in any case.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models_torch.layers import round_up
from train_jax.core.kernels.blocks import LANES, SUBLANES, VECTOR_MEMORY, Latent, dot, gated, gated_gradients, once
from train_jax.core.kernels.normed_mlp import swiglu

_MOST_EXAMPLES = 4


def mix_positions(
    x: Latent, gate_up: Float[Array, "twice_width positions"], down: Float[Array, "positions width"]
) -> Latent:
    """Returns `x` plus the gated MLP over its positions by operations of JAX."""
    gate, up = (jnp.einsum("wp,bpc->bwc", part.astype(x.dtype), x) for part in jnp.split(gate_up, 2))
    return x + jnp.einsum("pw,bwc->bpc", down.astype(x.dtype), jax.nn.silu(gate) * up)


def joined_mix_positions(
    x: Latent, gate_up: Float[Array, "twice_width positions"], down: Float[Array, "positions width"]
) -> Latent:
    """Computes `mix_positions` in the order of operations that is fastest with XLA's compiler for CPUs.

    Gate and up are one product, and positions are mixed on transposed activations. On a TPU both cost more than they
    save: the gradients of the parts are concatenated there, and channels leave the last axis.
    """
    return x + swiglu(x.swapaxes(1, 2), gate_up, down, joined=True).swapaxes(1, 2)


def fused_mix_positions(
    x: Latent,
    gate_up: Float[Array, "twice_width positions"],
    down: Float[Array, "positions width"],
    *,
    interpret: bool = False,
) -> Latent:
    """Computes `mix_positions` by Pallas kernels for TPU if `examples_of` is not 0, otherwise by operations of JAX.

    Precision, derivatives and `interpret` are those of `train_jax.core.kernels.normed_mlp.fused_normed_mlp`.
    """
    if not examples_of(x, down.shape[1]):
        return mix_positions(x, gate_up, down)
    return _fused(interpret, x, gate_up, down)


def examples_of(x: Any, width: int) -> int:
    """Returns how many examples a step of the kernels computes; 0 where they do not serve the shape or dtype of `x`.

    They serve bfloat16, hidden sizes and widths of multiples of 128, and examples that fit into the vector memory of a
    TPU v4.
    """
    if x.ndim != 3 or x.dtype != jnp.bfloat16 or x.shape[2] % LANES or width % LANES:
        return 0
    batch, positions, hidden = x.shape
    filled = round_up(positions, LANES)
    weights = 2 * 3 * width * filled * (2 + 2 + 4) + 4 * 2 * filled * hidden + 4 * 8 * width * 2 * LANES
    example = 2 * 2 * hidden * (3 * round_up(positions, 2 * SUBLANES) + 2 * width)
    fitting = max(0, VECTOR_MEMORY - weights) // example
    counts = [count for count in range(min(fitting, _MOST_EXAMPLES), 0, -1) if batch % count == 0]
    of_two_cores = [count for count in counts if batch % (2 * count) == 0]
    return next(iter(of_two_cores or counts), 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(interpret: bool, x: Latent, gate_up: Array, down: Array) -> Latent:
    return _forward(interpret, x, gate_up, down, keep=False)[0]


def _fused_fwd(interpret, x, gate_up, down):
    out, *kept = _forward(interpret, x, gate_up, down, keep=True)
    return out, (x, *kept, gate_up, down)


def _fused_bwd(interpret, residuals, cotangent):
    return _backward(interpret, residuals, cotangent)


_fused.defvjp(_fused_fwd, _fused_bwd)


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("keep",))
def _forward(interpret: bool, x: Latent, gate_up: Array, down: Array, *, keep: bool) -> list[Array]:
    """Returns the result and, with `keep`, gate and up `(batch, width, hidden)`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (batch, positions, hidden), width = x.shape, down.shape[1]
    examples = examples_of(x, width)
    filled = round_up(positions, LANES)
    rows = round_up(positions, SUBLANES)
    chunk = 2 * LANES if hidden % (2 * LANES) == 0 else LANES

    def kernel(x_ref, gate_ref, up_ref, down_ref, out_ref, *rest):
        *kept, filled_ref = rest
        filled_ref[positions:] = jnp.zeros((filled - positions, hidden), jnp.float32)
        for example in range(examples):
            filled_ref[:positions] = x_ref[example].astype(jnp.float32)
            for start in range(0, hidden, chunk):
                part = slice(start, start + chunk)
                values = filled_ref[:, part].astype(x.dtype)
                gate = dot(gate_ref[...], values, 1, 0)
                up = dot(up_ref[...], values, 1, 0)
                for ref, value in zip(kept, (gate, up), strict=False):
                    ref[example, :, part] = value.astype(x.dtype)
                added = dot(down_ref[...], gated(gate, up).astype(x.dtype), 1, 0)
                out_ref[example, :, part] = (filled_ref[:positions, part] + added[:positions]).astype(x.dtype)

    def of_examples(size):
        return pl.BlockSpec((examples, size, hidden), lambda i: (i, 0, 0))

    gates = _filled(gate_up, (2 * width, filled), x.dtype)
    downs = _filled(down, (rows, width), x.dtype)
    kept = 2 if keep else 0
    return pl.pallas_call(
        kernel,
        grid=(batch // examples,),
        in_specs=[
            of_examples(positions),
            once((width, filled), (0, 0)),
            once((width, filled), (1, 0)),
            once((rows, width), (0, 0)),
        ],
        out_specs=[of_examples(positions), *[of_examples(width)] * kept],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *[jax.ShapeDtypeStruct((batch, width, hidden), x.dtype)] * kept,
        ],
        scratch_shapes=[pltpu.VMEM((filled, hidden), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="mix_positions",
    )(x, gates, gates, downs)


@functools.partial(jax.jit, static_argnums=(0,))
def _backward(interpret: bool, residuals: tuple[Array, ...], cotangent: Latent) -> tuple[Array, Array, Array]:
    """Returns the gradients by `x` and by both weights. Each core has its own examples, and its own sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    x, gate, up, gate_up, down = residuals
    (batch, positions, hidden), width = x.shape, down.shape[1]
    examples = examples_of(x, width)
    steps = batch // examples
    cores = 2 if steps % 2 == 0 else 1
    filled = round_up(positions, LANES)
    rows = round_up(positions, SUBLANES)

    def of_examples(size):
        return pl.BlockSpec((examples, size, hidden), lambda core, i: (core * (steps // cores) + i, 0, 0))

    gates = _filled(gate_up.T, (rows, 2 * width), x.dtype)
    downs = _filled(down.T, (width, filled), x.dtype)
    by_x, by_weights = pl.pallas_call(
        _gradient_kernel(x.shape, x.dtype, examples, filled),
        grid=(cores, steps // cores),
        in_specs=[
            *(of_examples(size) for size in (positions, positions, width, width)),
            once((rows, width), (0, 0)),
            once((rows, width), (0, 1)),
            once((width, filled), (0, 0)),
        ],
        out_specs=[of_examples(positions), once((1, 3, width, filled), lambda core, _: (core, 0, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((cores, 3, width, filled), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((filled, hidden), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="mix_positions_gradient",
    )(x, cotangent, gate, up, gates, gates, downs)
    by_gate, by_up, by_down = jnp.sum(by_weights, 0)[:, :, :positions]
    return by_x, jnp.concatenate([by_gate, by_up]).astype(gate_up.dtype), by_down.T.astype(down.dtype)


def _gradient_kernel(shape: tuple[int, ...], dtype: Any, examples: int, filled: int) -> Callable[..., None]:
    """Returns the kernel of `_backward` for this shape: `examples` at a time, positions filled to `filled`."""
    from jax.experimental import pallas as pl

    _, positions, hidden = shape

    def kernel(x_ref, by_out_ref, gate_ref, up_ref, wg_ref, wu_ref, wd_ref, by_x_ref, by_weights_ref, *filled_refs):
        @pl.when(pl.program_id(1) == 0)
        def _():
            by_weights_ref[...] = jnp.zeros_like(by_weights_ref)

        for ref in filled_refs:
            ref[positions:] = jnp.zeros((filled - positions, hidden), jnp.float32)
        for example in range(examples):
            for ref, source in zip(filled_refs, (x_ref, by_out_ref), strict=True):
                ref[:positions] = source[example].astype(jnp.float32)
            for start in range(0, hidden, LANES):
                part = slice(start, start + LANES)
                values, by_out = (ref[:, part].astype(dtype) for ref in filled_refs)
                gate, up = (ref[example, :, part].astype(jnp.float32) for ref in (gate_ref, up_ref))
                by_hidden = dot(wd_ref[...], by_out, 1, 0)
                by_up, by_gate, silu = gated_gradients(gate, up, by_hidden, dtype)
                by_weights_ref[0, 0] += dot(by_gate, values, 1, 1)
                by_weights_ref[0, 1] += dot(by_up, values, 1, 1)
                by_weights_ref[0, 2] += dot((silu * up).astype(dtype), by_out, 1, 1)
                by_x = dot(wg_ref[...], by_gate, 1, 0) + dot(wu_ref[...], by_up, 1, 0)
                by_x_ref[example, :, part] = (filled_refs[1][:positions, part] + by_x[:positions]).astype(dtype)

    return kernel


def _filled(weight: Array, shape: tuple[int, int], dtype: Any) -> Array:
    """Returns the weight in `dtype`, with zeros up to `shape`."""
    return jnp.pad(weight.astype(dtype), [(0, size - there) for size, there in zip(shape, weight.shape, strict=True)])
