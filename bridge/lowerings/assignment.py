"""The assignment of rows to columns of least cost, as SciPy's `linear_sum_assignment`, by Optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def least_cost(cost: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rows in rising order and their columns, as many as the shorter side has.

    Of several assignments with the same cost, it may be another one than SciPy's. An infinite cost, or NaN, is taken
    only where nothing else is left; SciPy raises an error there.

    Raises `ImportError` if Optax is not installed.
    """
    from optax import assignment

    rows, columns = cost.shape
    if not rows or not columns:
        return jnp.zeros(0, int), jnp.zeros(0, int)
    cost = jax.lax.stop_gradient(cost).astype(float)
    finite = jnp.isfinite(cost)
    least = jnp.where(finite, cost, jnp.inf).min()
    most = jnp.where(finite, cost, -jnp.inf).max()
    # More than any sum of the others can differ by. Not a number would keep the algorithm from its end.
    instead = jnp.where(finite.any(), most + (most - least) * min(rows, columns) + 1, 0)
    places, partners = assignment.hungarian_algorithm(jnp.where(finite, cost, instead))
    order = jnp.argsort(places)
    return places[order], partners[order]
