"""Batches of token streams, as pure functions of the stream, the step and the shard.

Stream packing cuts the stream where a row ends: a row may begin inside a document, and contain several. The rows of a
batch follow each other in the data, or are drawn from all of it.

Best-fit packing has rows of whole documents, which begin with a document and are filled with the start of another. A
row takes the longest document of a buffer that fits, again and again. If none fits, the shortest one is cut to the rest
of the row, and its remaining tokens are not used. Which documents a row has depends on their lengths and their order
alone, so that every host computes the same rows.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from models_torch.gpt import IGNORED_TARGET
from train_jax.tasks.language.text_set import TokenStream

Batch = dict[str, np.ndarray]
"""`inputs` and `targets`, (rows, seq_len), int32; the target of a position is the token after it."""


BUFFER_DOCUMENTS = 1000
"""The buffer is filled before each choice until it has at least as many documents, as in the published loader."""
REFILL_DOCUMENTS = 128
"""Documents that enter the buffer together; fewer at the end of the data."""

Part = tuple[int, int]
"""The number of a document, and how many of its first tokens are used."""


def tokens_per_step(rows: int, seq_len: int) -> int:
    """Returns the number of tokens that a step takes from the stream; the last one is only a target.

    The published loader takes as many, so one process of it has the same batches.
    """
    return rows * seq_len + 1


def stream_batch(stream: TokenStream, *, step: int, rows: int, seq_len: int, shard: tuple[int, int]) -> Batch:
    """Returns shard `(index, count)` of the batch at `step`; after the end of the stream follows its beginning."""
    places = _places(0, rows, shard)
    start = step * tokens_per_step(rows, seq_len) + places.start * seq_len
    tokens = stream.take(start, len(places) * seq_len + 1)
    return {"inputs": tokens[:-1].reshape(-1, seq_len), "targets": tokens[1:].reshape(-1, seq_len)}


def _places(step: int, rows: int, shard: tuple[int, int]) -> range:
    """Returns which rows of all batches are those of a shard at `step`."""
    index, count = shard
    return range(step * rows + index * rows // count, step * rows + (index + 1) * rows // count)


def _shifted(rows: Iterable[np.ndarray]) -> Batch:
    """Returns the batch of rows with one token more than inputs."""
    tokens = np.stack(list(rows))
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


@dataclass(frozen=True)
class ShuffledRows:
    """The rows of a stream in a random order, which is another one in every epoch.

    In an epoch every token is a target once, except the first one and those after the last whole row.
    """

    stream: TokenStream
    seq_len: int
    seed: int

    @property
    def rows_per_epoch(self) -> int:
        return (len(self.stream) - 1) // self.seq_len

    def batch(self, *, step: int, rows: int, shard: tuple[int, int]) -> Batch:
        """Returns shard `(index, count)` of the batch at `step`."""
        places = _places(step, rows, shard)
        return _shifted(self.stream.take(self._row(place) * self.seq_len, self.seq_len + 1) for place in places)

    def _row(self, place: int) -> int:
        epoch, within = divmod(place, self.rows_per_epoch)
        return int(_order(self.rows_per_epoch, self.seed, epoch)[within])


@functools.lru_cache(maxsize=2)  # a batch may belong to two epochs
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def count_rows(stream: TokenStream, seq_len: int) -> int:
    """Returns the number of rows that contain every token of the stream once as a target, except the first token."""
    return -(-(len(stream) - 1) // seq_len)


def eval_batches(
    stream: TokenStream, *, rows: int, seq_len: int, limit: int, shard: tuple[int, int]
) -> Iterator[Batch]:
    """Yields this shard of each batch with the first `limit` rows of the stream (0: all).

    Rows after the end have only targets that are ignored, as have the positions after the last token.
    """
    index, count = shard
    available = count_rows(stream, seq_len)
    total = min(limit or available, available)
    local = rows // count
    for start in range(0, total, rows):
        first = start + index * local
        filled = max(0, min(local, total - first))
        batch = {
            "inputs": np.zeros((local, seq_len), np.int32),
            "targets": np.full((local, seq_len), IGNORED_TARGET, np.int32),
        }
        if filled:
            size = min(filled * seq_len + 1, len(stream) - first * seq_len)
            tokens = stream.take(first * seq_len, size)
            batch["inputs"].reshape(-1)[: size - 1] = tokens[:-1]
            batch["targets"].reshape(-1)[: size - 1] = tokens[1:]
        yield batch


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
        return _shifted(self._tokens(parts) for parts in self._parts(_places(step, rows, shard)))

    @cached_property
    def rows_per_epoch(self) -> int:
        """The number of rows that use as many documents as the split has."""
        packer = Packer(self._lengths, self._seq_len + 1)
        while packer.used < len(self._lengths):
            packer.next_row()
        return packer.row

    def _parts(self, places: range) -> list[list[Part]]:
        """Returns what the rows consist of; earlier rows are packed again if they are asked for."""
        with self._lock:
            if self._packer.row > places.start:
                self._packer = Packer(self._lengths, self._seq_len + 1)
            while self._packer.row < places.start:
                self._packer.next_row()
            packer = replace(self._packer, buffer=self._packer.buffer.copy())  # the same rows may be asked for again
        return [packer.next_row() for _ in places]

    def _tokens(self, parts: list[Part]) -> np.ndarray:
        return np.concatenate([self._stream.take(int(self._starts[number]), used) for number, used in parts])
