"""The gated MLP of a block with its residual sum and both norms, by Pallas kernels for TPU.

XLA computes `rms_norm(y + down(silu(gate(y)) * up(y)))` of `y = rms_norm(x)` and its gradients by about a dozen kernels
and writes the activations of the hidden width to memory between them. Here the forward pass is one kernel, and so is
the backward pass. Both keep the weights in the vector memory and go through the rows once. `docs/performance.md` has
their scheduled bundles.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from train_jax.core.kernels.blocks import (
    LANES,
    Blocks,
    Latent,
    blocks_of,
    chunk_of,
    dot,
    gated,
    gated_gradients,
    once,
    place_of,
    rows_of,
    write_rows,
)


def normed_mlp(
    x: Latent,
    gate_up: Float[Array, "twice_width hidden"],
    down: Float[Array, "hidden width"],
    epsilon: float,
    dim: int = -1,
    *,
    joined: bool = False,
) -> Latent:
    """Returns `rms_norm(y + swiglu(y))` of `y = rms_norm(x, dim)` by operations of JAX; `joined` as in `swiglu`."""
    x = _rms_norm(x, epsilon, dim)
    return _rms_norm(x + swiglu(x, gate_up, down, joined=joined), epsilon, -1)


joined_normed_mlp = functools.partial(normed_mlp, joined=True)
"""`normed_mlp` in the order of operations that is fastest on CPUs; see `mix_positions.joined_mix_positions`."""


def swiglu(
    x: Float[Array, "*batch features"],
    gate_up: Float[Array, "twice_width features"],
    down: Float[Array, "features width"],
    *,
    joined: bool = False,
) -> Float[Array, "*batch features"]:
    """Returns `down(silu(gate) * up)`, with gate and up as two products or, `joined`, as the halves of one."""

    def product(weight: Array) -> Array:
        return jnp.einsum("...h,wh->...w", x, weight.astype(x.dtype))

    gate, up = jnp.split(product(gate_up), 2, axis=-1) if joined else map(product, jnp.split(gate_up, 2))
    return jnp.einsum("...w,hw->...h", jax.nn.silu(gate) * up, down.astype(x.dtype))


def _rms_norm(x: Latent, epsilon: float, dim: int) -> Latent:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), dim, keepdims=True) + epsilon)).astype(x.dtype)


def fused_normed_mlp(
    x: Latent,
    gate_up: Float[Array, "twice_width hidden"],
    down: Float[Array, "hidden width"],
    epsilon: float,
    dim: int = -1,
    *,
    interpret: bool = False,
) -> Latent:
    """Computes `normed_mlp` by Pallas kernels for TPU if `blocks_of` has blocks for it, otherwise by operations of JAX.

    `x` is rounded to bfloat16 before every product, as are the hidden activations; sums, the residual and the norm are
    float32. The gradients of the weights are summed in float32. The kernels have a gradient, but no `jvp` and no
    gradient of the gradient. `interpret` runs them on any machine, slowly.
    """
    over_positions = dim % x.ndim == 1
    blocks = blocks_of(x, down.shape[1])
    if blocks is None or (over_positions and blocks.of_an_example > 1):
        return normed_mlp(x, gate_up, down, epsilon, dim)
    return _fused(_Norm(epsilon, over_positions), blocks, interpret, x, gate_up, down)


@dataclasses.dataclass(frozen=True)
class _Norm:
    """The norm before the MLP, over positions or over the hidden size."""

    epsilon: float
    over_positions: bool

    def factor(self, rows: Array, blocks: Blocks) -> Array:
        """Returns the factor of each row of a block; added rows are zeros."""
        return jax.lax.rsqrt(self._mean(jnp.square(rows), blocks) + self.epsilon)

    def gradient(self, normed: Array, factor: Array, by_normed: Array, blocks: Blocks) -> Array:
        """Returns the gradient with respect to the rows."""
        return factor * (by_normed - normed * self._mean(normed * by_normed, blocks))

    def _mean(self, rows: Array, blocks: Blocks) -> Array:
        if not self.over_positions:
            return jnp.mean(rows, -1, keepdims=True)
        examples = jnp.reshape(rows, (blocks.examples, blocks.padded, rows.shape[1]))
        means = jnp.sum(examples, 1, keepdims=True) / blocks.positions
        return jnp.reshape(jnp.broadcast_to(means, examples.shape), rows.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused(norm: _Norm, blocks: Blocks, interpret: bool, x: Latent, gate_up: Array, down: Array) -> Latent:
    return _forward(norm, blocks, interpret, x, gate_up, down, keep=False)[0]


def _fused_fwd(norm, blocks, interpret, x, gate_up, down):
    out, *kept = _forward(norm, blocks, interpret, x, gate_up, down, keep=True)
    return out, (x, out, *kept, gate_up, down)


def _fused_bwd(norm, blocks, interpret, residuals, cotangent):
    return _backward(norm, blocks, interpret, residuals, cotangent)


_fused.defvjp(_fused_fwd, _fused_bwd)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("keep",))
def _forward(norm: _Norm, blocks: Blocks, interpret: bool, x: Latent, gate_up: Array, down: Array, *, keep: bool):
    """Returns the result and, with `keep`, the factor of the norm of each row, gate and up, all of them in blocks."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    hidden, width = down.shape
    chunk = chunk_of(width)

    def kernel(x_ref, gate_ref, up_ref, down_ref, out_ref, *rest):
        *kept, rows_ref = rest
        total = rows_of(blocks, pl.program_id(0), x_ref, rows_ref, x.shape)
        total *= norm.factor(total, blocks)
        narrow = total.astype(x.dtype)
        for start in range(0, width, chunk):
            part = slice(start, start + chunk)
            gate = dot(narrow, gate_ref[part, :], 1, 1)
            up = dot(narrow, up_ref[part, :], 1, 1)
            if keep:
                _, kept_gate, kept_up = kept
                kept_gate[0, :, part], kept_up[0, :, part] = gate.astype(x.dtype), up.astype(x.dtype)
            total += dot(gated(gate, up).astype(x.dtype), down_ref[:, part], 1, 1)
        factor = jax.lax.rsqrt(jnp.mean(jnp.square(total), -1, keepdims=True) + norm.epsilon)
        write_rows(blocks, total * factor, out_ref)
        if keep:
            kept[0][0] = factor

    def of_rows(size):
        return pl.BlockSpec((1, blocks.rows, size), lambda i: (i, 0, 0))

    latent = pl.BlockSpec((blocks.examples, blocks.positions, hidden), place_of(blocks))
    kept = [(1, jnp.float32), (width, x.dtype), (width, x.dtype)] if keep else []
    weights = gate_up.astype(x.dtype), down.astype(x.dtype)
    return pl.pallas_call(
        kernel,
        grid=(blocks.steps,),
        in_specs=[latent, once((width, hidden), (0, 0)), once((width, hidden), (1, 0)), once((hidden, width), (0, 0))],
        out_specs=[latent, *(of_rows(size) for size, _ in kept)],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *(jax.ShapeDtypeStruct((blocks.steps, blocks.rows, size), dtype) for size, dtype in kept),
        ],
        scratch_shapes=[pltpu.VMEM((blocks.rows, hidden), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="normed_mlp",
    )(x, weights[0], weights[0], weights[1])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _backward(norm: _Norm, blocks: Blocks, interpret: bool, residuals: tuple[Array, ...], cotangent: Latent):
    """Returns the gradients by `x` and by both weights.

    Each half of the hidden width goes through all rows, on a core of its own where a device has two. So each has a part
    of the gradient by `x`, and whole gradients for its part of the weights.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    x, out, factor, gate, up, gate_up, down = residuals
    hidden, width = down.shape
    half = width // 2

    def of_rows(size, at):
        return pl.BlockSpec((1, blocks.rows, size), at)

    place = place_of(blocks)
    latent = pl.BlockSpec((blocks.examples, blocks.positions, hidden), lambda _, i: place(i))
    of_half = of_rows(half, lambda core, i: (i, 0, core))
    weights = gate_up.astype(x.dtype), down.astype(x.dtype)
    by_x, by_gate_up, by_down = pl.pallas_call(
        _gradient_kernel(norm, blocks, x.shape, x.dtype, half),
        grid=(2, blocks.steps),
        in_specs=[
            *(latent, latent, latent, of_rows(1, lambda _, i: (i, 0, 0)), of_half, of_half),
            once((half, hidden), lambda core, _: (core, 0)),
            once((half, hidden), lambda core, _: (2 + core, 0)),
            once((hidden, half), lambda core, _: (0, core)),
        ],
        out_specs=[
            pl.BlockSpec((1, blocks.examples, blocks.positions, hidden), lambda core, i: (core, *place(i))),
            once((2, half, hidden), lambda core, _: (0, core, 0)),
            once((half, hidden), lambda core, _: (core, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((2, *x.shape), x.dtype),
            jax.ShapeDtypeStruct((2, width, hidden), jnp.float32),
            jax.ShapeDtypeStruct((width, hidden), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((blocks.rows, hidden), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="normed_mlp_gradient",
    )(x, out, cotangent, factor, gate, up, weights[0], weights[0], weights[1])
    by_x = (by_x[0].astype(jnp.float32) + by_x[1].astype(jnp.float32)).astype(x.dtype)
    return by_x, by_gate_up.reshape(gate_up.shape).astype(gate_up.dtype), by_down.T.astype(down.dtype)


def _gradient_kernel(norm: _Norm, blocks: Blocks, shape: tuple[int, ...], dtype: Any, half: int) -> Callable[..., None]:
    """Returns the kernel of `_backward` for inputs of this shape and one half of the hidden width."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, out_ref, by_out_ref, factor_ref, gate_ref, up_ref, wg_ref, wu_ref, wd_ref, *rest):
        by_x_ref, by_gate_up_ref, by_down_ref, rows_ref = rest
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _():
            by_gate_up_ref[...] = jnp.zeros_like(by_gate_up_ref)
            by_down_ref[...] = jnp.zeros_like(by_down_ref)

        rows, normed, by_normed = (rows_of(blocks, step, ref, rows_ref, shape) for ref in (x_ref, out_ref, by_out_ref))
        rows_factor = norm.factor(rows, blocks)
        rows *= rows_factor
        narrow = rows.astype(dtype)
        by_sum = factor_ref[0] * (by_normed - normed * jnp.mean(normed * by_normed, -1, keepdims=True))
        by_mlp = by_sum.astype(dtype)
        total = 0.5 * by_sum  # the other half of the width adds the other half
        for start in range(0, half, LANES):
            part = slice(start, start + LANES)
            gate, up = (ref[0, :, part].astype(jnp.float32) for ref in (gate_ref, up_ref))
            by_hidden = dot(by_mlp, wd_ref[:, part], 1, 0)
            by_up, by_gate, silu = gated_gradients(gate, up, by_hidden, dtype)
            total += dot(by_gate, wg_ref[part, :], 1, 0) + dot(by_up, wu_ref[part, :], 1, 0)
            by_gate_up_ref[0, part, :] += dot(by_gate, narrow, 0, 0)
            by_gate_up_ref[1, part, :] += dot(by_up, narrow, 0, 0)
            by_down_ref[part, :] += dot((silu * up).astype(dtype), by_mlp, 0, 0)
        write_rows(blocks, norm.gradient(rows, rows_factor, total, blocks), by_x_ref.at[0])

    return kernel
