"""Sign SGD on the rows of a sparse table that occur in the batch."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int


class RowGradients(NamedTuple):
    """Gradients of some rows of a table."""

    ids: Int[Array, "examples"]
    """Every row of the batch once; unused entries are past the end of any table."""
    sums: Float[Array, "examples width"]

    def only_if(self, condition: Bool[Array, ""]) -> "RowGradients":
        """Returns the same gradients if `condition` holds, otherwise none."""
        return self._replace(ids=jnp.where(condition, self.ids, _past_the_end(self.ids)))


def sum_by_row(ids: Int[Array, "examples"], gradients: Float[Array, "examples width"]) -> RowGradients:
    """Sums the gradients of the examples of each row."""
    order = jnp.argsort(ids)
    ids, gradients = ids[order], gradients[order]
    is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    group = jnp.cumsum(is_first) - 1
    sums = jax.ops.segment_sum(gradients, group, num_segments=ids.size, indices_are_sorted=True)
    return RowGradients(jnp.full_like(ids, _past_the_end(ids)).at[group].set(ids), sums)


def _past_the_end(ids: Int[Array, "examples"]) -> int:
    return int(jnp.iinfo(ids.dtype).max)


def sparse_sign_sgd(
    table: Float[Array, "rows width"], gradients: RowGradients, lr: ArrayLike, weight_decay: float
) -> Float[Array, "rows width"]:
    """Applies sign SGD with decoupled weight decay to the rows that have a gradient; other rows do not change."""
    # Indices past the end are clamped in the gather and dropped in the scatter.
    rows = table[gradients.ids] * (1 - lr * weight_decay) - lr * jnp.sign(gradients.sums)
    return table.at[gradients.ids].set(rows.astype(table.dtype), mode="drop")
