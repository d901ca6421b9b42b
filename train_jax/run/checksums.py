"""Checksums of arrays that do not depend on how their rows are distributed over devices and processes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from train_jax.runtime.processes import sum_over_processes

_MODULUS = 2**32
_THREADS = 4


def checksums(arrays: Mapping[str, Any]) -> dict[str, int]:
    """A 32-bit checksum of each array, the same on every process.

    It is the sum of the CRC-32 of each row (entry of the first axis) times an odd number for its position, so that the
    processes that hold different rows of an array add theirs, and a change in one row always changes it. NumPy arrays
    and arrays that a process has whole are taken as they are. Collective if any array spans several processes.
    """
    with ThreadPoolExecutor(_THREADS) as pool:  # the loop waits for this, and zlib releases the interpreter's lock
        sums = dict(zip(arrays, pool.map(_of_array, arrays.values()), strict=True))
    spread = [name for name, array in arrays.items() if _is_spread(array)]
    if spread:
        totals = sum_over_processes("checksums", [sums[name] for name in spread])
        sums |= {name: total % _MODULUS for name, total in zip(spread, totals, strict=True)}
    return sums


def _is_spread(array: Any) -> bool:
    return isinstance(array, jax.Array) and not (array.is_fully_addressable or array.is_fully_replicated)


def _of_array(array: Any) -> int:
    if _is_spread(array):
        return sum(_of_rows(np.asarray(s.data), s.index[0].start or 0) for s in _distinct(array)) % _MODULUS
    return _of_rows(np.asarray(array), 0)


def _of_rows(array: np.ndarray, first_row: int) -> int:
    if not array.size:
        return 0
    rows = np.ascontiguousarray(array).reshape(len(array) if array.ndim else 1, -1)
    parts = (zlib.crc32(row.data) for row in rows.view(np.uint8))
    return sum((2 * (first_row + i) + 1) * part for i, part in enumerate(parts)) % _MODULUS


def _distinct(array: jax.Array) -> list[Any]:
    """This process's shards, those that repeat another one left out."""
    return [shard for shard in array.addressable_shards if shard.replica_id == 0]
