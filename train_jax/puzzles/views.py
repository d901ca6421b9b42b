"""Views of a puzzle: symmetric images of it, which a model solves too, and the way back of their answers.

View 0 is the puzzle itself. The others are random symmetries, a function of (seed, number of the puzzle, view); no two
views of a puzzle have the same one.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer

from train_jax.errors import UserError
from train_jax.puzzles.batches import HostBatch, Mixture
from train_jax.puzzles.kind import Symmetries, Symmetry
from train_jax.puzzles.kinds import describe, kind_of
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.symmetries import words_for

TABLES = ("view_cells", "view_tokens", "answer_cells", "answer_tokens")
"""The names of the permutations in a batch: from the puzzle to the view, and from an answer to that of the puzzle."""
DRAWS = 256
"""Draws of a symmetry that no earlier view of the puzzle has; with 8 symmetries, all fail with probability 1e-15."""


def symmetry_of(data: Metadata) -> Symmetry:
    """Returns the symmetries of the kind of a data set. Raises `UserError` if it has none."""
    kind = kind_of(data)
    symmetries = None if kind is None else kind.symmetries
    if symmetries is None:
        raise UserError(
            f"--views: the data set contains {describe(data)}, expected Sudokus or mazes; omit --views (augmented ARC "
            "puzzles are stored, and their answers vote)"
        )
    return symmetries


def symmetries_of_views(data: Metadata, *, first: int, count: int, views: int, seed: int) -> Symmetries:
    """Returns the symmetries of the views of puzzles `first`, `first + 1`, … of a data set, (puzzles, views, …).

    Raises `UserError` if the puzzles have fewer symmetries than views.
    """
    symmetry = symmetry_of(data)
    kept = [Symmetries(*(np.tile(np.arange(size), (count, 1)) for size in (data.seq_len, data.vocab_size)))]
    for view in range(1, views):
        new = kept[0]
        repeated = np.ones(count, bool)
        for draw in range(DRAWS):
            if not repeated.any():
                break
            drawn = symmetry(words_for(seed, view * DRAWS + draw, slice(first, first + count)))
            rows = repeated[:, None]
            new = Symmetries(*(np.where(rows, fresh, old) for fresh, old in zip(drawn, new, strict=True)))
            repeated = np.any([_equal(new, old) for old in kept], axis=0)
        if repeated.any():
            raise UserError(f"--views {views}: {describe(data)} have fewer symmetries; use at most {view}")
        kept.append(new)
    return Symmetries(*(np.stack(of_views, axis=1) for of_views in zip(*kept, strict=True)))


def _equal(one: Symmetries, other: Symmetries) -> np.ndarray:
    return (one.cells == other.cells).all(axis=1) & (one.tokens == other.tokens).all(axis=1)


def with_views(
    puzzles: Mixture, batch: HostBatch, numbers: Integer[np.ndarray, "local"], *, views: int, seed: int
) -> HostBatch:
    """Returns a batch of evaluation with the permutations of its views, (rows, views, …), by the names in `TABLES`.

    `numbers` are those of its rows in the mixture. With one view, the batch has none.
    """
    if views == 1:
        return batch
    ends = np.cumsum([part.num_examples for part in puzzles.parts])
    part = puzzles.parts[int(np.searchsorted(ends, numbers[0], side="right"))]
    found = symmetries_of_views(part.metadata, first=int(numbers[0]), count=len(numbers), views=views, seed=seed)
    sizes = puzzles.metadata.seq_len, puzzles.metadata.vocab_size
    found = Symmetries(*(_extended(order, size) for order, size in zip(found, sizes, strict=True)))
    return batch | dict(zip(TABLES, (*found, *found.inverse), strict=True))


def tables_of(symmetries: Symmetries, views: Integer[np.ndarray, "rows"]) -> HostBatch:
    """Returns the permutations of rows that are these views of one puzzle, by the names in `TABLES`."""
    of_rows = Symmetries(*(_extended(orders[:, views], orders.shape[2])[0] for orders in symmetries))
    return dict(zip(TABLES, (*of_rows, *of_rows.inverse), strict=True))


def _extended(orders: Integer[np.ndarray, "n views size"], size: int) -> Integer[np.ndarray, "n views larger"]:
    """Returns permutations of more cells or tokens, of which the further ones stay."""
    longer = np.empty((*orders.shape[:2], size), np.uint8 if size <= 256 else np.uint16)
    longer[..., : orders.shape[2]] = orders
    longer[..., orders.shape[2] :] = np.arange(orders.shape[2], size)
    return longer


# ---- traced


def without_tables(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the batch without the permutations, and the permutations by name; none for a batch without views."""
    tables = {name: batch[name] for name in TABLES if name in batch}
    return {name: values for name, values in batch.items() if name not in TABLES}, tables


def in_view(batch: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch with the inputs of its views. The labels stay: nothing in an evaluation is computed of them."""
    return {**batch, "inputs": _permuted(batch["inputs"], tables["view_cells"], tables["view_tokens"])}


def in_original_frame(preds: Int[Array, "batch seq"], tables: Mapping[str, Any]) -> Int[Array, "batch seq"]:
    """Returns the answers to the puzzles, for answers to their views."""
    return _permuted(preds, tables["answer_cells"], tables["answer_tokens"])


def _permuted(values: Int[Array, "batch seq"], cells: Array, tokens: Array) -> Int[Array, "batch seq"]:
    moved = jnp.take_along_axis(values, cells.astype(jnp.int32), axis=1)
    return jnp.take_along_axis(tokens, moved, axis=1).astype(values.dtype)
