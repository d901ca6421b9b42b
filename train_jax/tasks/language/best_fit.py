"""Best-fit packing: rows of whole documents, which begin with a document and are filled with the start of another.

A row takes the longest document of a buffer that fits, again and again. If none fits, the shortest one is cut to the
rest of the row, and its remaining tokens are not used. Which documents a row has depends on their lengths and their
order alone, so that every host computes the same rows.
"""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from train_jax.tasks.language.batches import Batch
from train_jax.tasks.language.text_set import TokenStream

BUFFER_DOCUMENTS = 1000
"""The buffer is filled before each choice until it has at least as many documents, as in the published loader."""
REFILL_DOCUMENTS = 128
"""Documents that enter the buffer together; fewer at the end of the data."""

Part = tuple[int, int]
"""The number of a document, and how many of its first tokens are used."""


@dataclass
class Packer:
    """The state of packing between two rows."""

    lengths: np.ndarray
    """Tokens of each document, in the order of the data, which repeats without end."""
    capacity: int
    """Tokens of a row."""
    row: int = 0
    """Rows packed so far."""
    read: int = 0
    """Documents that have entered the buffer so far."""
    buffer: list[tuple[int, int]] = field(default_factory=list)
    """Length and number of each document, sorted; the number counts on when the data repeat."""

    def copy(self) -> Packer:
        return Packer(self.lengths, self.capacity, self.row, self.read, self.buffer.copy())

    def next_row(self) -> list[Part]:
        """Packs a row."""
        parts, free = [], self.capacity
        while free:
            self._refill()
            length, number = self.buffer.pop(self._choice(free))
            used = min(length, free)
            parts.append((number % len(self.lengths), used))
            free -= used
        self.row += 1
        return parts

    @property
    def used(self) -> int:
        """Documents used so far, also those that were cut."""
        return self.read - len(self.buffer)

    def _choice(self, free: int) -> int:
        """Returns the place of the longest document that fits, or of the shortest; the first read of equal ones."""
        fitting = bisect.bisect_left(self.buffer, (free + 1, 0))
        if fitting == 0:
            return 0
        return bisect.bisect_left(self.buffer, (self.buffer[fitting - 1][0], 0))

    def _refill(self) -> None:
        if len(self.buffer) >= BUFFER_DOCUMENTS:
            return
        while len(self.buffer) < BUFFER_DOCUMENTS:
            first = self.read % len(self.lengths)
            added = self.lengths[first : first + REFILL_DOCUMENTS].tolist()
            self.buffer += [(length, self.read + n) for n, length in enumerate(added)]
            self.read += len(added)
        self.buffer.sort()


class BestFit:
    """The rows of a split. A row is packed after all rows before it, which takes microseconds for each document."""

    def __init__(self, stream: TokenStream, bos: int, seq_len: int):
        """`bos` is the token that begins every document; it occurs nowhere else. Reads all tokens once."""
        self._stream, self._seq_len = stream, seq_len
        places, position = [], 0
        for chunk in stream.chunks():
            places.append(np.flatnonzero(chunk == bos) + position)
            position += len(chunk)
        self._starts = np.concatenate(places)
        self._lengths = np.diff(self._starts, append=position)
        self._packer = Packer(self._lengths, seq_len + 1)
        self._lock = threading.Lock()

    def batch(self, *, step: int, rows: int, shard: tuple[int, int]) -> Batch:
        """Returns shard `(index, count)` of the batch at `step`."""
        index, count = shard
        first, last = step * rows + index * rows // count, step * rows + (index + 1) * rows // count
        tokens = np.stack([self._tokens(parts) for parts in self._parts(first, last)])
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    @cached_property
    def rows_per_epoch(self) -> int:
        """The number of rows that use as many documents as the split has."""
        packer = Packer(self._lengths, self._seq_len + 1)
        while packer.used < len(self._lengths):
            packer.next_row()
        return packer.row

    def _parts(self, first: int, last: int) -> list[list[Part]]:
        """Returns what rows `first` to `last - 1` consist of; earlier rows are packed again if they are asked for."""
        with self._lock:
            if self._packer.row > first:
                self._packer = Packer(self._lengths, self._seq_len + 1)
            while self._packer.row < first:
                self._packer.next_row()
            packer = self._packer.copy()  # the same rows may be asked for again
        return [packer.next_row() for _ in range(first, last)]

    def _tokens(self, parts: list[Part]) -> np.ndarray:
        return np.concatenate([self._stream.take(int(self._starts[number]), used) for number, used in parts])
