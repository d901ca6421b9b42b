"""Graphs of changing size, such as neighbour lists, padded to a few shapes, so that few programs are compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.errors import BridgeError

Counts = Mapping[str, int]
"""Numbers of elements by kind, such as `{"atoms": 8, "edges": 112, "graphs": 1}`."""


@dataclasses.dataclass(frozen=True)
class GraphPadding:
    """Pads the arrays of a graph, or of a batch of graphs, to the smallest of a few shapes.

    `axes` has the kinds of elements along the axes of each array, None for an axis of fixed size:
    `{"positions": ("atoms", None), "edge_index": (None, "edges"), "batch": ("atoms",)}`. An axis may have several
    entries for each element, such as the 3 rows of a cell for each graph; the first array with a kind has one.

    `shapes` are numbers of elements by kind, the smallest first; `shapes_of` chooses them. Each kind is padded by at
    least one element.

    `fills` are values of the padding by array, 0 by default. The name of a kind fills with the number of its first
    padding element: `{"edge_index": "atoms", "batch": "graphs", "shifts": 9.0}` makes padding edges lead from a padding
    atom to itself in a padding graph, over a distance that is beyond the cutoff, and not zero, where a norm has no
    derivative. Sums over edges and atoms then leave real atoms and graphs as they are.
    """

    axes: Mapping[str, tuple[str | None, ...]]
    shapes: Sequence[Counts]
    fills: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def counts(self, arrays: Mapping[str, Any]) -> dict[str, int]:
        """Returns the number of elements of each kind. Raises `BridgeError` for arrays that do not fit `axes`."""
        counts: dict[str, int] = {}
        for name, kinds in self.axes.items():
            shape = np.shape(arrays[name])
            if len(shape) != len(kinds):
                raise BridgeError(f"{name} has shape {shape}, and {len(kinds)} axes in `axes`: {kinds}")
            for kind, size in zip(kinds, shape, strict=True):
                if kind is not None and size != counts.setdefault(kind, size) and size % max(counts[kind], 1):
                    raise BridgeError(f"{name} has shape {shape}, which is not a multiple of {counts[kind]} {kind}")
        return counts

    def __call__(self, arrays: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the padded arrays, and by kind the mask of real elements; arrays without `axes` stay as they are.

        Raises `BridgeError` if no shape is large enough.
        """
        counts = self.counts(arrays)
        fitting = (shape for shape in self.shapes if all(shape[kind] > count for kind, count in counts.items()))
        shape = next(fitting, None)
        if shape is None:
            raise BridgeError(
                f"{counts} and a padding element of each are more than the largest shape, {dict(self.shapes[-1])}; "
                "add a larger one"
            )
        padded = dict(arrays)
        for name, kinds in self.axes.items():
            padded[name] = self._padded(name, np.asarray(arrays[name]), kinds, counts, shape)
        return padded, {kind: np.arange(shape[kind]) < count for kind, count in counts.items()}

    def _padded(self, name: str, array: np.ndarray, kinds: tuple, counts: Counts, shape: Counts) -> np.ndarray:
        fill = self.fills.get(name, 0)
        if isinstance(fill, str):
            fill = counts[fill]
        sizes = list(array.shape)
        for axis, kind in enumerate(kinds):
            if kind is not None:
                entries = array.shape[axis] // counts[kind] if counts[kind] else 1
                sizes[axis] = entries * shape[kind]
        padded = np.empty(sizes, array.dtype)
        padded[...] = fill
        padded[tuple(slice(size) for size in array.shape)] = array
        return padded


def shapes_of(counts: Iterable[Counts], number: int = 3, multiple: int = 8) -> tuple[dict[str, int], ...]:
    """Returns up to `number` shapes, the smallest first, that hold graphs of these counts with a padding element each.

    They are quantiles of each kind, rounded up to a multiple; the last one holds all graphs.
    """
    graphs = list(counts)
    shapes = []
    for share in np.linspace(0, 1, number + 1)[1:]:
        shape = {}
        for kind in graphs[0]:
            size = int(np.quantile([graph[kind] for graph in graphs], share, method="higher"))
            shape[kind] = -(-(size + 1) // multiple) * multiple
        if shape not in shapes:
            shapes.append(shape)
    return tuple(shapes)
