"""The two Pallas kernels of `train_jax.kernels.attention`: its forward pass and its backward pass.

Scores have keys along the first axis, so that their maxima and sums are taken over whole registers. Each kind of
operation is written for all heads of a group and all examples of a step before the next kind: the compiler schedules
mostly in this order, and one head alone would wait for every result.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from train_jax.kernels.blocks import rows_of, write_rows
from train_jax.kernels.heads import Heads, Rows, Scores
from train_jax.kernels.registers import LANES, Latent, dot, once

Tables = Float[Array, "two rows lanes"]


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("keep",))
def forward(
    heads: Heads, interpret: bool, x: Latent, qkv: Array, output: Array, tables: Tables | None, *, keep: bool
) -> list[Array]:
    """Returns the result and, with `keep`, what the backward pass needs: the rotated and scaled queries, the rotated
    keys, the values and the attended values, with the added rows.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    blocks, hidden = heads.blocks, x.shape[2]
    halves_first = tables is not None

    def kernel(x_ref, q_ref, k_ref, v_ref, output_ref, *rest):
        (tables_ref, *rest) = rest if halves_first else (None, *rest)
        out_ref, *kept, rows_ref = rest
        total = rows_of(blocks, pl.program_id(0), x_ref, rows_ref, x.shape)
        narrow = total.astype(x.dtype)
        for start in range(0, hidden, LANES):
            part = slice(start, start + LANES)
            query, key, value = (dot(narrow, ref[part, :], 1, 1) for ref in (q_ref, k_ref, v_ref))
            query, key = _rotated(query, tables_ref) * heads.scale, _rotated(key, tables_ref)
            attended = of_group(query, key, value).astype(x.dtype)
            for ref, rows in zip(kept, (query, key, value, attended), strict=False):
                ref[0, :, part] = rows.astype(x.dtype)
            total += dot(attended, output_ref[:, part], 1, 1)
        write_rows(blocks, total, out_ref)

    def of_group(query: Rows, key: Rows, value: Rows) -> Rows:
        queries = heads.masked(query, x.dtype, halves_first=halves_first)
        values = [heads.example(value, example).T.astype(x.dtype) for example in range(blocks.examples)]
        weights = [each.astype(x.dtype) for each in _exponentials(heads, key, queries)]
        divisors = [jnp.sum(each.astype(jnp.float32), 0, keepdims=True) for each in weights]
        of_heads = []
        for (example, head), each, divisor in zip(heads.each(), weights, divisors, strict=True):
            channels = slice(head * heads.head_dim, (head + 1) * heads.head_dim)
            of_heads.append(dot(values[example][channels], each, 1, 0) / divisor)
        return jnp.concatenate([jnp.concatenate(each).T for each in heads.by_example(of_heads)])

    latent = pl.BlockSpec((blocks.examples, blocks.positions, hidden), lambda i: (i, 0, 0))
    of_rows = pl.BlockSpec((1, blocks.rows, hidden), lambda i: (i, 0, 0))

    weights, constants = qkv.astype(x.dtype), [] if tables is None else [tables]
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
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            *[jax.ShapeDtypeStruct((blocks.steps, blocks.rows, hidden), x.dtype)] * kept,
        ],
        scratch_shapes=[pltpu.VMEM((blocks.rows, hidden), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="attention",
    )(x, weights, weights, weights, output.astype(x.dtype), *constants)


@functools.partial(jax.jit, static_argnums=(0, 1))
def backward(
    heads: Heads, interpret: bool, residuals: tuple[Any, ...], cotangent: Latent
) -> tuple[Latent, Array, Array]:
    """Returns the gradients by `x` and by both weights. Each core has a part of the examples, and sums of its own."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    x, *kept, qkv, output, tables = residuals
    blocks, hidden = heads.blocks, x.shape[2]
    halves_first = tables is not None
    cores = 2 if blocks.steps % 2 == 0 else 1
    steps = blocks.steps // cores

    def kernel(x_ref, by_out_ref, query_ref, key_ref, value_ref, attended_ref, q_ref, k_ref, v_ref, output_ref, *rest):
        (tables_ref, *rest) = rest if halves_first else (None, *rest)
        by_x_ref, by_weights_ref, rows_ref = rest
        step = pl.program_id(0) * steps + pl.program_id(1)

        @pl.when(pl.program_id(1) == 0)
        def _():
            by_weights_ref[...] = jnp.zeros_like(by_weights_ref)

        columns = rows_of(blocks, step, x_ref, rows_ref, x.shape).T.astype(x.dtype)
        total = rows_of(blocks, step, by_out_ref, rows_ref, x.shape)
        by_out, by_out_columns = total.astype(x.dtype), total.T.astype(x.dtype)
        for start in range(0, hidden, LANES):
            part = slice(start, start + LANES)
            by_attended = dot(by_out, output_ref[:, part], 1, 0)
            by_weights_ref[0, 3, :, part] += dot(by_out_columns, attended_ref[0, :, part], 1, 0)
            query, key, value = (ref[0, :, part].astype(jnp.float32) for ref in (query_ref, key_ref, value_ref))
            by_query, by_key, by_value = of_group(query, key, value, by_attended)
            by_query, by_key = _rotated_back(by_query * heads.scale, tables_ref), _rotated_back(by_key, tables_ref)
            for i, (gradient, ref) in enumerate([(by_query, q_ref), (by_key, k_ref), (by_value, v_ref)]):
                narrow = gradient.astype(x.dtype)
                total += dot(narrow, ref[part, :], 1, 0)
                by_weights_ref[0, i, :, part] += dot(columns, narrow, 1, 0)
        write_rows(blocks, total, by_x_ref)

    def of_group(query: Rows, key: Rows, value: Rows, by_attended: Rows) -> list[Rows]:
        """Returns the gradients by rotated queries and keys, and by values."""

        def products(rows, others, of_row, of_other):
            return [dot(one, other, of_row, of_other) for one, other in zip(rows, others, strict=True)]

        queries = heads.masked(query, x.dtype, halves_first=halves_first)
        by_means = heads.masked(by_attended, x.dtype, halves_first=False)
        values = [heads.example(value, example).astype(x.dtype) for example, _ in heads.each()]
        weights = [each / jnp.sum(each, 0, keepdims=True) for each in _exponentials(heads, key, queries)]
        by_weights = products(values, by_means, 1, 1)
        both = list(zip(weights, by_weights, strict=True))
        means = [jnp.sum(each * by, 0, keepdims=True) for each, by in both]
        by_scores = [(each * (by - mean)).astype(x.dtype) for (each, by), mean in zip(both, means, strict=True)]
        by_value = products([each.astype(x.dtype) for each in weights], by_means, 1, 0)
        by_key = products(by_scores, queries, 1, 0)
        by_query = products(by_scores, heads.masked(key, x.dtype, halves_first=halves_first), 0, 0)
        return [joined(each) for each in (by_query, by_key, by_value)]

    def joined(of_heads: list[Rows]) -> Rows:
        """The sums over the heads of each example; each head has its channels, and zeros elsewhere."""
        return jnp.concatenate([sum(rest, first) for first, *rest in heads.by_example(of_heads)])

    latent = pl.BlockSpec((blocks.examples, blocks.positions, hidden), lambda core, i: (core * steps + i, 0, 0))
    of_rows = pl.BlockSpec((1, blocks.rows, hidden), lambda core, i: (core * steps + i, 0, 0))

    weights, constants = qkv.astype(x.dtype), [] if tables is None else [tables]
    by_x, by_weights = pl.pallas_call(
        kernel,
        grid=(cores, steps),
        in_specs=[
            *[latent] * 2,
            *[of_rows] * 4,
            *(once((hidden, hidden), (third, 0)) for third in range(3)),
            once((hidden, hidden), (0, 0)),
            *(once(each.shape, (0, 0, 0)) for each in constants),
        ],
        out_specs=[
            latent,
            once((1, 4, hidden, hidden), lambda core, _: (core, 0, 0, 0)),
        ],
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
    """The transpose of `_rotated`."""
    from jax.experimental.pallas import tpu as pltpu

    return rows if tables is None else rows * tables[0] + pltpu.roll(rows * tables[1], LANES // 2, 1)
