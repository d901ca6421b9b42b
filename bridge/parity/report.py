"""The leaves of either side, the rows that compare them, and the report."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge.module.modes import matmul_precision
from bridge.tensor.arrays import jax_dtype
from bridge.tensor.pytrees import convert, is_number, path_name

Verdict = Literal["equal", "beyond tolerance", "unproved"]
_MARKS: dict[Verdict, str] = {"beyond tolerance": "!", "unproved": "?", "equal": " "}
"""The mark of each verdict in the table, the worst one first."""
_COLUMNS = f"{'error':>9}  {'tolerance':>9}  {'scale':>9}  step  leaf"


@dataclasses.dataclass(frozen=True)
class Row:
    """One compared leaf at one step."""

    kind: str
    """`output`, `gradient`, `input gradient`, `buffer`; `parameter` only where one was written and the sides differ,
    `.grad` only where the call itself leaves one."""
    name: str
    step: int
    error: float
    """max |JAX - PyTorch|, relative to `scale`; infinite where nothing can be subtracted, which `note` explains."""
    scale: float
    """The leaf's largest magnitude in PyTorch; not below 1e-3 of the largest gradient (or of 1, for outputs)."""
    tolerance: float
    """The given tolerance, or a larger one if PyTorch's own float32 is less exact than that."""
    zero: bool = False
    """Zero on both sides at every step, and nothing shows that it has to be: equal, but no proof."""
    note: str = ""
    """A remark: a missing leaf, another dtype, why a leaf is zero."""

    @property
    def verdict(self) -> Verdict:
        if not self.error <= self.tolerance:
            return "beyond tolerance"
        if self.zero:
            return "unproved"
        return "equal"

    def __str__(self) -> str:
        numbers = f"{self.error:9.1e}{_MARKS[self.verdict]} {self.tolerance:9.1e}  {self.scale:9.1e}  {self.step:4d}"
        return f"{numbers}  {self.kind} {self.name}" + (f" ({self.note})" if self.note else "")


@dataclasses.dataclass(frozen=True)
class Environment:
    """The device and settings of the JAX side. The PyTorch side always runs on the host."""

    platform: str
    device: str
    matmul_precision: str
    """The precision of float32 products, in JAX's words; see `bridge.dispatch.computation`."""
    x64: bool
    """True if JAX has 64-bit types; otherwise they are compared as the 32-bit types in which they are stored."""
    versions: dict[str, str]

    @classmethod
    def here(cls) -> Environment:
        device = jax.devices()[0]
        versions = {name: importlib.metadata.version(name) for name in ("torch", "jax", "torchax")}
        return cls(device.platform, device.device_kind, matmul_precision(), jax.config.read("jax_enable_x64"), versions)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        wide = "kept" if self.x64 else "stored as 32-bit types"
        return (
            f"JAX on {self.platform} ({self.device}), float32 products {self.matmul_precision}, 64-bit types {wide}, "
            f"beside PyTorch on the host; {versions}"
        )


UNPROVED = (
    "unproved: zero on both sides, where a lost value would not be seen, and a side fails at perturbed parameters; "
    "`jitter` (--jitter 0.001) perturbs them by less"
)


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """The result of `verify`. `str()` is the table, worst leaf first, with 20 equal leaves; `to_json` has all."""

    rows: tuple[Row, ...]
    environment: Environment = dataclasses.field(default_factory=Environment.here)
    granted: tuple[str, ...] = ()
    """Buffers that were constants, and checks that were assumed to pass."""

    @classmethod
    def of(cls, rows: Iterable[Row], granted: Iterable[str] = ()) -> ParityReport:
        """Sorted, worst first."""
        order = list(_MARKS)
        ordered = sorted(proved(rows), key=lambda r: (order.index(r.verdict), r.tolerance - r.error))
        return cls(tuple(ordered), granted=tuple(granted))

    @property
    def ok(self) -> bool:
        """True if something was compared, and every leaf is equal and proved."""
        return bool(self.rows) and all(row.verdict == "equal" for row in self.rows)

    @property
    def worst(self) -> Row:
        return self.rows[0]

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)

    @property
    def summary(self) -> str:
        if not self.rows:
            return "nothing compared: the module has no state, and its outputs hold no number"
        beyond = self.count("beyond tolerance")
        unproved = self.count("unproved")
        return f"{len(self.rows)} leaves compared, {beyond} beyond tolerance, {unproved} unproved"

    def __str__(self) -> str:
        shown = len(self.rows) - max(self.count("equal") - 20, 0)
        if shown < len(self.rows):
            more = [f"… {len(self.rows) - shown} more, equal"]
        else:
            more = []
        remark = [UNPROVED] if self.count("unproved") else []
        lines = [*map(str, self.rows[:shown]), *more, *remark, *self.granted, self.summary]
        return "\n".join([str(self.environment), _COLUMNS, *lines])

    def to_json(self) -> str:
        """Returns `ok`, the counts, the environment and all rows; an infinite number is `null`."""
        rows = [dataclasses.asdict(row) | {"verdict": row.verdict} for row in self.rows]
        whole = {
            "ok": self.ok,
            "leaves": {verdict: self.count(verdict) for verdict in _MARKS},
            "environment": dataclasses.asdict(self.environment),
            "granted": self.granted,
            "rows": [{key: None if value == math.inf else value for key, value in row.items()} for row in rows],
        }
        return json.dumps(whole, indent=1, allow_nan=False)


