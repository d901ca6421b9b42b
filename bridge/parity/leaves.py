"""Outputs, gradients and buffers of either side as named numbers, and the rows that compare them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.parity.report import Row
from bridge.tensor.convert import jax_dtype
from bridge.tensor.pytrees import convert, is_number


class Leaf(NamedTuple):
    """The numbers of one leaf: float64, complex128 or the integers themselves."""

    values: np.ndarray
    dtype: str = ""
    """As JAX stores it; empty for a number of Python's, which has none."""
    reason: str = ""
    """Why it may be zero on both sides, if something says so."""


Leaves = dict[str, dict[str, Leaf]]
"""kind -> name -> leaf"""


class Again(NamedTuple):
    """PyTorch's leaves of two further runs of the same step."""

    wide: Leaves
    """In float64."""
    same: Leaves
    """In the module's own types, which tells a difference of rounding from one of state outside of the module."""
    limit: float
    """The largest difference from float64, relative to a leaf's scale, that is taken for rounding."""


def named(tree: Any) -> dict[str, Leaf]:
    """Every number in a tree by its path."""
    if isinstance(tree, dict) and all(isinstance(k, str) for k in tree):
        flat = [(k, v) for key, value in tree.items() for k, v in _flatten(value, key)]
    else:
        flat = list(_flatten(tree, ""))
    return {name or "value": leaf_of(value) for name, value in flat if _is_number(value)}


def _flatten(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    tree = convert(tree, lambda v: v, objects=True)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield prefix + jax.tree_util.keystr(path), leaf


def leaf_of(value: Any, reason: str = "") -> Leaf:
    if torch.is_tensor(value):
        tensor = value.detach() if value.layout is torch.strided else value.detach().to_dense()
        tensor = tensor.resolve_conj().resolve_neg()
        dtype = str(jnp.dtype(jax_dtype(tensor.dtype)))
        wide = torch.complex128 if tensor.is_complex() else torch.float64 if tensor.is_floating_point() else torch.int64
        numbers = tensor.to(wide).numpy()
        return Leaf(numbers, dtype, reason)
    dtype = str(value.dtype) if is_array(value) else ""
    array = np.asarray(value)
    if jnp.issubdtype(array.dtype, jnp.inexact):  # bfloat16 is none of NumPy's own
        array = array.astype(np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)
    return Leaf(array.astype(np.int64) if array.dtype.kind in "biu" else array, dtype, reason)


def is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray))


def _is_number(value: Any) -> bool:
    return torch.is_tensor(value) or is_number(value)


def compare(
    step: int,
    ours: Leaves,
    theirs: Leaves,
    again: Callable[[], Again | str] | None,
    tolerance: float,
    known_zero: str = "",
) -> Iterator[Row]:
    """One row for each leaf of PyTorch's (`ours`) or JAX's (`theirs`), also for one that a side lacks.

    `again` is called where a leaf is beyond `tolerance`, and returns text where PyTorch fails in float64.
    `known_zero`: a regular expression over "kind name".
    """
    gradients = [leaf for kind in ("gradient", "input gradient") for leaf in ours.get(kind, {}).values()]
    largest = max((_magnitude(leaf.values) for leaf in gradients), default=0.0)
    for kind, leaves in ours.items():
        floor = 1e-3 * largest if "gradient" in kind else 1e-3
        others = theirs.get(kind, {})
        for name in [*leaves, *(n for n in others if n not in leaves)]:
            expected, actual = leaves.get(name), others.get(name)
            row = _row(Row(kind, name, step, float("inf"), floor, tolerance), expected, actual)
            if again and expected is not None and row.verdict == "beyond tolerance" and math.isfinite(row.error):
                row = _beside_rounding(row, largest, expected, again())
            if row.zero and known_zero and re.search(known_zero, f"{kind} {name}"):
                row = dataclasses.replace(row, zero=False, note="declared zero")
            if kind != "parameter" or row.error:
                yield row


def _row(row: Row, expected: Leaf | None, actual: Leaf | None) -> Row:
    """`row`, whose scale is the least one, with what the two leaves come to."""
    if expected is None or actual is None:
        note = "PyTorch has no such leaf" if expected is None else "missing in JAX"
        if actual is None:
            note += _WHY_MISSING.get(row.kind, "")
        return dataclasses.replace(row, note=note)
    # An integer is equal or it is another one.
    scale = 1.0 if expected.values.dtype.kind in "biu" else max(_magnitude(expected.values), row.scale, 1e-30)
    row = dataclasses.replace(row, scale=scale)
    for what, theirs, ours in (
        ("shape", actual.values.shape, expected.values.shape),
        ("dtype", actual.dtype or expected.dtype, expected.dtype or actual.dtype),
    ):
        if theirs != ours:
            return dataclasses.replace(row, note=f"{what} {theirs}, PyTorch has {ours}")
    error = _difference(actual.values, expected.values) / scale
    zero = bool(expected.values.size) and not expected.values.any() and not actual.values.any()
    unproved = zero and expected.values.dtype.kind in "fc" and not expected.reason and row.kind != "buffer"
    return dataclasses.replace(row, error=error, zero=unproved, note=expected.reason if zero else "")


_WHY_MISSING = {
    "buffer": "; one that the call registers belongs into __init__",
    ".grad": "; the call itself sets it, and a pure function returns no `.grad`: return the gradient, or leave it out",
}


def _beside_rounding(row: Row, largest: float, expected: Leaf, again: Again | str) -> Row:
    """The row, judged by 8 times what PyTorch's own float32 differs from float64 at this leaf.

    A gradient that is zero in float64 may be 8 roundings of the largest gradient.
    """
    if isinstance(again, str):
        return dataclasses.replace(row, note=again)
    wide, same = again.wide[row.kind].get(row.name), again.same[row.kind].get(row.name)
    if wide is None or same is None or not _difference(same.values, expected.values) <= row.tolerance * row.scale:
        return dataclasses.replace(row, note="PyTorch itself computes something else when it is called again")
    own = _difference(wide.values, expected.values) / row.scale
    allowed, limit, note = 8 * own, again.limit, f"float64 differs from PyTorch's own by {own:.1e}"
    if "gradient" in row.kind and _magnitude(wide.values) <= 1e-12 * largest:
        allowed = max(allowed, 8 * float(np.finfo(np.float32).eps) * largest / row.scale)
        limit, note = max(limit, 0.05), "zero in float64"  # relative to a scale that is 1e-3 of the largest
    if not own <= limit:
        return dataclasses.replace(row, note=f"{note}, which is taken for more than rounding")
    return dataclasses.replace(row, tolerance=max(row.tolerance, allowed), note=note)


def _magnitude(a: np.ndarray) -> float:
    """Of the finite entries: an infinity that both sides have shall hide no difference beside it."""
    size = np.abs(a.astype(np.float64) if a.dtype.kind in "biu" else a)
    return float(size.max(initial=0.0, where=np.isfinite(size)))


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        gap = np.where(same, 0.0, np.abs(_wide_numbers(a) - _wide_numbers(b)))
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        gap = np.where(same, 0.0, np.maximum(gap, 1.0))  # float64 does not hold every int64
    return float(np.where(np.isnan(gap), np.inf, gap).max())


def _wide_numbers(a: np.ndarray) -> np.ndarray:
    return a if a.dtype.kind == "c" else a.astype(np.float64)
