"""Mixes several data sets in one run: their folders, their weights, and the rows that each of them gets."""

from collections.abc import Sequence

import numpy as np

from train_jax.errors import UserError

CHANGED = ", changed since it was built"
"""Added to the description of data whose hash is not the one in its `recipe.json`."""


def data_dirs(data_dir: str) -> list[str]:
    """Splits the `data_dir` of a run at its commas."""
    return [name.strip() for name in data_dir.split(",") if name.strip()]


def names_and_weights(data_dir: str, data_weights: str = "") -> tuple[list[str], list[float]]:
    """Returns the data sets of `data_dir` and their weights, which are empty if `data_weights` is.

    Raises `UserError` if there is no data set, or not one number above 0 for each.
    """
    names = data_dirs(data_dir)
    if not names:
        raise UserError(f"--data-dir {data_dir!r} names no data set; give a folder built by `trm build-data`")
    try:
        weights = [float(text) for text in data_weights.split(",")] if data_weights.strip() else []
    except ValueError:
        weights = [0.0]
    if weights and (len(weights) != len(names) or not all(0 < weight < float("inf") for weight in weights)):
        raise UserError(
            f"--data-weights {data_weights!r}: expected {len(names)} numbers above 0, one for each data set in "
            f"--data-dir; use {','.join('1' for _ in names)}"
        )
    return names, weights


def apportion(weights: Sequence[float], count: int) -> list[int]:
    """Divides `count` rows by weight, rounded by largest remainder; among equal remainders the first gets the row."""
    exact = np.array(weights) / sum(weights) * count
    rows = np.floor(exact).astype(int)
    rows[np.argsort(rows - exact, kind="stable")[: count - rows.sum()]] += 1
    return rows.tolist()