# ---- the comparison


def proved(rows: Iterable[Row]) -> list[Row]:
    """The rows. A leaf that is zero at one step is proved by another step where it is not."""
    rows = list(rows)
    spoke = {(r.kind, r.name) for r in rows if not r.zero}
    return [dataclasses.replace(r, zero=r.zero and (r.kind, r.name) not in spoke) for r in rows]


class Leaf(NamedTuple):
    """The numbers of one leaf, in float64, complex128 or int64."""

    values: np.ndarray
    dtype: str = ""
    """The dtype that JAX stores; empty for a number of Python's, which has none."""
    reason: str = ""
    """The reason why the leaf may be zero on both sides, if there is one."""


Leaves = dict[str, dict[str, Leaf]]
"""kind -> name -> leaf"""

ARRAYS = (jax.Array, np.ndarray)


def named(tree: Any) -> dict[str, Leaf]:
    """Returns every number in a tree by its path."""
    flat, _ = jax.tree_util.tree_flatten_with_path(convert(tree, lambda v: v, objects=True))
    name_of = path_name if isinstance(tree, dict) else jax.tree_util.keystr
    return {name_of(path) or "value": leaf_of(v) for path, v in flat if torch.is_tensor(v) or is_number(v)}


def leaf_of(value: Any, reason: str = "") -> Leaf:
    dtype = str(value.dtype) if isinstance(value, ARRAYS) else ""
    if torch.is_tensor(value):
        dtype = str(jnp.dtype(jax_dtype(value.dtype)))
        if value.layout is torch.strided:
            value = value.detach()
        else:
            value = value.detach().to_dense()
        value = value.double() if value.is_floating_point() else value.resolve_conj()
        value = value.resolve_neg().numpy()
    array = np.asarray(value)
    wide: Any = np.int64
    if jnp.issubdtype(array.dtype, jnp.inexact):  # NumPy has no bfloat16 of its own
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            wide = np.complex128
        else:
            wide = np.float64
    return Leaf(array.astype(wide), dtype, reason)


def largest_gradient(leaves: Leaves) -> float:
    gradients = [leaf for kind in ("gradient", "input gradient") for leaf in leaves.get(kind, {}).values()]
    return max((magnitude(leaf.values) for leaf in gradients), default=0.0)


def compare(step: int, ours: Leaves, theirs: Leaves, tolerance: float) -> Iterator[Row]:
    """Yields one row for each leaf of PyTorch's (`ours`) or JAX's (`theirs`), also if one side lacks it."""
    largest = largest_gradient(ours)
    for kind, leaves in ours.items():
        floor = 1e-3 * largest if "gradient" in kind else 1e-3
        others = theirs.get(kind, {})
        for name in leaves | others:
            row = _row(Row(kind, name, step, math.inf, floor, tolerance), leaves.get(name), others.get(name))
            if kind != "parameter" or row.error:
                yield row


_REMEDIES = {
    "buffer": "; one that the call registers belongs into __init__",
    ".grad": "; the call itself sets it, and a pure function returns no `.grad`: return the gradient, or leave it out",
}
"""Remarks on leaves that JAX lacks, by kind."""


def _row(row: Row, expected: Leaf | None, actual: Leaf | None) -> Row:
    """Returns `row`, given with its least scale, with the difference of the two leaves, or a note if there is none."""
    if expected is None:
        return dataclasses.replace(row, note="PyTorch has no such leaf")
    if actual is None:
        return dataclasses.replace(row, note="missing in JAX" + _REMEDIES.get(row.kind, ""))
    whole = expected.values.dtype.kind == "i"  # integers are equal or different, without a tolerance
    row = dataclasses.replace(row, scale=1.0 if whole else max(magnitude(expected.values), row.scale, 1e-30))
    shapes = actual.values.shape, expected.values.shape
    dtypes = actual.dtype or expected.dtype, expected.dtype or actual.dtype
    for what, (theirs, ours) in (("shape", shapes), ("dtype", dtypes)):
        if theirs != ours:
            return dataclasses.replace(row, note=f"{what} {theirs}, PyTorch has {ours}")
    error = difference(actual.values, expected.values) / row.scale
    zero = bool(expected.values.size) and not expected.values.any() and not actual.values.any()
    unproved = zero and not whole and not expected.reason and row.kind != "buffer"
    return dataclasses.replace(row, error=error, zero=unproved, note=expected.reason if zero else "")


def magnitude(a: np.ndarray) -> float:
    """Returns the size of the finite entries: an infinity on both sides must not hide a difference beside it."""
    size = np.abs(a.astype(np.result_type(a, np.float64)))
    return float(size.max(initial=0.0, where=np.isfinite(size)))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    if a.shape != b.shape:
        return math.inf
    wide = np.result_type(a, b, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(a.astype(wide) - b.astype(wide))
    if a.dtype.kind == b.dtype.kind == "i":
        gap = np.maximum(gap, 1.0)  # float64 does not hold every int64
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.where(np.isnan(gap), math.inf, gap).max(initial=0.0, where=~same))
