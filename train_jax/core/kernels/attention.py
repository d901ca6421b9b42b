"""A block's attention with its residual sum, by Pallas kernels for TPU.

XLA computes `x + output(softmax(q k) v)`, with rotated queries and keys, by about ten kernels and writes the scores of
all heads to memory. Here the forward pass is one kernel, and so is the backward pass. Both keep the weights in the
vector memory and go through the examples once. The backward pass computes the scores again from queries and keys.

Heads are laid out in groups of 128 channels, as many as a TPU register is wide. A product with one head multiplies all
128 channels, with zeros for those of the other heads. The matrix unit does that many anyway, and no register has to be
taken apart.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bridge.lowerings.attention import attention
from models_torch.layers import round_up
from train_jax.core.kernels.blocks import LANES, SUBLANES, VECTOR_MEMORY, Blocks, Latent, dot, once, rows_of, write_rows

Table = Float[Array, "positions half_head_dim"]
Tables = Float[Array, "two rows lanes"]
_MOST_EXAMPLES = 3
"""Most examples of a step. Two take 3 % more bundles in the forward pass; four do not fit at the published size."""
Rows = Float[Array, "rows lanes"]
Scores = Float[Array, "keys queries"]


@dataclasses.dataclass(frozen=True)
class Heads:
    """The examples of a step of the kernels, and the width of their heads."""

    blocks: Blocks
    head_dim: int

    @property
    def in_a_group(self) -> int:
        """Heads in 128 channels."""
        return LANES // self.head_dim

    @property
    def scale(self) -> float:
        """The factor on the product of a query and a key."""
        return self.head_dim**-0.5

    def each(self) -> list[tuple[int, int]]:
        """Returns the pairs of an example and a head of a group."""
        return [(example, head) for example in range(self.blocks.examples) for head in range(self.in_a_group)]

    def example(self, rows: Rows, example: int) -> Rows:
        """Returns the rows of an example."""
        return rows[example * self.blocks.padded : (example + 1) * self.blocks.padded]

    def by_example(self, of_heads: list[Array]) -> list[list[Array]]:
        """Groups the arrays of the pairs of `each` by example."""
        return [of_heads[i : i + self.in_a_group] for i in range(0, len(of_heads), self.in_a_group)]

    def masked(self, rows: Rows, dtype: Any, *, halves_first: bool) -> list[Rows]:
        """Returns the rows of each example and head of a group in `dtype`, with zeros in the channels of other heads.

        `halves_first` says that the first halves of all heads come before the second halves.
        """
        return [self._head(rows, *each, halves_first).astype(dtype) for each in self.each()]

    def _head(self, rows: Rows, example: int, head: int, halves_first: bool) -> Rows:
        channel = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
        width = self.head_dim
        if halves_first:
            channel = channel & (LANES // 2 - 1)
            width = width // 2
        mine = (channel >= head * width) & (channel < (head + 1) * width)
        return jnp.where(mine, self.example(rows, example), 0.0)

    def without_added_keys(self, scores: Scores) -> Scores:
        """Returns the scores with -inf for added keys."""
        if self.blocks.padded == self.blocks.positions:
            return scores
        key = jax.lax.broadcasted_iota(jnp.int32, (self.blocks.padded, 1), 0)
        return jnp.where(key < self.blocks.positions, scores, -jnp.inf)


def heads_of(x: Any, qkv: Any, head_dim: int) -> Heads | None:
    """Returns the layout for inputs of the shapes and dtype of `x` and `qkv`; None where the kernels do not serve them.

    They serve bfloat16, hidden sizes of multiples of 128, as many heads for keys as for queries, heads of 16, 32, 64 or
    128 channels, and up to 128 positions. Weights, their float32 gradients and the rows of an example have to fit into
    the vector memory of a TPU v4: at 97 positions, hidden sizes up to 640 do.
    """
    if x.ndim != 3 or x.dtype != jnp.bfloat16 or x.shape[2] % LANES or x.shape[1] > LANES or not x.size:
        return None
    batch, positions, hidden = x.shape
    if qkv.shape != (3 * hidden, hidden) or head_dim not in (16, 32, 64, 128):
        return None
    padded = round_up(positions, SUBLANES)
    weights = 4 * hidden * hidden * (2 + 4)
    row = 2 * 2 * 7 * hidden + 4 * (4 * hidden + 12 * LANES)  # the temporaries are as measured with the compiler
    fitting = max(0, VECTOR_MEMORY - weights) // (row * padded)
    if not fitting:
        return None
    examples, steps = _divided(batch, min(fitting, _MOST_EXAMPLES))
    return Heads(Blocks(examples, positions, padded, steps, 1), head_dim)


def _divided(batch: int, most: int) -> tuple[int, int]:
    """Returns examples of a step and steps, such that the busier core computes as few examples as possible.

    The backward pass divides an even number of steps between two cores, and takes one core for an odd number.
    """

    def of_a_core(divided: tuple[int, int]) -> int:
        examples, steps = divided
        return examples * steps // (2 - steps % 2)

    steps = {-(-batch // examples) for examples in range(1, most + 1)}
    return min(((-(-batch // count), count) for count in sorted(steps)), key=of_a_core)


def mix_by_attention(
    x: Latent,
    qkv: Float[Array, "three_hidden hidden"],
    output: Float[Array, "hidden hidden"],
    cos: Table | None,
    sin: Table | None,
    head_dim: int,
) -> Latent:
    """Returns `x` plus its attention by operations of JAX, as `models_torch.layers.Attention` computes it."""

    def heads(weight: Array, width: int) -> Float[Array, "batch positions heads width"]:
        products = jnp.einsum("bph,wh->bpw", x, weight.astype(x.dtype))
        return products.reshape(*x.shape[:2], -1, width)

    def rotated(weight: Array) -> Float[Array, "batch positions heads head_dim"]:
        if cos is None or sin is None:
            return heads(weight, head_dim)
        half = head_dim // 2
        parts = weight.reshape(-1, 2, half, x.shape[2])
        first, second = (heads(parts[:, i].reshape(-1, x.shape[2]), half).astype(cos.dtype) for i in (0, 1))
        c = cos[:, None]
        s = sin[:, None]
        return jnp.concatenate((first * c - second * s, second * c + first * s), -1).astype(x.dtype)

    query, key, value = jnp.split(qkv, 3)
    of_heads = (each.swapaxes(1, 2) for each in (rotated(query), rotated(key), heads(value, head_dim)))
    attended = attention(*of_heads).astype(x.dtype).swapaxes(1, 2).reshape(*x.shape[:2], -1)
    return x + jnp.einsum("bpw,hw->bph", attended, output.astype(x.dtype))


def fused_mix_by_attention(
    x: Latent,
    qkv: Float[Array, "three_hidden hidden"],
    output: Float[Array, "hidden hidden"],
    cos: Table | None,
    sin: Table | None,
    head_dim: int,
    *,
    interpret: bool = False,
) -> Latent:
    """Computes `mix_by_attention` by Pallas kernels for TPU if `heads_of` has a result, otherwise by operations of JAX.

    Rotated queries and keys, values, weights of attention and what they make of the values are rounded to bfloat16
    before the next product; scores and sums are float32. The kernels give `cos` and `sin` no gradient. For derivatives
    and `interpret`, see `train_jax.core.kernels.normed_mlp.fused_normed_mlp`.
    """
    heads = heads_of(x, qkv, head_dim)
    of_table = x.shape[1], head_dim // 2
    fit = output.shape == (x.shape[2],) * 2 and all(each is None or each.shape == of_table for each in (cos, sin))
    if heads is None or not fit:
        return mix_by_attention(x, qkv, output, cos, sin, head_dim)
    if cos is None or sin is None:
        return _fused(heads, interpret, x, qkv, output, None)
    tables = _tables(heads, *jax.lax.stop_gradient((cos, sin)))
    return _fused(heads, interpret, x, _halves_first(heads, qkv), output, tables)


def _halves_first(heads: Heads, qkv: Array) -> Array:
    """Reorders the weights of queries and keys: in each 128 channels, first halves of all heads, then second halves.

    Then a roll by 64 channels pairs each channel with its partner. Scores do not depend on the order.
    """
    hidden = qkv.shape[1]
    parts = qkv.reshape(3, hidden // LANES, heads.in_a_group, 2, heads.head_dim // 2, hidden)
    swapped = parts[:2].swapaxes(2, 3).reshape(2 * hidden, hidden)
    return jnp.concatenate([swapped, qkv[2 * hidden :]])


def _tables(heads: Heads, cos: Table, sin: Table) -> Float[Array, "two rows lanes"]:
    """Returns cosines, and sines with the sign of their term, for 128 channels and the rows of a step, padded by 0."""
    wide = jnp.tile(cos, (1, 2 * heads.in_a_group)), jnp.tile(sin, (1, heads.in_a_group))
    tables = jnp.stack([wide[0], jnp.concatenate([-wide[1], wide[1]], -1)]).astype(jnp.float32)
    padded = jnp.pad(tables, ((0, 0), (0, heads.blocks.padded - cos.shape[0]), (0, 0)))
    return jnp.tile(padded, (1, heads.blocks.examples, 1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(heads: Heads, interpret: bool, x: Latent, qkv: Array, output: Array, tables: Array | None) -> Latent:
    return _forward(heads, interpret, x, qkv, output, tables, keep=False)[0]


def _fused_fwd(heads, interpret, x, qkv, output, tables):
    out, *kept = _forward(heads, interpret, x, qkv, output, tables, keep=True)
    return out, (x, *kept, qkv, output, tables)


def _fused_bwd(heads, interpret, residuals, cotangent):
    tables = residuals[-1]
    by_tables = None if tables is None else jnp.zeros_like(tables)  # constants
    return *_backward(heads, interpret, residuals, cotangent), by_tables


_fused.defvjp(_fused_fwd, _fused_bwd)


# ---- the two kernels
#
# Scores have keys along the first axis, so that their maxima and sums are taken over whole registers. Each kind of
# operation is written for all heads of a group and all examples of a step before the next kind: the compiler schedules
# mostly in this order, and one head alone would wait for every result.


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("keep",))
def _forward(
    heads: Heads, interpret: bool, x: Latent, qkv: Array, output: Array, tables: Tables | None, *, keep: bool
) -> list[Array]:
    """Returns the result and, with `keep`, what the backward pass needs: the rotated and scaled queries, the rotated
    keys, the values and the attended values, with the added rows.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks = heads.blocks
    hidden = x.shape[2]
    halves_first = tables is not None

    def kernel(x_ref, q_ref, k_ref, v_ref, output_ref, *rest):
        (tables_ref, *rest) = rest if halves_first else (None, *rest)
        out_ref, *kept, rows_ref = rest
        total = rows_of(blocks, pl.program_id(0), x_ref, rows_ref, x.shape)
        narrow = total.astype(x.dtype)
        for start in range(0, hidden, LANES):
            part = slice(start, start + LANES)
            query, key, value = (dot(narrow, ref[part, :], 1, 1) for ref in (q_ref, k_ref, v_ref))
            query = _rotated(query, tables_ref) * heads.scale
            key = _rotated(key, tables_ref)
            attended = _attended(heads, query, key, value, x.dtype, halves_first=halves_first).astype(x.dtype)
            for ref, rows in zip(kept, (query, key, value, attended), strict=False):
                ref[0, :, part] = rows.astype(x.dtype)
            total += dot(attended, output_ref[:, part], 1, 1)
        write_rows(blocks, total, out_ref)

    latent = pl.BlockSpec((blocks.examples, blocks.positions, hidden), lambda i: (i, 0, 0))
    of_rows = pl.BlockSpec((1, blocks.rows, hidden), lambda i: (i, 0, 0))
    rows_shape = jax.ShapeDtypeStruct((blocks.steps, blocks.rows, hidden), x.dtype)
    weights = qkv.astype(x.dtype)
    constants = [] if tables is None else [tables]
    kept = 4 if keep else 0
    return pl.pallas_call(
        kernel,
        grid=(blocks.steps,),
        in_specs=[
            latent,
            *(once((hidden, hidden), (third, 0)) for third in range(3)),
            once((hidden, hidden), (0, 0)),
            *(once(each.shape, (0, 0, 0)) for each in constants),
        ],
        out_specs=[latent, *[of_rows] * kept],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), *[rows_shape] * kept],
        scratch_shapes=[pltpu.VMEM((blocks.rows, hidden), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="attention",
    )(x, weights, weights, weights, output.astype(x.dtype), *constants)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    heads: Heads, interpret: bool, residuals: tuple[Any, ...], cotangent: Latent
) -> tuple[Latent, Array, Array]:
    """Returns the gradients by `x` and by both weights. Each core has its own part of the examples and its own sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    x, *kept, qkv, output, tables = residuals
    blocks = heads.blocks
    hidden = x.shape[2]
    cores = 2 if blocks.steps % 2 == 0 else 1
    steps = blocks.steps // cores

    latent = pl.BlockSpec((blocks.examples, blocks.positions, hidden), lambda core, i: (core * steps + i, 0, 0))
    of_rows = pl.BlockSpec((1, blocks.rows, hidden), lambda core, i: (core * steps + i, 0, 0))

    weights = qkv.astype(x.dtype)
    constants = [] if tables is None else [tables]
    by_x, by_weights = pl.pallas_call(
        _gradient_kernel(heads, x.shape, x.dtype, steps, has_tables=tables is not None),
        grid=(cores, steps),
        in_specs=[
            *[latent] * 2,
            *[of_rows] * 4,
            *(once((hidden, hidden), (third, 0)) for third in range(3)),
            once((hidden, hidden), (0, 0)),
            *(once(each.shape, (0, 0, 0)) for each in constants),
        ],
        out_specs=[latent, once((1, 4, hidden, hidden), lambda core, _: (core, 0, 0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((cores, 4, hidden, hidden), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((blocks.rows, hidden), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="attention_gradient",
    )(x, cotangent, *kept, weights, weights, weights, output.astype(x.dtype), *constants)
    *by_qkv, by_output = jnp.sum(by_weights, 0)
    return by_x, jnp.concatenate([each.T for each in by_qkv]).astype(qkv.dtype), by_output.astype(output.dtype)


def _gradient_kernel(
    heads: Heads, shape: tuple[int, ...], dtype: Any, steps: int, *, has_tables: bool
) -> Callable[..., None]:
    """Returns the kernel of `_backward` for inputs of this shape; each core has `steps` steps."""
    from jax.experimental import pallas as pl

    blocks = heads.blocks

    def kernel(x_ref, by_out_ref, query_ref, key_ref, value_ref, attended_ref, q_ref, k_ref, v_ref, output_ref, *rest):
        (tables_ref, *rest) = rest if has_tables else (None, *rest)
        by_x_ref, by_weights_ref, rows_ref = rest
        step = pl.program_id(0) * steps + pl.program_id(1)

        @pl.when(pl.program_id(1) == 0)
        def _():
            by_weights_ref[...] = jnp.zeros_like(by_weights_ref)

        columns = rows_of(blocks, step, x_ref, rows_ref, shape).T.astype(dtype)
        total = rows_of(blocks, step, by_out_ref, rows_ref, shape)
        by_out = total.astype(dtype)
        by_out_columns = total.T.astype(dtype)
        for start in range(0, shape[2], LANES):
            part = slice(start, start + LANES)
            by_attended = dot(by_out, output_ref[:, part], 1, 0)
            by_weights_ref[0, 3, :, part] += dot(by_out_columns, attended_ref[0, :, part], 1, 0)
            query, key, value = (ref[0, :, part].astype(jnp.float32) for ref in (query_ref, key_ref, value_ref))
            by_query, by_key, by_value = _group_gradients(
                heads, query, key, value, by_attended, dtype, halves_first=has_tables
            )
            by_query = _rotated_back(by_query * heads.scale, tables_ref)
            by_key = _rotated_back(by_key, tables_ref)
            for i, (gradient, ref) in enumerate([(by_query, q_ref), (by_key, k_ref), (by_value, v_ref)]):
                narrow = gradient.astype(dtype)
                total += dot(narrow, ref[part, :], 1, 0)
                by_weights_ref[0, i, :, part] += dot(columns, narrow, 1, 0)
        write_rows(blocks, total, by_x_ref)

    return kernel


def _attended(heads: Heads, query: Rows, key: Rows, value: Rows, dtype: Any, *, halves_first: bool) -> Rows:
    """Returns the attended values of a group of heads, from rotated queries and keys."""
    queries = heads.masked(query, dtype, halves_first=halves_first)
    values = [heads.example(value, example).T.astype(dtype) for example in range(heads.blocks.examples)]
    weights = [each.astype(dtype) for each in _exponentials(heads, key, queries)]
    divisors = [jnp.sum(each.astype(jnp.float32), 0, keepdims=True) for each in weights]
    of_heads = []
    for (example, head), each, divisor in zip(heads.each(), weights, divisors, strict=True):
        channels = slice(head * heads.head_dim, (head + 1) * heads.head_dim)
        of_heads.append(dot(values[example][channels], each, 1, 0) / divisor)
    return jnp.concatenate([jnp.concatenate(each).T for each in heads.by_example(of_heads)])


def _group_gradients(
    heads: Heads, query: Rows, key: Rows, value: Rows, by_attended: Rows, dtype: Any, *, halves_first: bool
) -> list[Rows]:
    """Returns the gradients of `_attended` by rotated queries and keys, and by values."""

    def products(rows, others, of_row, of_other):
        return [dot(one, other, of_row, of_other) for one, other in zip(rows, others, strict=True)]

    queries = heads.masked(query, dtype, halves_first=halves_first)
    by_means = heads.masked(by_attended, dtype, halves_first=False)
    values = [heads.example(value, example).astype(dtype) for example, _ in heads.each()]
    weights = [each / jnp.sum(each, 0, keepdims=True) for each in _exponentials(heads, key, queries)]
    by_weights = products(values, by_means, 1, 1)
    both = list(zip(weights, by_weights, strict=True))
    means = [jnp.sum(each * by, 0, keepdims=True) for each, by in both]
    by_scores = [(each * (by - mean)).astype(dtype) for (each, by), mean in zip(both, means, strict=True)]
    by_value = products([each.astype(dtype) for each in weights], by_means, 1, 0)
    by_key = products(by_scores, queries, 1, 0)
    by_query = products(by_scores, heads.masked(key, dtype, halves_first=halves_first), 0, 0)
    return [_joined(heads, each) for each in (by_query, by_key, by_value)]


def _joined(heads: Heads, of_heads: list[Rows]) -> Rows:
    """Returns the sums over the heads of each example; each head has its channels, and zeros elsewhere."""
    return jnp.concatenate([sum(rest, first) for first, *rest in heads.by_example(of_heads)])


def _exponentials(heads: Heads, key: Rows, queries: list[Rows]) -> list[Scores]:
    """Returns the weights of attention of each example and head of a group, not yet divided by their sums."""
    keys = [heads.example(key, example).astype(queries[0].dtype) for example in range(heads.blocks.examples)]
    scores = [dot(keys[example], query, 1, 1) for (example, _), query in zip(heads.each(), queries, strict=True)]
    scores = [heads.without_added_keys(each) for each in scores]
    return [jnp.exp(each - jnp.max(each, 0, keepdims=True)) for each in scores]


def _rotated(rows: Rows, tables: Any) -> Rows:
    """Rotates the channels of a group by the angles of their positions, if there are tables."""
    from jax.experimental.pallas import tpu as pltpu

    return rows if tables is None else rows * tables[0] + pltpu.roll(rows, LANES // 2, 1) * tables[1]


def _rotated_back(rows: Rows, tables: Any) -> Rows:
    """Applies the transpose of `_rotated`."""
    from jax.experimental.pallas import tpu as pltpu

    return rows if tables is None else rows * tables[0] + pltpu.roll(rows * tables[1], LANES // 2, 1)
