"""A file with the programs that serve a model: it needs JAX and NumPy alone.

The file is one of `numpy.savez`: `layout` (JSON), `weights.…`, and `program.N`, a program of `jax.export` for batches
of N rows, `(weights, inputs) -> outputs`, dicts of arrays.
"""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

LAYOUT = "layout"
PROGRAM = "program."
WEIGHT = "weights."


class Program:
    """The programs of a file of `trm export --format program`."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the file. Raises OSError, ValueError or KeyError for one that is none, or that this JAX cannot read."""
        with np.load(path) as file:
            layout = json.loads(file[LAYOUT].tobytes())
            self.sizes: list[int] = layout["sizes"]
            self.inputs: dict[str, tuple[str, list[int], bool]] = layout["inputs"]
            """Dtype and shape of each input, of the largest size, and whether its first axis is that of the rows."""
            programs = {n: bytearray(file[f"{PROGRAM}{n}"].tobytes()) for n in self.sizes}
            stored = {n.removeprefix(WEIGHT): file[n] for n in file.files if n.startswith(WEIGHT)}
        try:
            self._programs = {n: export.deserialize(program) for n, program in programs.items()}
        except Exception as error:  # JAX has no exception of its own for another version of its format
            raise ValueError(
                f"{path} was written with JAX {layout['jax']}, and JAX {jax.__version__} cannot read it; install that "
                f"release, or export the run again ({type(error).__name__}: {error})"
            ) from error
        self._weights = {n: jnp.asarray(_from_stored(a, layout["dtypes"].get(n))) for n, a in stored.items()}

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the outputs of any number of rows, by the smallest program that holds them, or several calls.

        Raises ValueError for inputs with other names.
        """
        if inputs.keys() != self.inputs.keys():
            raise ValueError(f"the inputs are {', '.join(inputs)}, expected {', '.join(self.inputs)}")
        names = [name for name, (_, _, is_rows) in self.inputs.items() if is_rows]
        count = len(inputs[names[0]]) if names else self.sizes[-1]
        largest = self.sizes[-1]
        parts = [self._part(inputs, names, start, min(start + largest, count)) for start in range(0, count, largest)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _part(self, inputs: Mapping[str, Any], names: list[str], start: int, end: int) -> dict[str, np.ndarray]:
        size = self.sizes[bisect.bisect_left(self.sizes, end - start)]
        rows = np.minimum(np.arange(start, start + size), end - 1)  # the last row fills the program
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        arrays |= {name: arrays[name][rows] for name in names}
        typed = {name: jnp.asarray(array, self.inputs[name][0]) for name, array in arrays.items()}
        outputs = jax.jit(self._programs[size].call)(self._weights, typed)
        return {name: np.asarray(array)[: end - start] for name, array in outputs.items()}


def as_stored(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns arrays as NumPy's own types, and the types of those that have another one, such as bfloat16."""
    other = {name: array.dtype.name for name, array in arrays.items() if array.dtype.kind == "V"}
    stored = dict(arrays)
    for name in other:
        stored[name] = arrays[name].view(f"u{arrays[name].itemsize}")
    return stored, other


def _from_stored(array: np.ndarray, dtype: str | None) -> np.ndarray:
    return array if dtype is None else array.view(jnp.dtype(dtype))
