"""A `.npy` file that can be larger than memory; threads write its rows in any order."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

CHUNK_BYTES = 2**24


class RowFile:
    """A `.npy` file of a given shape. Rows that are not written are zero."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: np.dtype):
        self.path, self.shape, self.dtype = path, shape, dtype
        self._row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            self._start = file.tell()
            file.truncate(self._start + shape[0] * self._row_bytes)
        self._handle = os.open(path, os.O_RDWR)

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self._row_bytes

    def write(self, first_row: int, rows: Shaped[np.ndarray, "rows ..."]) -> None:
        """Writes consecutive rows, starting at `first_row`."""
        if rows.dtype != self.dtype or rows.shape[1:] != self.shape[1:] or first_row + len(rows) > self.shape[0]:
            raise ValueError(f"{rows.dtype} {rows.shape} at row {first_row} of {self.dtype} {self.shape}")
        left = np.ascontiguousarray(rows).data.cast("B")
        place = self._start + first_row * self._row_bytes
        while left:
            written = os.pwrite(self._handle, left, place)
            left, place = left[written:], place + written

    def chunks(self) -> Iterator[bytes]:
        """Yields the bytes of the array in order."""
        # Not memory-mapped, because mapped pages would count as memory of this process.
        for start in range(0, self.nbytes, CHUNK_BYTES):
            yield os.pread(self._handle, min(CHUNK_BYTES, self.nbytes - start), self._start + start)

    def close(self) -> None:
        os.close(self._handle)
