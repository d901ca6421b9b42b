"""Batches of examples of different lengths, padded to a few shapes by the `collate` of the script itself.

Every shape of a batch is a program to compile. `collate` pads to the longest example that it is given, with values and
masks that only the script knows, so a batch is padded to a longer shape by collating it together with a longer example
of the data, whose row is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from train_jax.errors import UserError
from train_jax.script.structure import arrays_in, is_array, mapped

Sizes = dict[str, int]
"""The sizes of all axes but the first one of the arrays of a batch, by name and axis, such as `input_ids.1`."""

SHAPES = 4
"""Largest number of shapes that are chosen."""
_DRAWN_BATCHES = 256
"""Number of random batches from whose sizes the shapes are chosen."""


def sizes_of(batch: Any) -> Sizes:
    arrays = arrays_in(batch).items()
    return {f"{name}.{axis}": size for name, array in arrays for axis, size in enumerate(array.shape) if axis}


@dataclasses.dataclass(frozen=True)
class _Shape:
    """A shape of batches."""

    sizes: Sizes
    examples: tuple[Any, ...]
    """Examples whose batch has these sizes."""

    def holds(self, sizes: Sizes) -> bool:
        return all(self.sizes[name] >= size for name, size in sizes.items())


@dataclasses.dataclass(frozen=True)
class Padding:
    """The shapes to which batches are padded; none if all examples have the same sizes."""

    collate: Callable[[list], Any]
    shapes: tuple[_Shape, ...]
    """The smallest first."""

    def longer(self, whole: Sequence[Any]) -> Sequence[Any]:
        """Returns the examples with which all parts of a batch of these examples have the same shape."""
        sizes = sizes_of(self.collate([*whole]))
        shape = next((each for each in self.shapes if each.holds(sizes)), None)
        return whole if shape is None else shape.examples

    def padded(self, examples: Sequence[Any], longer: Sequence[Any]) -> Any:
        """Returns a batch of the examples, with the sizes of a batch that has the `longer` ones, too."""
        batch = self.collate([*examples, *longer])
        return mapped(batch, lambda value, name: _without(value, name, len(examples), len(longer)))


def _without(value: Any, name: str, kept: int, dropped: int) -> Any:
    """Returns an array of a batch without the rows at its end."""
    if not is_array(value):
        return value
    if not value.shape or len(value) != kept + dropped:
        raise UserError(
            f"{name or 'a batch'} has shape {tuple(value.shape)} for {kept + dropped} examples of different sizes; "
            "make the examples its first axis in collate"
        )
    return value[:kept]


def padding_for(collate: Callable[[list], Any], sample: Sequence[Any], batch_size: int) -> Padding | None:
    """Returns the padding of batches of examples such as those of a sample; None if they all have the same sizes."""
    sizes = [sizes_of(collate([example])) for example in sample]
    varying = [name for name in sizes[0] if len({each.get(name) for each in sizes}) > 1]
    if not varying or any(each.keys() != sizes[0].keys() for each in sizes):
        return None
    table = np.array([[each[name] for name in varying] for each in sizes])
    drawn = np.random.default_rng(0).integers(len(sample), size=(_DRAWN_BATCHES, batch_size))
    largest = table[drawn].max(1)
    levels = [np.quantile(largest, share, axis=0, method="higher") for share in np.linspace(0, 1, SHAPES + 1)[1:-1]]
    shapes = [_shape(collate, sample, table, level) for level in (*levels, table.max(0))]
    different = {tuple(shape.sizes.items()): shape for shape in shapes}
    return Padding(collate, tuple(different.values()))


def _shape(collate: Callable[[list], Any], sample: Sequence[Any], table: np.ndarray, level: np.ndarray) -> _Shape:
    """Returns the shape of a batch that has, for each size, an example of the level."""
    chosen = {int(np.flatnonzero(table[:, column] == size)[0]) for column, size in enumerate(level)}
    examples = tuple(sample[number] for number in sorted(chosen))
    return _Shape(sizes_of(collate(list(examples))), examples)
